"""A user's own surrogate.

:func:`prepare` makes the kernel's loop of it, :func:`check_surrogate_gradient` tries its slopes.

Such a function is scalar, ``f(lam, logp, old_logp, A, params) -> (value, d/dlam, d/dlogp)``, and takes the place of a
row of ``tables.SURROGATES``. Numba compiles it into the loop over tokens, so none of it runs in Python.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends, _numpy, _numpy_base
from . import _validate as check
from ._contract import STATS, Batch, Double

#: The function: (lam, logp, old_logp, A, params) -> (value, d/dlam, d/dlogp).
Surrogate = Callable[..., Any]
Params = tuple[float, float, float, float]

ARGUMENTS = ("lam", "logp", "old_logp", "A", "params")
_SHAPE = f"f({', '.join(ARGUMENTS)}) -> (value, d/dlam, d/dlogp)"
_N_PARAMS = 4  # p0..p3 of a Plan

#: (lam, logp, old_logp, A) at which every function is tried: on policy, off it both ways, near and far, either sign
#: of A, and none. A log-probability of 0 is what the kernels have where a token is masked, too.
_NEAR = ((0.0, -0.5), (0.0, 0.0), (0.7, -0.1), (-1.2, -3.0))
_FAR = tuple((lam, min(lam, 0.0) - 0.5) for size in (10.0, 100.0, 300.0) for lam in (size, -size))
_TRIALS = tuple((lam, logp, logp - lam, A) for (lam, logp), A in itertools.product(_NEAR + _FAR, [1.5, -0.5, 0.0]))


@dataclass(frozen=True, slots=True, eq=False)
class Custom:
    """A surrogate of the user, ready for ``policy_loss(..., custom=)`` of ``kernels``."""

    name: str
    params: Params  # p0..p3 of the plan
    kernels: Any  # the backend's module
    _function: Surrogate = field(repr=False)
    _adapted: Any = field(repr=False)

    def loop(self, dtype: Any) -> Any:
        """The loop over a block in this dtype, compiled when first asked for."""
        return _loop(self._adapted, dtype)

    def verify(self, batch: Batch, stats: Double) -> None:
        """Raise where the function gave NaN or inf, or raised, although it got numbers.

        Raises
        ------
        ValueError  naming the first such token, or its completion where only the kernel's own arithmetic gets there
        """
        values, non_finite = stats[:, STATS.index("surrogate")], stats[:, STATS.index("non_finite")]
        bad = np.flatnonzero(~np.isfinite(values) & (non_finite == 0))
        if len(bad) == 0:
            return
        i = int(bad[0])
        what, where = "gives NaN or inf", f"completion {i}"
        counted = _numpy_base._counted(batch.mask, batch.start[i], batch.stop[i])
        tokens = _numpy._gather(batch, i, counted)
        slots = batch.start[i] + np.flatnonzero(counted)
        for t, logp, old_logp, A in zip(slots, tokens.logp, tokens.old_logp, tokens.A, strict=True):
            point = (float(logp - old_logp), float(logp), float(old_logp), float(A))
            try:
                fine = all(map(math.isfinite, _call(self._function, point, self.params)))
            except Exception as error:  # whatever the user's function raises, it is quoted
                fine = False
                what = f"raises {type(error).__name__} ({error})"
            if not fine:
                where = f"token {t} of completion {i}, {_at(point, self.params)}"
                break
        raise ValueError(
            f"loss_type: {self.name} {what} at {where}; let it return finite numbers for every finite input, "
            "such as exp(min(lam, 20))"
        )


def prepare(
    function: Surrogate, loss_params: float | Sequence[float] | None = None, backend: str | None = None
) -> Custom:
    """Check and compile a surrogate of the user's.

    Parameters
    ----------
    function : a Python function or one that ``numba.njit`` made, ``f(lam, logp, old_logp, A, params)``
        Scalars, and ``params`` a tuple of four floats; returns ``(value, d/dlam, d/dlogp)``, three finite numbers.
        In float32 the scalars are float32, and blocks of tokens whose results do not fit are done over in float64.
        What it uses from outside is read once, when it compiles. Compiled forms are kept for as long as the process
        runs, for the last 64 functions: define the function once, not in every step. An index out of range is found
        in the function itself; in compiled ones that it calls only where ``njit(boundscheck=True)`` made them.
    loss_params : up to four numbers; missing ones are 0, but a function that reads ``params`` needs one at least
    backend : None, or "numba", the only one that can

    Returns
    -------
    Custom
        With ``params`` for the plan's p0..p3, and the ``kernels`` whose ``policy_loss`` takes it as ``custom``.

    Raises
    ------
    ValueError, TypeError
        Where it is no such function; where it raises, or gives NaN or inf, on plain numbers; where another backend is
        asked for here, by ``set_backend`` or by the environment.
    BackendUnavailable  where Numba is missing
    """
    python = _python_function(function)
    params = _parameters("loss_params", python, loss_params)
    asked = backend or (_backends.default() if _backends.is_set() or os.environ.get("GRPO_FAST_BACKEND") else None)
    if asked not in (None, "numba"):
        raise ValueError(
            f"backend: a function as loss_type runs on 'numba' only, got {asked!r}; "
            "pass backend='numba', or a name as loss_type"
        )
    kernels = _backends.get("numba")
    for point in _TRIALS:
        _try(python, point, params)
    adapted = _adapted(function)
    _loop(adapted, np.float64)  # which every batch needs
    return Custom(_name(python), params, kernels, python, adapted)


def _python_function(function: Surrogate) -> Surrogate:
    """The Python function, of a compiled one too, if it can be a surrogate at all."""
    if not callable(function):
        raise TypeError(f"loss_type: expected a name or a function, got {function!r}; pass {_SHAPE}")
    python = getattr(function, "py_func", function)
    if not inspect.isfunction(python):
        raise TypeError(
            f"loss_type: Numba compiles functions, and {_name(python)} is a {type(python).__name__}; "
            "write it with def or lambda"
        )
    try:
        inspect.signature(python).bind(*ARGUMENTS)
    except TypeError:
        raise TypeError(
            f"loss_type: {_name(python)}{inspect.signature(python)} does not take the {len(ARGUMENTS)} arguments of "
            f"{_SHAPE}; give it these, the last a tuple of {_N_PARAMS} floats"
        ) from None
    if any(instruction.opname == "RAISE_VARARGS" for instruction in dis.get_instructions(python)):
        raise ValueError(
            f"loss_type: {_name(python)} raises (or asserts), which a loop over tokens cannot; "
            "return math.nan there instead, and the loss raises"
        )
    return python


def _parameters(argument: str, python: Surrogate, values: float | Sequence[float] | None) -> Params:
    try:
        given = [] if values is None else np.ravel(np.asarray(values)).tolist()
    except ValueError:
        raise ValueError(f"{argument}: {values!r} is no list of numbers; pass up to four numbers") from None
    if len(given) > _N_PARAMS:
        raise ValueError(
            f"{argument}: at most {_N_PARAMS} numbers, got {len(given)}; write the others into the function"
        )
    for k, value in enumerate(given):
        try:
            good = isinstance(value, int | float) and math.isfinite(value)
        except OverflowError:
            good = False
        if not good:
            shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:37]}..."
            raise ValueError(f"{argument}: entry {k} is {shown}; pass finite numbers")
    if not given and (name := _params_read(python)):
        raise ValueError(f"{argument}: {_name(python)} reads {name} and none were given; pass up to four numbers")
    p0, p1, p2, p3 = (*map(float, given), *(0.0,) * (_N_PARAMS - len(given)))
    return p0, p1, p2, p3


def _params_read(python: Surrogate) -> str | None:
    """The name of the fifth argument if the function uses what is passed in it."""
    code = python.__code__
    if code.co_argcount < len(ARGUMENTS):  # *arguments, say
        return None
    name = str(code.co_varnames[len(ARGUMENTS) - 1])
    for instruction in dis.get_instructions(code):
        # newer Pythons load or store two names at once, and name both
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if name in names and instruction.opname.startswith(("LOAD_", "STORE_")):
            return name if instruction.opname.startswith("LOAD_") else None
    return None


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or function)


def _at(point: tuple[float, ...], params: Params) -> str:
    lam, logp, old_logp, A = point
    return f"lam={lam:g}, logp={logp:g}, old_logp={old_logp:g}, A={A:g}, params={params}"


def _call(function: Surrogate, point: tuple[float, ...], params: Params) -> tuple[float, float, float]:
    value, lam_slope, logp_slope = function(*point, params)
    return float(value), float(lam_slope), float(logp_slope)


def _try(function: Surrogate, point: tuple[float, ...], params: Params) -> None:
    """Call it, and raise where that or what it returns is not as it must be."""
    name, at = _name(function), _at(point, params)
    try:
        returned = function(*point, params)
    except Exception as error:
        raise ValueError(
            f"loss_type: {name} raises {type(error).__name__} ({error}) at {at}; "
            "it must give three finite numbers for every finite input"
        ) from error
    numbers = returned if isinstance(returned, tuple) else ()
    if len(numbers) != 3 or not all(isinstance(x, int | float | np.number | np.bool_) for x in numbers):
        raise TypeError(
            f"loss_type: {name} returns {returned!r} at {at}; return a tuple of three numbers, (value, d/dlam, d/dlogp)"
        )
    if not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"loss_type: {name} returns {returned!r} at {at}; it must give finite numbers for every finite input"
        )


@functools.lru_cache(maxsize=64)
def _adapted(function: Surrogate) -> Any:
    """In the shape of the formulas of ``_numba_formulas``, and in the dtype it is called with."""
    from numba import njit

    from ._numba_jit import plain

    python = getattr(function, "py_func", function)
    # compiled once more, because division by 0 must give inf here rather than raise
    own = {name: value for name, value in getattr(function, "targetoptions", {}).items() if name == "fastmath"}
    compiled = njit(**plain | own, boundscheck=True)(python)

    @njit(**plain)
    def adapted(lam, r, logp, old_logp, a, p, bound):  # type: ignore[no-untyped-def]
        real = type(r)
        # an exception cannot leave the loop: it would be printed, and the block's memory left as it was
        try:
            value, lam_slope, logp_slope = compiled(lam, logp, old_logp, a, p)
        except Exception:
            return real(np.nan), real(np.nan), real(np.nan)
        # what is too much to be weighed and added up in this dtype, or NaN, makes the sum of the block NaN
        beyond = 1e20 if real(1e60) == np.inf else 1e150
        most = max(abs(value), abs(lam_slope), abs(logp_slope))
        fits = (most <= beyond) & (value == value) & (lam_slope == lam_slope) & (logp_slope == logp_slope)
        return real(value) if fits else real(np.nan), real(lam_slope), real(logp_slope)

    adapted.py_func.__name__ = _name(python)  # for errors
    return adapted


@functools.lru_cache(maxsize=128)
def _loop(adapted: Any, dtype: Any) -> Any:
    from numba.core.errors import NumbaError

    from ._numba_loops import surrogate_loop

    try:
        return surrogate_loop(adapted, dtype, keep=False)
    except NumbaError as error:
        reason = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise TypeError(
            f"loss_type: Numba cannot compile {_name(adapted.py_func)} for {np.dtype(dtype)}: {' '.join(reason[:4])}; "
            "use numbers, the math module, if and for, and other functions that numba.njit made"
        ) from error


# ---- are the slopes those of the value? --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What :func:`check_surrogate_gradient` found.

    ``max_error`` is the largest |slope - difference| / max(1, |difference|) of the ``n_compared`` slopes, met at
    ``worst``: the point, ``slope`` ("d/dlam" or "d/dlogp"), what the function ``claimed`` and the ``difference``.
    ``n_kinks`` slopes were left out, at points within a step of a kink or jump of the value. ``hint`` says what to
    do where it is not ``ok``.
    """

    ok: bool
    max_error: float
    worst: dict[str, Any]
    n_compared: int
    n_kinks: int
    tolerance: float
    hint: str = ""

    def __str__(self) -> str:
        compared = f"{self.n_compared} slopes compared, {self.n_kinks} at kinks left out"
        if not self.worst:
            return compared
        point = _at(tuple(self.worst[name] for name in ARGUMENTS[:4]), self.worst["params"])
        return (
            f"{compared}; largest error {self.max_error:.3g} (tolerance {self.tolerance:g}): {self.worst['slope']} at "
            f"{point} is {self.worst['claimed']:.9g}, the value's differences say {self.worst['difference']:.9g}"
            + (f"; {self.hint}" if self.hint else "")
        )


