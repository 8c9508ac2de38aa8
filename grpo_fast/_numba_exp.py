# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""exp of the kernels, and the integers that sort as floats do."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32
from numba.extending import overload

from . import _contract as c
from ._numba_jit import inner, options


def _make_exp(real: Any, integer: Any, shift: int, bias: int, magic: float, log2e: str, ln2_hi: str, ln2_lo: str,
              tail: str) -> Any:  # fmt: skip
    """``(x, bound) -> (e, e - 1, e - 1 - x)`` with e = exp(x held in +-bound), the last two to full precision.

    exp(x) = 2^n (1 + p),  p = r + r^2 q(r),  r = x - n ln2,  and n = 0 for |x| <= 1, so that there
    p and r^2 q(r) are themselves what is asked for. Adding ``magic`` rounds to an integer, which
    then sits in the low bits. NaN stays NaN. Constants: ``tools/exp_coefficients.py``.
    """
    round_, to_log2, hi, lo = real(magic), real(log2e), real(ln2_hi), real(ln2_lo)
    q = tuple(real(k) for k in tail.split())
    top, zero, one = len(q) - 1, real(0), real(1)
    shift, bias = integer(shift), integer(bias)

    @inner
    def exp(x, bound):
        held = bound if x > bound else x
        held = -bound if held < -bound else held
        t = (held * to_log2 if abs(held) > one else zero) + round_
        n = t - round_
        r = (held - n * hi) - n * lo
        tail = q[top]
        for k in range(top - 1, -1, -1):
            tail = tail * r + q[k]
        tail *= r * r
        p = r + tail
        e = integer((real(t).view(integer) + bias) << shift).view(real) * (one + p)
        minus_1 = e - one
        return e, p if n == zero else minus_1, tail if n == zero else minus_1 - x

    return exp


#: At most 2.6 ULP over [-87, 87], all floats tried: just above -1. For x >= 0 at most 0.95.
exp32 = _make_exp(
    np.float32, np.int32, 23, 127, 12582912.0, "1.44269502", "6.93145752e-01", "1.42860677e-06",
    """5.00000000e-01 1.66666672e-01 4.16667163e-02 8.33329652e-03
       1.38858333e-03 1.98469206e-04 2.53324160e-05 2.75523303e-06""")  # fmt: skip
#: At most 2.2 ULP over [-300, 300], sampled.
exp64 = _make_exp(
    np.float64, np.int64, 52, 1023, 6755399441055744.0,
    "1.4426950408889634", "6.9314718055989033e-01", "5.4979230187083712e-14",
    """5.0000000000000000e-01 1.6666666666666663e-01 4.1666666666666276e-02 8.3333333333342526e-03
       1.3888888888965120e-03 1.9841269840591670e-04 2.4801587252021241e-05 2.7557319437104723e-06
       2.7557334036181729e-07 2.5052077289061759e-08 2.0874521162171655e-09 1.6060883305661821e-10
       1.1636484633620386e-11 7.6482264426699210e-13""")  # fmt: skip


def exp(x: float, bound: float) -> tuple[float, float, float]:
    """exp(x), exp(x) - 1 and exp(x) - 1 - x in the dtype of x; see :func:`_make_exp`."""
    raise NotImplementedError("for kernels")


@overload(exp, jit_options=options)
def _exp(x, bound):
    of_dtype = exp32 if x == float32 else exp64
    return lambda x, bound: of_dtype(x, bound)


BOTTOM32, TOP64 = -c.EXP_BOUND[np.dtype(np.float32)], c.EXP_BOUND[np.dtype(np.float64)]
TOP32 = 40.0  # of what float32 multiplies with weights and adds up; see LIMITS


@inner
def _fading_exp32(x):
    e = exp32(x, np.float32(-BOTTOM32))[0]
    e = np.float32(0) if x < np.float32(BOTTOM32) else e
    return np.float32(np.inf) if x > np.float32(TOP32) else e


@inner
def _fading_exp64(x):
    bound = 700.0  # where the exponent of what exp64 puts together ends
    e = exp64(TOP64 if x > TOP64 else x, bound)[0]
    return 0.0 if x < -bound else e


def fading_exp(x: float) -> float:
    """exp that goes on to 0 from below and is held at exp(300) from above; in float32 inf from exp(40) on."""
    raise NotImplementedError("for kernels")


@overload(fading_exp, jit_options=options)
def _fading_exp(x):
    of_dtype = _fading_exp32 if x == float32 else _fading_exp64
    return lambda x: of_dtype(x)


def _make_ordered(real: Any, integer: Any) -> tuple[Any, Any]:
    """The integer that sorts as the number does, and back: min and max of integers vectorise."""
    sign, others = integer(np.iinfo(integer).bits - 1), integer(np.iinfo(integer).max)

    @inner
    def flip(bits):  # the others where the sign is set; Numba computes in int64, and then there are fewer lanes
        return integer(bits ^ integer(integer(bits >> sign) & others))

    @inner
    def to(x):
        return flip(real(x).view(integer))

    @inner
    def back(n):
        return integer(flip(n)).view(real)

    return to, back


_ordered32, _unordered32 = _make_ordered(np.float32, np.int32)
_ordered64, _unordered64 = _make_ordered(np.float64, np.int64)


def ordered(x: float) -> int:
    raise NotImplementedError("for kernels")


def unordered(n: int, like: float) -> float:
    raise NotImplementedError("for kernels")


@overload(ordered, jit_options=options)
def _ordered(x):
    of_dtype = _ordered32 if x == float32 else _ordered64
    return lambda x: of_dtype(x)


@overload(unordered, jit_options=options)
def _unordered(n, like):
    of_dtype = _unordered32 if like == float32 else _unordered64
    return lambda n, like: of_dtype(n)
