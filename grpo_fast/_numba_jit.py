# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""How functions are compiled, and when what is kept on disk of them is renewed.

Numba keeps a kernel until the file it stands in changes or one of the values it closes over does. Kernels here are
made of several files, so each closes over ``STAMP``, a hash of all of these. What else a kept kernel closes over must
look the same in every process: a number, or a function of a module, not a dispatcher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit
from numba.core import types
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import make_array, populate_array

from ._version import __version__

# Per-instruction flags do not spread to what is inlined, so every function states its own.
# _nrt=False: no reference counts, which cost more than the arithmetic of a block.
options: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract"}, "_nrt": False}
sums = {"fastmath": {"contract", "reassoc", "nsz"}}  # for reductions, and for nothing that holds exp
called: dict[str, Any] = options | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # what only kernels call
plain: dict[str, Any] = {"error_model": "numpy", "nogil": True}  # exactly as written, and it may allocate

inner = njit(**called)
reduction = njit(**called | sums)
driver = njit(**called, inline="always")  # LLVM optimises all of a call tree again at every level of it
formula = register_jitable(**called, forceinline=True)  # stays a Python function, by which loops are kept
exactly = njit(**plain)
exact_formula = register_jitable(**plain)
sum_formula = register_jitable(**plain | sums)


def _stamp() -> str:
    """A hash of the sources of all kernels; where there are none to read, the version."""
    digest = hashlib.sha256(__version__.encode())
    here = Path(__file__).parent
    for path in sorted([*here.glob("_numba_*.py"), here / "_contract.py"]):
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()


STAMP = _stamp()


def kernel(body: Callable[..., Any]) -> Any:
    """Compiled for callers from Python and kept; ``body`` is an ``exact_formula`` under a name of its own."""
    stamp = STAMP

    @njit(**plain, cache=True)
    def call(*arguments):
        stamp  # noqa: B018
        return body(*arguments)

    return call


#: numbers of the plan, scratch, size, weight, another number, row of statistics -> a sum; arrays by their addresses.
LOOP = types.float64(types.int64, types.int64, types.uint64, types.float64, types.float64, types.int64)


def loop(keep: bool = True) -> Any:
    """A decorator: one loop over a block, compiled apart from the kernel that calls it by its address."""
    return cfunc(LOOP, **(options if keep else plain) | sums, cache=keep)


@intrinsic
def call_loop(typing_context, address, numbers, s, size, weight, other, row):
    """Call what :func:`loop` made."""

    def build(context, builder, signature, arguments):
        long, double = ir.IntType(64), ir.DoubleType()
        function = ir.FunctionType(double, [long, long, long, double, double, long])
        return builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])

    return LOOP.return_type(types.int64, *LOOP.args), build


@intrinsic
def apart(typing_context):
    """Called in a function: keeps LLVM from inlining it, which takes minutes for loops that are vectorised already."""

    def build(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def view(typing_context, address, n, dtype):
    """The n values at an address: one compilation whichever arrays are there, and no reference counts."""
    array = types.Array(dtype.dtype, 1, "C")

    def build(context, builder, signature, arguments):
        view = make_array(array)(context, builder)
        itemsize = context.get_constant(types.intp, array.dtype.bitwidth // 8)
        data = builder.inttoptr(arguments[0], view.data.type)
        populate_array(view, data, [arguments[1]], [itemsize], itemsize, None)
        return view._getvalue()

    return array(types.int64, types.int64, dtype), build