_STEP = 1e-5  # of the central differences: its square and 1e-16 over it are both about 1e-10


def check_surrogate_gradient(
    function: Surrogate,
    params: float | Sequence[float] | None = None,
    *,
    detached: Callable[..., float] | None = None,
    seed: int = 0,
    n: int = 1000,
    tolerance: float = 1e-6,
    raise_error: bool = False,
) -> GradientReport:
    """Compare the two slopes of a surrogate with central differences of its value.

    The function is called in float64, in Python, at random log-probabilities and log-ratios, near 0 and far from it,
    for advantages of both signs. ``lam`` and ``logp`` are two variables: each is moved with the other held.

    Parameters
    ----------
    function : ``f(lam, logp, old_logp, A, params) -> (value, d/dlam, d/dlogp)``, as for ``grpo_loss``
    params : its parameters, up to four numbers; needed where the function reads them
    detached : ``g(lam, logp, old_logp, A, params, lam0, logp0) -> value``, for a surrogate with parts that no
        gradient is to pass through: the same value, with ``lam0`` and ``logp0`` in those parts. Its differences in
        ``lam`` and ``logp`` alone are what the slopes are compared with, and with all of them equal its value must be
        the function's.
    seed : integer >= 0, of the points
    n : integer >= 1, of points
    tolerance : on |slope - difference| / max(1, |difference|)
    raise_error : raise rather than report what is beyond it

    Returns
    -------
    GradientReport

    Raises
    ------
    ValueError, TypeError
        With the worst point, if asked to; where it is no such function, or its parameters are left out; where
        ``detached`` is not the function's value; where most points are at kinks, and nothing could be said.

    Notes
    -----
    Differences cannot know what is meant to be detached: without ``detached`` a surrogate that detaches anything, such
    as cispo, is reported as wrong. At kinks and jumps, found by differences to the left and to the right that
    disagree, any slope is let pass; they are counted in ``n_kinks``.

    Examples
    --------
    >>> import math, grpo_fast as gf
    >>> def reinforce_is(lam, logp, old_logp, A, params):
    ...     r = math.exp(lam)
    ...     return -A * r, -A * r, 0.0
    >>> gf.check_surrogate_gradient(reinforce_is).ok
    True
    """
    python = _python_function(function)
    p = _parameters("params", python, params)
    seed, n = check.integer("seed", seed, least=0), check.integer("n", n, least=1)
    tolerance = check.number("tolerance", tolerance, least=0.0)
    for point in _TRIALS:
        _try(python, point, p)

    largest, worst, compared, kinks = 0.0, dict[str, Any](), 0, 0
    for point in _points(seed, n):
        value, *slopes = _call(python, point, p)
        _same_value(python, detached, point, p, value)
        for k, (name, claimed) in enumerate(zip(("d/dlam", "d/dlogp"), slopes, strict=True)):
            difference = _difference(python, detached, point, p, k)
            if difference is None:
                kinks += 1
                continue
            compared += 1
            error = abs(claimed - difference) / max(1.0, abs(difference))
            if not error <= largest:
                largest = error if not math.isnan(error) else math.inf
                worst = dict(zip(ARGUMENTS, (*point, p), strict=True))
                worst |= {"slope": name, "claimed": claimed, "difference": difference}
    ok = largest <= tolerance
    hint = "" if ok else "correct it"
    if not ok and detached is None:
        hint += ", or pass detached= if a part of it is not to be differentiated"
    report = GradientReport(ok, largest, worst, compared, kinks, tolerance, hint)
    if compared < kinks:
        raise ValueError(
            f"function: {kinks} of {compared + kinks} slopes of {_name(python)} are at kinks or jumps of its value, "
            "too many to compare; make the value a continuous function of lam and logp, in float64"
        )
    if raise_error and not report.ok:
        raise ValueError(f"function: {_name(python)} has a slope that is not its value's: {report}")
    return report


