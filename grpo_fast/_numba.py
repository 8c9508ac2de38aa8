# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""The contract just in time: scalar formulas, staged loops over blocks of tokens, and who runs them.

Tokens go through in blocks of ``TILE``, counted from each completion's own start and staged in
small scratch arrays: load (masked slots become neutral), log-ratio, exp, surrogate, KL, combine
and store. Every stage is one loop per formula; the formula is chosen outside the loop and the
loops know no formulas. To add a surrogate: its function, its loop (``map(_surrogate, ...)``) and its
line in ``_surrogate_stage``. Full blocks of the commonest losses go through a fused loop instead.

In float32 a block that holds anything extreme or non-finite is done over in float64, so nothing
overflows on the way. A block's result depends on its own tokens only, and blocks are added up in
order: neither threads nor the place in a buffer can change a bit.

What LLVM needs to vectorise all this: unsigned indices; one flat scratch array with rows at
constant offsets (so that it need not ask whether rows overlap); constants in the dtype of the
computation (``s.dtype.type``); ``reassoc`` on reductions only, and on nothing that holds exp.
Kernels compile when first called, for float32 and float64, and are kept on disk; what is kept is
renewed when this file changes, so touch it after a change of numbers in ``_contract``.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, njit
from numba.core import types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array, populate_array
from numba.np.unsafe.ndarray import to_fixed_tuple

from . import _contract as c
from . import _threads
from ._contract import Batch, Double, Int, Plan, PoolPlan, Real

TILE = 256  # tokens of a block; float32 lanes are widened to float64 at least that often
LANES = 64  # blocks are padded to a multiple of this
WHOLE = np.uint64(2**64 - LANES)  # its mask, which also tells LLVM that no loop over a block needs a remainder
CHUNK = 16384  # tokens of a piece of a long completion
CLAIM = 65536  # tokens a thread takes at a time, at most

# Per-instruction flags do not spread to what is inlined, so every function states its own.
# _nrt=False: no reference counts, which cost more than the arithmetic of a block.
_options: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract"}, "_nrt": False}
_kernel = njit(**_options, cache=True)
_options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # what only kernels call
_inner = njit(**_options)
_reduction = njit(**_options | {"fastmath": {"contract", "reassoc", "nsz"}})
_driver = njit(**_options, inline="always")  # LLVM optimises all of a call tree again at every level of it
_exactly = njit(error_model="numpy", nogil=True)
_exact_kernel = njit(error_model="numpy", nogil=True, cache=True)


@intrinsic
def _apart(typing_context):
    """Called in a function: keeps LLVM from inlining it, which takes minutes for loops that are vectorised already."""

    def build(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


# ---- exp ---------------------------------------------------------------------------------------------


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

    @_inner
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


@overload(exp, jit_options=_options)
def _exp(x, bound):
    of_dtype = exp32 if x == float32 else exp64
    return lambda x, bound: of_dtype(x, bound)


def _make_ordered(real: Any, integer: Any) -> tuple[Any, Any]:
    """The integer that sorts as the number does, and back: min and max of integers vectorise."""
    sign, others = integer(np.iinfo(integer).bits - 1), integer(np.iinfo(integer).max)

    @_inner
    def flip(bits):  # the others where the sign is set; Numba computes in int64, and then there are fewer lanes
        return integer(bits ^ integer(integer(bits >> sign) & others))

    @_inner
    def to(x):
        return flip(real(x).view(integer))

    @_inner
    def back(n):
        return integer(flip(n)).view(real)

    return to, back


_ordered32, _unordered32 = _make_ordered(np.float32, np.int32)
_ordered64, _unordered64 = _make_ordered(np.float64, np.int64)


def ordered(x: float) -> int:
    raise NotImplementedError("for kernels")


def unordered(n: int, like: float) -> float:
    raise NotImplementedError("for kernels")


@overload(ordered, jit_options=_options)
def _ordered(x):
    of_dtype = _ordered32 if x == float32 else _ordered64
    return lambda x: of_dtype(x)


@overload(unordered, jit_options=_options)
def _unordered(n, like):
    of_dtype = _unordered32 if like == float32 else _unordered64
    return lambda n, like: of_dtype(n)


# ---- the scratch of a worker -------------------------------------------------------------------------

SURROGATE, KL, LOG_RATIO, APPROX_KL, RATIO, RATIO_SQ, CLIP_LOW, CLIP_HIGH, LEAST, MOST, NON_FINITE = map(
    c.STATS.index,
    ("surrogate", "kl", "log_ratio", "approx_kl", "ratio", "ratio_sq", "clip_low", "clip_high",
     "log_ratio_min", "log_ratio_max", "non_finite"),
)  # fmt: skip

# Rows of TILE values, neutral where nothing is counted. M: 1 where counted, else 0. FLOWS: pre' clamp'.
_N_ROWS = 12
LOGP, OLD, X, D, A, C, M, LAM, FLOWS, R, G, SPARE = (np.uint64(TILE * row) for row in range(_N_ROWS))


_local = threading.local()


def _scratch(name: str, dtype: np.dtype[Any]) -> Real:
    """This thread's rows under that name, which start on a cache line."""
    scratch: Real | None = getattr(_local, name, None)
    if scratch is None:
        n_bytes = TILE * _N_ROWS * dtype.itemsize
        raw = np.zeros(n_bytes + 64, np.uint8)
        at = -raw.ctypes.data % 64
        scratch = raw[at : at + n_bytes].view(dtype)
        setattr(_local, name, scratch)
    return scratch


class Source(NamedTuple):
    """A token array of whatever dtype: an address, and 4 or 8 bytes per value (0: absent)."""

    address: int
    itemsize: int


class Tokens(NamedTuple):
    """The arrays of a batch that hold something for every token or step. Absent: 0."""

    logp: Source
    old_logp: Source
    ref_logp: Source
    weight: Source
    advantage: Source
    mask: int
    step_ends: int
    step_advantages: int


class Own(NamedTuple):
    """What a batch has for one completion."""

    start: int
    stop: int
    weight: float  # w_i
    factor: float  # of its token weights
    advantage: float
    step: int  # its steps: step..last
    last: int


@intrinsic
def _view(typing_context, address, n, dtype):
    """The n values at an address: one compilation whichever arrays are there, and no reference counts."""
    array = types.Array(dtype.dtype, 1, "C")

    def build(context, builder, signature, arguments):
        view = make_array(array)(context, builder)
        itemsize = context.get_constant(types.intp, array.dtype.bitwidth // 8)
        data = builder.inttoptr(arguments[0], view.data.type)
        populate_array(view, data, [arguments[1]], [itemsize], itemsize, None)
        return view._getvalue()

    return array(types.int64, types.int64, dtype), build


class Limits(NamedTuple):
    """Beyond these a block is done over in float64."""

    log_ratio: float
    logp: float
    advantage: float  # and token weights, and their products
    least_weight: float  # w_i
    weight: float  # w_i, and beta w_i


_N_PLAN, _N_LIMITS = len(Plan._fields), len(Limits._fields)

#: In float32 then f c <= 1e12 exp(40) 1e4 and rho k <= exp(80), and 256 of them are still finite.
_LIMITS = {
    np.dtype(np.float32): Limits(40.0, 1e4, 1e12, 1e-30, 1e3),
    np.dtype(np.float64): Limits(1e300, 1e300, 1e300, 0.0, np.inf),
}
_ALWAYS_WIDE = Limits(0.0, 0.0, 0.0, 0.0, -1.0)


class Reduced(NamedTuple):
    """What a completion as a whole contributes to each of its tokens."""

    n: float  # counted tokens
    lam: float
    flows: float  # clamp', 0 or 1
    rho: float
    c: float


# ---- surrogates: (lam, r, logp, old_logp, a, p, bound) -> (value, d/dlam, d/dlogp) --------------------


@_inner
def clip(lam, r, logp, old_logp, a, p, bound):
    zero = type(r)(0)
    positive = a > zero
    lower = zero if positive else p[0]
    upper = p[1] if positive else p[2]
    flows = (lower <= r) & (r <= upper)  # ties flow in full
    return -a * min(max(r, lower), upper), -a * r if flows else zero, zero


@_inner
def cispo(lam, r, logp, old_logp, a, p, bound):
    weight = min(max(r, p[0]), p[1])  # detached
    return -weight * a * logp, type(r)(0), -weight * a


@_inner
def sapo(lam, r, logp, old_logp, a, p, bound):
    zero, one, four = type(r)(0), type(r)(1), type(r)(4)
    tau = p[0] if a > zero else p[1]
    z = tau * (r - one)
    e = exp(-abs(z), bound)[0]
    e = zero if abs(z) > bound else e  # saturated, it would not vanish against a large r
    sigmoid = (one if z >= zero else e) / (one + e)
    return -a * four / tau * sigmoid, -four * a * (e / ((one + e) * (one + e))) * r, zero


@_inner
def gpg(lam, r, logp, old_logp, a, p, bound):
    return -a * logp, type(r)(0), -a


# ---- KL estimators: (d, bound) -> (value, d/dlogp), d = ref_logp - logp ------------------------------


@_inner
def k1(d, bound):
    return -d, type(d)(1)


@_inner
def k2(d, bound):
    return type(d)(0.5) * d * d, -d


@_inner
def k3(d, bound):
    _, minus_1, tail = exp(d, bound)
    return tail, -minus_1


@_inner
def absolute(d, bound):
    zero, one = type(d)(0), type(d)(1)
    sign = one if d > zero else (-one if d < zero else zero)
    return abs(d), -sign


# ---- what the level does to x: (x, a, lo, hi) -> (value, slope) --------------------------------------


@_inner
def identity(x, a, lo, hi):
    return x, type(x)(1)


@_inner
def clamp(x, a, lo, hi):
    held = min(max(x, lo), hi)
    return held, type(x)(1) if held == x else type(x)(0)


@_inner
def sign_clip(x, a, lo, hi):
    zero, one = type(x)(0), type(x)(1)
    clipped = min(max(x, lo), hi)
    held = min(x, clipped) if a > zero else max(x, clipped)
    return held, one if held == x else zero


# ---- load --------------------------------------------------------------------------------------------


@_inner
def _fill(s, row, value):
    _apart()
    v = s.dtype.type(value)
    for t in range(np.uint64(TILE)):
        s[row + t] = v


@_inner
def _fill_ones(s, row, n):
    _apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    for t in range(np.uint64(TILE)):
        s[row + t] = one if t < np.uint64(n) else zero


@_inner
def _fill_mask(mask, s, n):
    _apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    counted = np.int32(0)
    for t in range(np.uint64(n)):
        s[M + t] = one if mask[t] != 0 else zero
        counted += np.int32(mask[t] != 0)
    return np.int64(counted)


@_driver
def _count(tokens, s, first, n):
    """Fill M; the number of counted tokens."""
    counted = n
    if tokens.mask == 0:
        _fill_ones(s, M, n)
    else:
        if n < TILE:
            _fill(s, M, 0)
        counted = _fill_mask(_view(tokens.mask + first, n, np.uint8), s, n)
    return counted


@_inner
def _copy(part, s, row, n, masked):
    """n values as they are where they are counted, else 0."""
    _apart()
    real, zero = s.dtype.type, s.dtype.type(0)
    if n < TILE:
        _fill(s, row, 0)
    if masked:
        for t in range(np.uint64(n)):
            s[row + t] = real(part[t]) if s[M + t] != zero else zero
    else:
        for t in range(np.uint64(n)):
            s[row + t] = real(part[t])


@_driver
def _load(source, s, row, first, n, masked):
    if source.itemsize == 4:
        _copy(_view(source.address + 4 * first, n, np.float32), s, row, n, masked)
    else:
        _copy(_view(source.address + 8 * first, n, np.float64), s, row, n, masked)


@_reduction
def _log_ratio(s, size, limits):
    """X; whether it and LOGP are finite and small enough for the dtype."""
    _apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    most, most_logp = s.dtype.type(limits.log_ratio), s.dtype.type(limits.logp)
    wild = zero
    for t in range(size & WHOLE):
        logp = s[LOGP + t]
        x = logp - s[OLD + t]
        s[X + t] = x
        wild += zero if (abs(x) <= most) & (abs(logp) <= most_logp) else one
    return wild == zero


@_reduction
def _difference(s, size, limits):
    """D, from ref_logp in its place; whether it is finite and small enough for the dtype."""
    _apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    most = s.dtype.type(limits.log_ratio)
    wild = zero
    for t in range(size & WHOLE):
        d = s[D + t] - s[LOGP + t]
        s[D + t] = d
        wild += zero if abs(d) <= most else one
    return wild == zero


@_driver
def _load_log_ratio(tokens, s, first, n, size, masked, limits):
    _load(tokens.logp, s, LOGP, first, n, masked)
    # without old_logp the policy is its own
    _load(tokens.old_logp if tokens.old_logp.itemsize > 0 else tokens.logp, s, OLD, first, n, masked)
    return _log_ratio(s, size, limits)


@_inner
def _add_advantage(part, s, begin, end, base):
    _apart()
    zero = s.dtype.type(0)
    for t in range(np.uint64(begin), np.uint64(end)):
        s[A + t] = s.dtype.type(base + np.float64(part[t])) if s[M + t] != zero else zero


@_inner
def _fill_run(s, begin, end, base):
    _apart()
    value = s.dtype.type(base)
    for t in range(np.uint64(begin), np.uint64(end)):
        s[A + t] = value


@_inner
def _first_step(step_ends, low, high, position):
    """The first of the steps low..high that ends at or after the position; high where none does."""
    while low < high:
        middle = (low + high) // 2
        if step_ends[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@_inner
def _load_advantages(tokens, own, s, first, n):
    _apart()
    _fill(s, A, own.advantage)
    if own.step == own.last and tokens.advantage.itemsize == 0:
        return
    position = first - own.start  # of the block in the completion
    step_ends = _view(tokens.step_ends, own.last, np.int64)
    step_advantages = _view(tokens.step_advantages, own.last, np.float64)
    step = _first_step(step_ends, own.step, own.last, position)
    begin = np.int64(0)
    while begin < n:  # a run of tokens of one step
        base, end = own.advantage, n
        if step < own.last:
            base += step_advantages[step]
            end = max(begin, min(n, step_ends[step] + 1 - position))
            step += 1
        if tokens.advantage.itemsize == 4:
            _add_advantage(_view(tokens.advantage.address + 4 * first, n, np.float32), s, begin, end, base)
        elif tokens.advantage.itemsize == 8:
            _add_advantage(_view(tokens.advantage.address + 8 * first, n, np.float64), s, begin, end, base)
        else:
            _fill_run(s, begin, end, base)
        begin = end


@_inner
def _weigh(part, s, n, factor):
    _apart()
    real, zero = s.dtype.type, s.dtype.type(0)
    _fill(s, C, 0)
    for t in range(np.uint64(n)):
        s[C + t] = real(np.float64(part[t]) * factor) if s[M + t] != zero else zero


@_inner
def _same_weight(s, value):
    _apart()
    weight = s.dtype.type(value)
    for t in range(np.uint64(TILE)):
        s[C + t] = weight * s[M + t]


@_reduction
def _tame(s, size, limits):
    """Whether advantages, weights and their products are finite and small enough for the dtype."""
    _apart()
    zero, one, most = s.dtype.type(0), s.dtype.type(1), s.dtype.type(limits.advantage)
    wild = zero
    for t in range(size & WHOLE):
        a, weight = s[A + t], s[C + t]
        wild += zero if (abs(a) <= most) & (abs(weight) <= most) & (abs(a * weight) <= most) else one
    return wild == zero


@_driver
def _load_block(plan, tokens, own, reduced, s, first, n, size, masked, limits):
    """A counted block; whether the dtype is enough for it."""
    tame = _load_log_ratio(tokens, s, first, n, size, masked, limits)
    _load_advantages(tokens, own, s, first, n)
    if plan.weight_use != c.USE_MULTIPLY:
        _same_weight(s, reduced.c)
    elif tokens.weight.itemsize == 4:
        _weigh(_view(tokens.weight.address + 4 * first, n, np.float32), s, n, own.factor)
    elif tokens.weight.itemsize == 8:
        _weigh(_view(tokens.weight.address + 8 * first, n, np.float64), s, n, own.factor)
    else:
        _same_weight(s, own.factor)
    tame &= _tame(s, size, limits)
    if plan.kl != c.KL_NONE:
        _load(tokens.ref_logp, s, D, first, n, masked)
        tame &= _difference(s, size, limits)
    return tame


@_inner
def _flag_non_finite(source, s, first, n):
    if source.itemsize > 0:
        _load(source, s, D, first, n, True)
        for t in range(np.uint64(n)):
            if not abs(s[D + t]) <= c.LARGEST:
                s[X + t] = 1


@_inner
def _count_non_finite(tokens, s, first, n):
    """Counted tokens with a NaN or something beyond LARGEST in any array; overwrites D and X. In float64 only."""
    _apart()
    _fill(s, X, 0)
    _flag_non_finite(tokens.logp, s, first, n)
    _flag_non_finite(tokens.old_logp, s, first, n)
    _flag_non_finite(tokens.ref_logp, s, first, n)
    _flag_non_finite(tokens.weight, s, first, n)
    _flag_non_finite(tokens.advantage, s, first, n)
    total = 0.0
    for t in range(np.uint64(n)):
        total += s[X + t]
    return total


# ---- stages ------------------------------------------------------------------------------------------


def _pre(formula: Any) -> Any:
    """The formula's loop over a block: X to LAM, which is then clamped into [lam_lo, lam_hi], and to FLOWS."""

    @_inner
    def loop(plan, s, size, lam_lo, lam_hi):
        _apart()
        real = s.dtype.type
        lo, hi, lam_lo, lam_hi, zero = real(plan.pre_lo), real(plan.pre_hi), real(lam_lo), real(lam_hi), real(0)
        for t in range(size & WHOLE):
            value, slope = formula(s[X + t], s[A + t], lo, hi)
            held = min(max(value, lam_lo), lam_hi)
            s[LAM + t] = held
            s[FLOWS + t] = slope if held == value else zero

    return loop


_identity, _clamp, _sign_clip = map(_pre, (identity, clamp, sign_clip))


@_driver
def _pre_stage(plan, s, size):
    """At the token level LAM is final; at the others its clamp comes after the reduction."""
    lam_lo, lam_hi = -np.inf, np.inf
    if plan.level == c.LEVEL_TOKEN:
        lam_lo, lam_hi = plan.lam_lo, plan.lam_hi
    if plan.pre == c.PRE_IDENTITY:
        _identity(plan, s, size, lam_lo, lam_hi)
    elif plan.pre == c.PRE_CLAMP:
        _clamp(plan, s, size, lam_lo, lam_hi)
    elif plan.pre == c.PRE_SIGN_CLIP:
        _sign_clip(plan, s, size, lam_lo, lam_hi)


@_reduction
def _exp_stage(s, size, bound):
    """R; the sums of lam, r - 1 - lam, r and r^2."""
    _apart()
    zero, bound = s.dtype.type(0), s.dtype.type(bound)
    log_ratio, approx_kl, ratio, square = zero, zero, zero, zero
    for t in range(size & WHOLE):
        lam, m = s[LAM + t], s[M + t]
        r, _, tail = exp(lam, bound)
        s[R + t] = r
        r *= m
        log_ratio += lam * m
        approx_kl += tail * m
        ratio += r
        square += r * r
    return np.float64(log_ratio), np.float64(approx_kl), np.float64(ratio), np.float64(square)


@_inner
def _extremes(s, size):
    """Least and largest counted LAM."""
    _apart()
    zero = s.dtype.type(0)
    first, last = ordered(s.dtype.type(-np.inf)), ordered(s.dtype.type(np.inf))
    least, most = last, first
    for t in range(size & WHOLE):
        counted, lam = s[M + t] != zero, ordered(s[LAM + t])
        least = min(least, lam if counted else last)
        most = max(most, lam if counted else first)
    return np.float64(unordered(least, zero)), np.float64(unordered(most, zero))


def _surrogate(formula: Any) -> Any:
    """The formula's loop over a block: its part of G; the sums of c f, of c df/dlam and of what is clipped."""

    @_reduction
    def loop(plan, s, size, weight, own_lam):
        _apart()
        real = s.dtype.type
        p = (real(plan.p0), real(plan.p1), real(plan.p2), real(plan.p3))
        bound, low, high = real(plan.exp_bound), real(plan.clip_lo), real(plan.clip_hi)
        weight, own_lam, zero = real(weight), real(own_lam), real(0)
        total, through, below, above = zero, zero, zero, zero
        for t in range(size & WHOLE):
            r, a, c_t = s[R + t], s[A + t], s[C + t]
            value, lam_slope, logp_slope = formula(s[LAM + t], r, s[LOGP + t], s[OLD + t], a, p, bound)
            lam_slope *= c_t
            s[G + t] = weight * (own_lam * s[FLOWS + t] * lam_slope + c_t * logp_slope)
            total += c_t * value
            through += lam_slope
            below += s[M + t] if (a < zero) & (r < low) else zero
            above += s[M + t] if (a > zero) & (r > high) else zero
        return np.float64(total), np.float64(through), np.float64(below), np.float64(above)

    return loop


_clip, _cispo, _sapo, _gpg = map(_surrogate, (clip, cispo, sapo, gpg))


@_driver
def _surrogate_stage(plan, s, size, weight, own_lam):
    sums = (0.0, 0.0, 0.0, 0.0)
    if plan.surrogate == 0:
        sums = _clip(plan, s, size, weight, own_lam)
    elif plan.surrogate == 1:
        sums = _cispo(plan, s, size, weight, own_lam)
    elif plan.surrogate == 2:
        sums = _sapo(plan, s, size, weight, own_lam)
    elif plan.surrogate == 3:
        sums = _gpg(plan, s, size, weight, own_lam)
    return sums


def _kl(formula: Any) -> Any:
    """The formula's loop over a block, clamped and straight-through: its part of G; the sum of rho k."""

    @_reduction
    def loop(plan, s, size, weight, rho):
        _apart()
        real = s.dtype.type
        weight, zero, bound = real(weight * plan.beta), real(0), real(plan.exp_bound)
        most_d, most_k = real(plan.kl_clamp_in), real(plan.kl_clamp_out)
        total = zero
        if plan.kl_straight_through == 0 and plan.rho == c.RHO_NONE and min(most_d, most_k) == np.inf:
            for t in range(size & WHOLE):
                k, slope = formula(s[D + t], bound)
                s[G + t] += weight * slope * s[M + t]
                total += k
            return np.float64(total)
        straight_through = plan.kl_straight_through != 0
        own_rho = plan.rho != c.RHO_NONE and plan.rho_level == c.LEVEL_TOKEN
        same_rho = real(1 if plan.rho == c.RHO_NONE else rho)
        through = real(1 if plan.rho == c.RHO_RATIO and plan.rho_level != c.LEVEL_SEQUENCE else 0)
        for t in range(size & WHOLE):
            d = s[D + t]
            held_d = min(max(d, -most_d), most_d)
            k, slope = formula(held_d, bound)
            held_k = min(max(k, -most_k), most_k)
            slope = slope if (held_d == d) & (held_k == k) else zero
            slope = -d if straight_through else slope
            rho_t = exp(s[X + t], bound)[0] if own_rho else same_rho
            k = rho_t * held_k
            s[G + t] += weight * (rho_t * slope + through * k) * s[M + t]
            total += k
        return np.float64(total)

    return loop


_k1, _k2, _k3, _absolute = map(_kl, (k1, k2, k3, absolute))


@_driver
def _kl_stage(plan, s, size, weight, rho):
    total = 0.0
    if plan.kl == 1:
        total = _k1(plan, s, size, weight, rho)
    elif plan.kl == 2:
        total = _k2(plan, s, size, weight, rho)
    elif plan.kl == 3:
        total = _k3(plan, s, size, weight, rho)
    elif plan.kl == 4:
        total = _absolute(plan, s, size, weight, rho)
    return total


@_driver
def _stages(plan, reduced, s, size, weight, row):
    """A loaded block to G and the statistics; the sums of c df/dlam and of rho k."""
    own_lam = 1.0
    if plan.level == c.LEVEL_TOKEN:
        _pre_stage(plan, s, size)
        log_ratio, approx_kl, ratio, square = _exp_stage(s, size, plan.exp_bound)
        least, most = _extremes(s, size)
        row[LOG_RATIO] += log_ratio
        row[APPROX_KL] += approx_kl
        row[RATIO] += ratio
        row[RATIO_SQ] += square
        row[LEAST] = min(row[LEAST], least)
        row[MOST] = max(row[MOST], most)
    else:
        if plan.pre == c.PRE_IDENTITY:
            _fill(s, FLOWS, 1)
        else:
            _pre_stage(plan, s, size)
        _fill(s, LAM, reduced.lam)
        _fill(s, R, exp(reduced.lam, plan.exp_bound)[0])
        own_lam = reduced.flows if plan.level == c.LEVEL_SEQUENCE_TOKEN else 0.0
    surrogate, through, below, above = _surrogate_stage(plan, s, size, weight, own_lam)
    kl = _kl_stage(plan, s, size, weight, reduced.rho)
    row[SURROGATE] += surrogate
    row[KL] += kl
    row[CLIP_LOW] += below
    row[CLIP_HIGH] += above
    return through, kl


# ---- the commonest losses ---------------------------------------------------------------------------


def _fused(surrogate: Any, kl: Any) -> Any:
    """For a full block of tokens that share advantage and weight, and nothing clamped: no stages, no scratch."""

    @_reduction
    def loop(plan, logp, old_logp, ref_logp, grad, advantage, factor, weight, limits, row):
        """Gradient and, if the dtype was enough, statistics; whether it was."""
        _apart()
        real = logp.dtype.type
        zero, one, bound = real(0), real(1), real(np.inf)  # what would saturate is not tame
        p = (real(plan.p0), real(plan.p1), real(plan.p2), real(plan.p3))
        most = real(min(limits.log_ratio, plan.exp_bound))
        a, through, beta = real(advantage), real(weight * factor), real(weight * plan.beta)
        if not max(abs(advantage), abs(factor), abs(advantage * factor)) <= limits.advantage:
            return False
        low = real(plan.clip_lo if a < zero else -np.inf)
        high = real(plan.clip_hi if a > zero else np.inf)
        value, log_ratio, approx_kl, ratio, square, clipped, wild = zero, zero, zero, zero, zero, zero, zero
        for t in range(np.uint64(TILE)):
            x = logp[t] - old_logp[t]
            wild += zero if abs(x) <= most else one
            r, _, tail = exp(x, bound)
            f, lam_slope, logp_slope = surrogate(x, r, logp[t], old_logp[t], a, p, bound)
            grad[t] = through * (lam_slope + logp_slope)
            value += f
            log_ratio += x
            approx_kl += tail
            ratio += r
            square += r * r
            clipped += one if (r < low) | (r > high) else zero
        least, largest = ordered(real(np.inf)), ordered(real(-np.inf))
        for t in range(np.uint64(TILE)):
            rank = ordered(logp[t] - old_logp[t])
            least, largest = min(least, rank), max(largest, rank)
        total_kl = zero
        if plan.kl != c.KL_NONE:
            for t in range(np.uint64(TILE)):
                d = ref_logp[t] - logp[t]
                wild += zero if abs(d) <= most else one
                k, k_slope = kl(d, bound)
                grad[t] += beta * k_slope
                total_kl += k
        if wild != zero:
            return False
        row[SURROGATE] += factor * value
        row[KL] += total_kl
        row[LOG_RATIO] += log_ratio
        row[APPROX_KL] += approx_kl
        row[RATIO] += ratio
        row[RATIO_SQ] += square
        row[CLIP_LOW if a < zero else CLIP_HIGH] += clipped
        row[LEAST] = min(row[LEAST], np.float64(unordered(least, zero)))
        row[MOST] = max(row[MOST], np.float64(unordered(largest, zero)))
        return True

    return loop


_clip_and_k3 = _fused(clip, k3)


@_inner
def _is_common(plan, tokens, own, grad, itemsize):
    """Whether full blocks can go through a fused loop."""
    plain = plan.level == c.LEVEL_TOKEN and plan.pre == c.PRE_IDENTITY and plan.rho == c.RHO_NONE
    free = plan.lam_lo == -np.inf and plan.lam_hi == np.inf and min(plan.kl_clamp_in, plan.kl_clamp_out) == np.inf
    known = plan.surrogate == 0 and plan.kl_straight_through == 0 and (plan.kl == 3 or plan.kl == c.KL_NONE)
    shared = own.step == own.last and tokens.advantage.itemsize == 0 and tokens.weight.itemsize == 0
    alike = tokens.logp.itemsize == itemsize and tokens.old_logp.itemsize == itemsize
    alike &= plan.kl == c.KL_NONE or tokens.ref_logp.itemsize == itemsize
    return plain and free and known and shared and alike and (grad.itemsize == 0 or grad.itemsize == itemsize)


@_inner
def _common_block(plan, tokens, own, first, row, grad, s, limits):
    at = s.itemsize * first
    logp: Any = _view(tokens.logp.address + at, TILE, s.dtype)
    old_logp = _view(tokens.old_logp.address + at, TILE, s.dtype)
    out = s[G : G + np.uint64(TILE)] if grad.itemsize == 0 else _view(grad.address + at, TILE, s.dtype)
    ref_logp = logp if plan.kl == c.KL_NONE else _view(tokens.ref_logp.address + at, TILE, s.dtype)
    return _clip_and_k3(plan, logp, old_logp, ref_logp, out, own.advantage, own.factor, own.weight, limits, row)


# ---- store -------------------------------------------------------------------------------------------

_FLOAT_MAX, _DOUBLE_MAX = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)


@_reduction
def _hold(part, s, n, largest):
    _apart()
    zero, one, most = s.dtype.type(0), s.dtype.type(1), s.dtype.type(largest)
    beyond = zero
    for t in range(np.uint64(n)):
        g = s[G + t]
        beyond += one if abs(g) > most else zero
        part[t] = min(max(g, -most), most)
    return beyond != zero


@_driver
def _store(s, grad, first, n):
    """G to the gradient, held at the largest finite number; whether that was needed."""
    beyond = False
    if grad.itemsize == 4:
        beyond = _hold(_view(grad.address + 4 * first, n, np.float32), s, n, _FLOAT_MAX)
    elif grad.itemsize == 8:
        beyond = _hold(_view(grad.address + 8 * first, n, np.float64), s, n, _DOUBLE_MAX)
    return beyond


@_inner
def _shift(s, through, alike):
    """pre' through + alike, for counted tokens, on top of G."""
    _apart()
    through, alike = s.dtype.type(through), s.dtype.type(alike)
    for t in range(np.uint64(TILE)):
        s[G + t] += (through * s[FLOWS + t] + alike) * s[M + t]


@_inner
def _hold_sum(part, s, n, through, alike, largest):
    _apart()
    for t in range(np.uint64(n)):
        more = through * np.float64(s[FLOWS + t]) + alike if s[M + t] != 0 else 0.0
        part[t] = min(max(np.float64(part[t]) + more, -largest), largest)


@_driver
def _add(s, grad, first, n, through, alike):
    """pre' through + alike, for counted tokens, on top of the gradient."""
    if grad.itemsize == 4:
        _hold_sum(_view(grad.address + 4 * first, n, np.float32), s, n, through, alike, _FLOAT_MAX)
    else:
        _hold_sum(_view(grad.address + 8 * first, n, np.float64), s, n, through, alike, _DOUBLE_MAX)


# ---- a completion ------------------------------------------------------------------------------------


@_reduction
def _level_sums(s, size):
    _apart()
    zero = s.dtype.type(0)
    lam, x = zero, zero
    for t in range(size & WHOLE):
        lam += s[LAM + t] * s[M + t]
        x += s[X + t]
    return np.float64(lam), np.float64(x)


@_inner
def _log_weights(plan, tokens, own, s, first, n):
    """Sum over counted tokens of log weight, as the plan uses it; overwrites X. In float64 only."""
    _apart()
    if tokens.weight.itemsize > 0:
        _load(tokens.weight, s, X, first, n, True)
    else:
        _fill(s, X, 1)
    total = 0.0
    for t in range(np.uint64(n)):
        if s[M + t] != 0:
            weight = s[X + t] * own.factor
            if plan.weight_use == c.USE_LOG_OFFSET:
                total += min(max(math.log(weight), plan.lam_lo), plan.lam_hi)
            else:
                total += math.log(weight + 1e-10)
    return total


@_inner
def _load_level(plan, tokens, own, s, first, n, size, masked, limits):
    """A counted block up to FLOWS and the unreduced LAM."""
    _load_log_ratio(tokens, s, first, n, size, masked, limits)
    if plan.pre == c.PRE_SIGN_CLIP:
        _load_advantages(tokens, own, s, first, n)
    _pre_stage(plan, s, size)


@_inner
def _reduce(plan, tokens, own, weighted, wide, limits):
    """The first pass: what the completion's log-ratios and weights come to, in float64."""
    _apart()
    counted, lam, x, log_weight = 0.0, 0.0, 0.0, 0.0
    for first in range(own.start, own.stop, TILE):
        n = min(TILE, own.stop - first)
        size = np.uint64(n + LANES - 1) & WHOLE
        here = _count(tokens, wide, first, n)
        if here == 0:
            continue
        counted += here
        _load_level(plan, tokens, own, wide, first, n, size, here < n, limits)
        more_lam, more_x = _level_sums(wide, size)
        lam += more_lam
        x += more_x
        if weighted:
            log_weight += _log_weights(plan, tokens, own, wide, first, n)
    mean_n = max(counted, 1.0)
    if plan.reduce == c.REDUCE_MEAN:
        lam /= mean_n
    weight = 1.0
    if plan.weight_use == c.USE_LOG_OFFSET:
        lam += log_weight
    elif weighted:
        weight = exp(log_weight / mean_n, plan.exp_bound)[0]
    held = min(max(lam, plan.lam_lo), plan.lam_hi)
    return Reduced(counted, held, 1.0 if held == lam else 0.0, exp(x / mean_n, plan.exp_bound)[0], weight)


@_inner
def _piece(plan, tokens, own, reduced, begin, end, row, grad, s, wide, limits, widen, through, alike):
    """Tokens begin..end of the buffer: statistics into ``row``, gradient plus ``_shift`` stored.

    Returns the sums of c df/dlam and of rho k, and whether the gradient went beyond its dtype.
    """
    _apart()
    sum_through, sum_kl, beyond = 0.0, 0.0, False
    common = not widen and _is_common(plan, tokens, own, grad, s.itemsize)
    for first in range(begin, end, TILE):
        n = min(TILE, end - first)
        size = np.uint64(n + LANES - 1) & WHOLE
        counted = _count(tokens, s, first, n)
        if common and counted == TILE and _common_block(plan, tokens, own, first, row, grad, s, limits):
            continue
        if counted == 0:
            _fill(s, G, 0)
            _store(s, grad, first, n)
            continue
        tame = not widen
        if tame:
            tame = _load_block(plan, tokens, own, reduced, s, first, n, size, counted < n, limits)
        if tame:
            more_through, more_kl = _stages(plan, reduced, s, size, own.weight, row)
            beyond |= _store(s, grad, first, n)
        else:
            _count(tokens, wide, first, n)
            row[NON_FINITE] += _count_non_finite(tokens, wide, first, n)
            _load_block(plan, tokens, own, reduced, wide, first, n, size, counted < n, limits)
            more_through, more_kl = _stages(plan, reduced, wide, size, own.weight, row)
            if through != 0.0 or alike != 0.0:
                _shift(wide, through, alike)
            beyond |= _store(wide, grad, first, n)
        sum_through += more_through
        sum_kl += more_kl
    return sum_through, sum_kl, beyond


@_inner
def _third_pass(plan, tokens, own, grad, wide, limits, through, alike):
    """Add to every counted token's gradient what comes through the completion's one lam, and one rho."""
    _apart()
    for first in range(own.start, own.stop, TILE):
        n = min(TILE, own.stop - first)
        size = np.uint64(n + LANES - 1) & WHOLE
        counted = _count(tokens, wide, first, n)
        if counted == 0:
            continue
        if plan.pre == c.PRE_IDENTITY or plan.level == c.LEVEL_TOKEN:
            _fill(wide, FLOWS, 1)
        else:
            _load_level(plan, tokens, own, wide, first, n, size, counted < n, limits)
        _add(wide, grad, first, n, through, alike)


@_driver
def _whole(plan, tokens, own, weighted, row, grad, s, wide, limits, widen):
    """A completion of which every token depends on all the others."""
    reduced = _reduce(plan, tokens, own, weighted, wide, limits)
    # r and rho of the whole completion must suit the dtype, too
    mild = abs(reduced.lam) <= limits.log_ratio and reduced.rho <= exp(limits.log_ratio, plan.exp_bound)[0]
    widen |= not mild
    through, kl, beyond = _piece(
        plan, tokens, own, reduced, own.start, own.stop, row, grad, s, wide, limits, widen, 0.0, 0.0
    )
    n = max(reduced.n, 1.0)
    through_lam, through_rho = 0.0, 0.0
    if plan.level == c.LEVEL_SEQUENCE:
        through_lam = own.weight * reduced.flows * through / (n if plan.reduce == c.REDUCE_MEAN else 1.0)
    if plan.rho == c.RHO_RATIO and plan.rho_level == c.LEVEL_SEQUENCE and plan.kl != c.KL_NONE:
        through_rho = own.weight * plan.beta * kl / n
    if grad.itemsize > 0 and (through_lam != 0.0 or through_rho != 0.0):
        if beyond:  # what was stored is not the gradient so far: all over again
            spare = wide[SPARE : SPARE + np.uint64(TILE)]
            _piece(
                plan, tokens, own, reduced, own.start, own.stop, spare, grad, s, wide, limits, True,
                through_lam, through_rho,
            )  # fmt: skip
        else:
            _third_pass(plan, tokens, own, grad, wide, limits, through_lam, through_rho)
    if plan.level != c.LEVEL_TOKEN and reduced.n > 0:
        r, _, tail = exp(reduced.lam, plan.exp_bound)
        row[LOG_RATIO] = reduced.lam
        row[APPROX_KL] = tail
        row[RATIO] = r
        row[RATIO_SQ] = r * r
        row[CLIP_LOW] /= n
        row[CLIP_HIGH] /= n
        row[LEAST] = reduced.lam
        row[MOST] = reduced.lam


@_inner
def _source(values, n):
    return Source(values.ctypes.data, values.size // max(n, 1))


@_kernel
def _run(numbers, n, logp, old_logp, ref_logp, weight, advantage, mask, grad,
         start, stop, weights, factors, advantages, step_offsets, step_ends, step_advantages,
         owner, begin, end, rows, s, wide, low, high):  # fmt: skip
    """Pieces low..high, each with its own row of statistics. Arrays of n tokens come as bytes, absent ones empty."""
    plan, limits = Plan(*to_fixed_tuple(numbers, _N_PLAN)), Limits(*to_fixed_tuple(numbers[_N_PLAN:], _N_LIMITS))
    tokens = Tokens(
        _source(logp, n), _source(old_logp, n), _source(ref_logp, n), _source(weight, n), _source(advantage, n),
        mask.ctypes.data if mask.size > 0 else 0, step_ends.ctypes.data, step_advantages.ctypes.data,
    )  # fmt: skip
    gradient = _source(grad, n)
    whole = plan.level != c.LEVEL_TOKEN or (plan.rho != c.RHO_NONE and plan.rho_level != c.LEVEL_TOKEN)
    weighted = plan.weight_use != c.USE_MULTIPLY and (tokens.weight.itemsize > 0 or factors.size > 0)
    alone = Reduced(0.0, 0.0, 1.0, 1.0, 1.0)
    for piece in range(low, high):
        i = owner[piece]
        row = rows[piece]
        for column in range(row.size):
            row[column] = 0.0
        row[LEAST] = np.inf
        row[MOST] = -np.inf
        own = Own(
            start[i], stop[i], weights[i],
            factors[i] if factors.size > 0 else 1.0,
            advantages[i] if advantages.size > 0 else 0.0,
            step_offsets[i] if step_offsets.size > 0 else 0,
            step_offsets[i + 1] if step_offsets.size > 0 else 0,
        )  # fmt: skip
        size = abs(own.weight)
        wild = not (size == 0 or limits.least_weight <= size <= limits.weight) or not size * plan.beta <= limits.weight
        if whole:
            _whole(plan, tokens, own, weighted, row, gradient, s, wide, limits, wild)
        else:
            _piece(plan, tokens, own, alone, begin[piece], end[piece], row, gradient, s, wide, limits, wild, 0.0, 0.0)


@_exact_kernel
def _merge(owner, rows, stats):
    """Rows of pieces, in order, to rows of completions."""
    stats[:] = 0.0
    stats[:, LEAST] = np.inf
    stats[:, MOST] = -np.inf
    for piece in range(owner.size):
        row, total = rows[piece], stats[owner[piece]]
        least, most = min(total[LEAST], row[LEAST]), max(total[MOST], row[MOST])
        total += row
        total[LEAST] = least
        total[MOST] = most


# ---- the functions of the contract -------------------------------------------------------------------

_NOTHING: dict[type[np.generic], npt.NDArray[Any]] = {t: np.empty(0, t) for t in (np.float64, np.int64, np.uint8)}
_POOL_PLAN_TYPES = [type(PoolPlan._field_defaults[name]) for name in PoolPlan._fields]


def _given(values: npt.NDArray[Any] | None, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Read-only, because to Numba that is another type, and as bytes where asked for; empty where absent."""
    view = _NOTHING[dtype] if values is None else values.view(dtype)
    view.flags.writeable = False
    return view


def _mild(plan: Plan) -> bool:
    """Whether no parameter alone can take float32 out of its range."""
    params = [abs(p) for p in (plan.p0, plan.p1, plan.p2, plan.p3) if p != 0 and math.isfinite(p)]
    return abs(plan.beta) <= 1e3 and all(1e-6 <= p <= 1e6 for p in params)


def _pieces(start: Int, stop: Int, whole: bool) -> tuple[Int, Int, Int]:
    """(completion, first token, end) of every piece: chunks counted from the completion's own start."""
    lengths = stop - start
    n = len(lengths)
    if whole or n == 0 or lengths.max() <= CHUNK:
        return np.arange(n), start, stop
    chunks = np.maximum(1, -(-lengths // CHUNK))
    owner = np.repeat(np.arange(n), chunks)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    begin = start[owner] + nth * CHUNK
    return owner, begin, np.minimum(begin + CHUNK, stop[owner])


def policy_loss(plan: Plan, batch: Batch, grad: Real | None, stats: Double, n_threads: int) -> None:
    """Statistics of every completion and, where ``grad`` is given, the gradient in its slots."""
    dtype = np.result_type(*(a.dtype for a in (batch.logp, batch.old_logp, batch.ref_logp) if a is not None))
    whole = plan.level != c.LEVEL_TOKEN or (plan.rho != c.RHO_NONE and plan.rho_level != c.LEVEL_TOKEN)
    owner, begin, end = _pieces(batch.start, batch.stop, whole)
    split = len(owner) != len(stats)
    rows = np.empty((len(owner), len(c.STATS))) if split else stats
    limits = _LIMITS[dtype] if dtype == np.float64 or _mild(plan) else _ALWAYS_WIDE
    stepped = batch.step_advantages is not None
    arguments = (
        np.array((*plan, *limits), np.float64),
        len(batch.logp),
        *(_given(a, np.uint8) for a in (batch.logp, batch.old_logp, batch.ref_logp, batch.token_weight)),
        *(_given(a, np.uint8) for a in (batch.token_advantages, batch.mask, grad)),
        *(_given(a, np.int64) for a in (batch.start, batch.stop)),
        *(_given(a, np.float64) for a in (batch.weights, batch.completion_weight, batch.advantages)),
        *(_given(a if stepped else None, np.int64) for a in (batch.step_offsets, batch.step_ends)),
        _given(batch.step_advantages, np.float64),
        *(_given(a, np.int64) for a in (owner, begin, end)),
        rows,
    )

    def run(ranges: Any) -> None:
        s, wide = _scratch(dtype.name, dtype), _scratch("wide", np.dtype(np.float64))
        for low, high in ranges:
            _run(*arguments, s, wide, low, high)

    _share(run, end - begin, n_threads)
    if split:
        _merge(_given(owner, np.int64), rows, stats)


def _share(run: Callable[[Any], None], lengths: Int, n_threads: int) -> None:
    """``run`` ranges of pieces on the threads, each taking the next range when it has finished one."""
    if n_threads == 1 or len(lengths) <= 1:
        run([(0, len(lengths))])
        return
    done = np.cumsum(lengths)
    claim = min(CLAIM, max(CHUNK, int(done[-1]) // (4 * n_threads)))
    bounds = np.searchsorted(done, np.arange(claim, int(done[-1]), claim))
    ranges = list(itertools.pairwise(np.unique([0, *bounds, len(lengths)]).tolist()))
    following = itertools.count()  # next() is atomic

    def claims() -> Any:
        for k in following:
            if k >= len(ranges):
                return
            yield ranges[k]

    _threads.run(lambda: run(claims()), min(n_threads, len(ranges)))


@_exact_kernel
def _count_tokens(mask, start, stop, counts):
    for i in range(start.size):
        counted = np.int32(0)
        part = mask[start[i] : stop[i]]
        for t in range(np.uint64(part.size)):
            counted += np.int32(part[t] != 0)
        counts[i] = counted


def count_tokens(mask: npt.NDArray[np.uint8] | None, start: Int, stop: Int) -> Int:
    """Counted tokens of each completion."""
    if mask is None:
        return stop - start
    counts = np.empty(len(start), np.int64)
    _count_tokens(_given(mask, np.uint8), _given(start, np.int64), _given(stop, np.int64), counts)
    return counts


@_exactly
def _exact_sum(values, scale, partials):
    """The sum of values * scale, rounded once: partial sums that do not overlap (Shewchuk 1997; math.fsum)."""
    n = 0
    special = 0.0
    for value in values:
        x = value * scale
        if not math.isfinite(x):
            special += x
            continue
        kept = 0
        for k in range(n):
            y = partials[k]
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low != 0.0:
                partials[kept] = low
                kept += 1
            x = high
        if not math.isfinite(x):  # too large on the way
            return math.nan
        partials[kept] = x
        n = kept + 1
    if special != 0.0:  # inf, or NaN
        return special
    if n == 0:
        return 0.0
    n -= 1
    high, low = partials[n], 0.0
    while n > 0 and low == 0.0:
        n -= 1
        x, y = high, partials[n]
        high = x + y
        low = y - (high - x)
    # high + low is exact, but what is below low decides a tie
    if n > 0 and ((low < 0.0 and partials[n - 1] < 0.0) or (low > 0.0 and partials[n - 1] > 0.0)):
        y = low * 2.0
        x = high + y
        if y == x - high:
            high = x
    return high


@_exactly
def _sum(values, partials):
    total = _exact_sum(values, 1.0, partials)
    if math.isnan(total):  # inf - inf, NaN, or too large on the way only
        return _exact_sum(values, 2.0**-64, partials) * 2.0**64
    return total


_PARTIALS = 2100  # doubles that do not overlap, of a bit each at worst: 2098 bits from 2^-1074 to 2^1023


@_exact_kernel
def _sum_columns(table, totals):
    column = np.empty(table.shape[0])
    partials = np.empty(_PARTIALS)
    for k in range(table.shape[1]):
        column[:] = table[:, k]
        totals[k] = _sum(column, partials)


def sum_columns(table: Double) -> Double:
    """The exact sum of every column, rounded once."""
    totals = np.empty(table.shape[1])
    _sum_columns(_given(table, np.float64), totals)
    return totals


@_exactly
def _equal(values, ulp):
    """Whether the range is at most 4 ULP of the largest magnitude."""
    least, most = values.min(), values.max()
    exponent = math.frexp(max(abs(least), abs(most)))[1]  # floor(log2) + 1, exactly
    return most - least <= 4.0 * math.ldexp(ulp, exponent - 1)


@_exactly
def _std(values, ddof, ulp, scratch, partials):
    """Two passes, each an exact sum; of equal values exactly 0."""
    m = values.size
    if ddof >= m or _equal(values, ulp):
        return 0.0
    mean = _sum(values, partials) / m
    for k in range(m):
        deviation = values[k] - mean
        scratch[k] = deviation * deviation
    return math.sqrt(_sum(scratch[:m], partials) / (m - ddof))


@_exact_kernel
def _standardize(values, order, offsets, plan, out):
    most = 0
    for g in range(offsets.size - 1):
        most = max(most, offsets[g + 1] - offsets[g])
    pool, scratch, partials = np.empty(most), np.empty(most), np.empty(_PARTIALS)
    for g in range(offsets.size - 1):
        members = order[offsets[g] : offsets[g + 1]]
        m = members.size
        v = pool[:m]
        for k in range(m):
            v[k] = values[members[k]]
        if m == 0:
            continue
        centres = plan.baseline != c.BASELINE_NONE
        if m == 1 and centres:
            raw = v[0] if plan.scale == c.SCALE_NONE else v[0] / (1.0 + plan.eps)
            out[members[0]] = raw if plan.singleton == c.SINGLETON_RAW else 0.0
            continue
        if centres and _equal(v, plan.ulp):
            for k in range(m):
                out[members[k]] = 0.0
            continue
        std = 0.0
        if plan.scale == c.SCALE_GROUP:
            std = _std(v, plan.ddof, plan.ulp, scratch, partials)
        elif plan.scale == c.SCALE_BATCH:
            std = plan.batch_std
        divisor = 1.0 if std == 0.0 else std + plan.eps
        total = _sum(v, partials) if centres else 0.0
        for k in range(m):
            baseline = 0.0
            if plan.baseline == c.BASELINE_MEAN:
                baseline = total / m
            elif plan.baseline == c.BASELINE_LEAVE_ONE_OUT:
                baseline = (total - v[k]) / (m - 1)
            out[members[k]] = (v[k] - baseline) / divisor


def standardize(values: Double, order: Int, offsets: Int, plan: PoolPlan, out: Double) -> None:
    """Every pool less its baseline, over its scale, as :class:`PoolPlan` says."""
    plan = PoolPlan(*(to(value) for to, value in zip(_POOL_PLAN_TYPES, plan, strict=True)))
    _standardize(_given(values, np.float64), _given(order, np.int64), _given(offsets, np.int64), plan, out)


@_exact_kernel
def _pool_std(values, ddof, ulp):
    return _std(values, ddof, ulp, np.empty(values.size), np.empty(_PARTIALS))


def pool_std(values: Double, ddof: int, ulp: float) -> float:
    """Standard deviation of all the values."""
    return float(_pool_std(_given(values, np.float64), int(ddof), float(ulp)))


@_exact_kernel
def _expand_steps(step_values, step_offsets, step_ends, start, stop, base, largest, out):
    for i in range(start.size):
        own = base[i] if base.size > 0 else 0.0
        begin = start[i]
        for step in range(step_offsets[i], step_offsets[i + 1]):
            end = min(stop[i], start[i] + step_ends[step] + 1)
            value = own + step_values[step]
            for t in range(begin, end):
                out[t] = min(max(value, -largest), largest)
            begin = max(begin, end)
        for t in range(begin, stop[i]):
            out[t] = min(max(own, -largest), largest)


def expand_steps(
    step_values: Double,
    step_offsets: Int,
    step_ends: Int,
    start: Int,
    stop: Int,
    base: Double | None,
    out: Real,
) -> None:
    """Every token gets the value of its step, and its completion's base."""
    indices = (_given(a, np.int64) for a in (step_offsets, step_ends, start, stop))
    largest = float(np.finfo(out.dtype).max)
    _expand_steps(_given(step_values, np.float64), *indices, _given(base, np.float64), largest, out)