def _points(seed: int, n: int) -> Iterator[tuple[float, float, float, float]]:
    rng = np.random.default_rng(seed)
    lam: npt.NDArray[Any] = rng.normal(0.0, np.where(rng.random(n) < 0.5, 0.3, 2.0))
    logp, A = -rng.exponential(1.5, n), rng.normal(0.0, 1.0, n)
    for x, now, advantage in zip(lam.tolist(), logp.tolist(), A.tolist(), strict=True):
        yield x, now, now - x, advantage


def _value(python: Surrogate, detached: Any, point: tuple[float, ...], p: Params, moved: tuple[float, float]) -> float:
    """The value with lam and logp moved, except in what is detached."""
    lam, logp, old_logp, A = point
    here = (lam + moved[0], logp + moved[1], old_logp, A, p)
    return float(python(*here)[0]) if detached is None else float(detached(*here, lam, logp))


def _same_value(python: Surrogate, detached: Any, point: tuple[float, ...], p: Params, value: float) -> None:
    if detached is None:
        return
    other = _value(python, detached, point, p, (0.0, 0.0))
    if not abs(other - value) <= 1e-9 * max(1.0, abs(value)):
        raise ValueError(
            f"detached: its value at {_at(point, p)} is {other:.9g}, that of {_name(python)} {value:.9g}; "
            "make it the same formula, with lam0 and logp0 where nothing is differentiated"
        )


def _difference(python: Surrogate, detached: Any, point: tuple[float, ...], p: Params, k: int) -> float | None:
    """The central difference in lam (k = 0) or logp (1); None at a kink."""

    def at(step: float) -> float:
        return _value(python, detached, point, p, (step, 0.0) if k == 0 else (0.0, step))

    low, here, high = at(-_STEP), at(0.0), at(_STEP)
    left, right = (here - low) / _STEP, (high - here) / _STEP
    central = (high - low) / (2 * _STEP)
    smooth = abs(right - left) <= 1e-3 * max(1.0, abs(central), abs(here))
    return central if smooth else None
