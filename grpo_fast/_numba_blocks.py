# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""Blocks of tokens: a worker's scratch, and what is loaded into it and stored from it."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from . import _contract as c
from ._contract import Plan, Real
from ._numba_jit import apart, driver, inner, reduction, view

TILE = 256  # tokens of a block; float32 lanes are widened to float64 at least that often
LANES = 64  # blocks are padded to a multiple of this
WHOLE = np.uint64(2**64 - LANES)  # its mask, which also tells LLVM that no loop over a block needs a remainder

# Rows of TILE values, neutral where nothing is counted. M: 1 where counted, else 0. FLOWS: pre' clamp'.
N_ROWS = 12
LOGP, OLD, X, D, A, C, M, LAM, FLOWS, R, G, SPARE = (np.uint64(TILE * row) for row in range(N_ROWS))


_local = threading.local()


def scratch_of(name: str, dtype: np.dtype[Any]) -> Real:
    """This thread's rows under that name, which start on a cache line."""
    scratch: Real | None = getattr(_local, name, None)
    if scratch is None:
        n_bytes = TILE * N_ROWS * dtype.itemsize
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
    kl_weight: float  # v_i
    factor: float  # of its token weights
    advantage: float
    step: int  # its steps: step..last
    last: int


class Limits(NamedTuple):
    """Beyond these a block is done over in float64."""

    log_ratio: float
    logp: float
    advantage: float  # and token weights, and their products
    least_weight: float  # w_i and v_i
    weight: float  # w_i, and beta v_i


N_PLAN, N_LIMITS = len(Plan._fields), len(Limits._fields)

#: In float32 then f c <= 1e12 exp(40) 1e4 and rho k <= exp(80), and 256 of them are still finite.
LIMITS = {
    np.dtype(np.float32): Limits(40.0, 1e4, 1e12, 1e-30, 1e3),
    np.dtype(np.float64): Limits(1e300, 1e300, 1e300, 0.0, np.inf),
}
ALWAYS_WIDE = Limits(0.0, 0.0, 0.0, 0.0, -1.0)


class Reduced(NamedTuple):
    """What a completion as a whole contributes to each of its tokens."""

    n: float  # counted tokens
    lam: float
    flows: float  # clamp', 0 or 1
    rho: float
    c: float


# ---- load --------------------------------------------------------------------------------------------


@inner
def fill(s, row, value):
    apart()
    v = s.dtype.type(value)
    for t in range(np.uint64(TILE)):
        s[row + t] = v


@inner
def _fill_ones(s, row, n):
    apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    for t in range(np.uint64(TILE)):
        s[row + t] = one if t < np.uint64(n) else zero


@inner
def _fill_mask(mask, s, n):
    apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    counted = np.int32(0)
    for t in range(np.uint64(n)):
        s[M + t] = one if mask[t] != 0 else zero
        counted += np.int32(mask[t] != 0)
    return np.int64(counted)


@driver
def count(tokens, s, first, n):
    """Fill M; the number of counted tokens."""
    counted = n
    if tokens.mask == 0:
        _fill_ones(s, M, n)
    else:
        if n < TILE:
            fill(s, M, 0)
        counted = _fill_mask(view(tokens.mask + first, n, np.uint8), s, n)
    return counted


@inner
def _copy(part, s, row, n, masked):
    """n values as they are where they are counted, else 0."""
    apart()
    real, zero = s.dtype.type, s.dtype.type(0)
    if n < TILE:
        fill(s, row, 0)
    if masked:
        for t in range(np.uint64(n)):
            s[row + t] = real(part[t]) if s[M + t] != zero else zero
    else:
        for t in range(np.uint64(n)):
            s[row + t] = real(part[t])


@driver
def load(source, s, row, first, n, masked):
    if source.itemsize == 4:
        _copy(view(source.address + 4 * first, n, np.float32), s, row, n, masked)
    else:
        _copy(view(source.address + 8 * first, n, np.float64), s, row, n, masked)


@reduction
def _log_ratio(s, size, limits):
    """X; whether it and LOGP are finite and small enough for the dtype."""
    apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    most, most_logp = s.dtype.type(limits.log_ratio), s.dtype.type(limits.logp)
    wild = zero
    for t in range(size & WHOLE):
        logp = s[LOGP + t]
        x = logp - s[OLD + t]
        s[X + t] = x
        wild += zero if (abs(x) <= most) & (abs(logp) <= most_logp) else one
    return wild == zero


@reduction
def _difference(s, size, limits):
    """D, from ref_logp in its place; whether it is finite and small enough for the dtype."""
    apart()
    one, zero = s.dtype.type(1), s.dtype.type(0)
    most = s.dtype.type(limits.log_ratio)
    wild = zero
    for t in range(size & WHOLE):
        d = s[D + t] - s[LOGP + t]
        s[D + t] = d
        wild += zero if abs(d) <= most else one
    return wild == zero


@driver
def load_log_ratio(tokens, s, first, n, size, masked, limits):
    load(tokens.logp, s, LOGP, first, n, masked)
    # without old_logp the policy is its own
    load(tokens.old_logp if tokens.old_logp.itemsize > 0 else tokens.logp, s, OLD, first, n, masked)
    return _log_ratio(s, size, limits)


@inner
def _add_advantage(part, s, begin, end, base):
    apart()
    zero = s.dtype.type(0)
    for t in range(np.uint64(begin), np.uint64(end)):
        s[A + t] = s.dtype.type(base + np.float64(part[t])) if s[M + t] != zero else zero


@inner
def _fill_run(s, begin, end, base):
    apart()
    value = s.dtype.type(base)
    for t in range(np.uint64(begin), np.uint64(end)):
        s[A + t] = value


@inner
def _first_step(step_ends, low, high, position):
    """The first of the steps low..high that ends at or after the position; high where none does."""
    while low < high:
        middle = (low + high) // 2
        if step_ends[middle] < position:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def load_advantages(tokens, own, s, first, n):
    apart()
    fill(s, A, own.advantage)
    if own.step == own.last and tokens.advantage.itemsize == 0:
        return
    position = first - own.start  # of the block in the completion
    step_ends = view(tokens.step_ends, own.last, np.int64)
    step_advantages = view(tokens.step_advantages, own.last, np.float64)
    step = _first_step(step_ends, own.step, own.last, position)
    begin = np.int64(0)
    while begin < n:  # a run of tokens of one step
        base, end = own.advantage, n
        if step < own.last:
            base += step_advantages[step]
            end = max(begin, min(n, step_ends[step] + 1 - position))
            step += 1
        if tokens.advantage.itemsize == 4:
            _add_advantage(view(tokens.advantage.address + 4 * first, n, np.float32), s, begin, end, base)
        elif tokens.advantage.itemsize == 8:
            _add_advantage(view(tokens.advantage.address + 8 * first, n, np.float64), s, begin, end, base)
        else:
            _fill_run(s, begin, end, base)
        begin = end


@inner
def _weigh(part, s, n, factor):
    apart()
    real, zero = s.dtype.type, s.dtype.type(0)
    fill(s, C, 0)
    for t in range(np.uint64(n)):
        s[C + t] = real(np.float64(part[t]) * factor) if s[M + t] != zero else zero


@inner
def _same_weight(s, value):
    apart()
    weight = s.dtype.type(value)
    for t in range(np.uint64(TILE)):
        s[C + t] = weight * s[M + t]


@reduction
def _tame(s, size, limits):
    """Whether advantages, weights and their products are finite and small enough for the dtype."""
    apart()
    zero, one, most = s.dtype.type(0), s.dtype.type(1), s.dtype.type(limits.advantage)
    wild = zero
    for t in range(size & WHOLE):
        a, weight = s[A + t], s[C + t]
        wild += zero if (abs(a) <= most) & (abs(weight) <= most) & (abs(a * weight) <= most) else one
    return wild == zero


@driver
def load_block(plan, tokens, own, reduced, s, first, n, size, masked, limits):
    """A counted block; whether the dtype is enough for it."""
    tame = load_log_ratio(tokens, s, first, n, size, masked, limits)
    load_advantages(tokens, own, s, first, n)
    if plan.weight_use != c.USE_MULTIPLY:
        _same_weight(s, reduced.c)
    elif tokens.weight.itemsize == 4:
        _weigh(view(tokens.weight.address + 4 * first, n, np.float32), s, n, own.factor)
    elif tokens.weight.itemsize == 8:
        _weigh(view(tokens.weight.address + 8 * first, n, np.float64), s, n, own.factor)
    else:
        _same_weight(s, own.factor)
    tame &= _tame(s, size, limits)
    if plan.kl != c.KL_NONE:
        load(tokens.ref_logp, s, D, first, n, masked)
        tame &= _difference(s, size, limits)
    return tame


@inner
def _flag_non_finite(source, s, first, n):
    if source.itemsize > 0:
        load(source, s, D, first, n, True)
        for t in range(np.uint64(n)):
            if not abs(s[D + t]) <= c.LARGEST:
                s[X + t] = 1


@inner
def count_non_finite(tokens, s, first, n):
    """Counted tokens with a NaN or something beyond LARGEST in any array; overwrites D and X. In float64 only."""
    apart()
    fill(s, X, 0)
    _flag_non_finite(tokens.logp, s, first, n)
    _flag_non_finite(tokens.old_logp, s, first, n)
    _flag_non_finite(tokens.ref_logp, s, first, n)
    _flag_non_finite(tokens.weight, s, first, n)
    _flag_non_finite(tokens.advantage, s, first, n)
    total = 0.0
    for t in range(np.uint64(n)):
        total += s[X + t]
    return total


# ---- store -------------------------------------------------------------------------------------------

_FLOAT_MAX, _DOUBLE_MAX = float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)


@reduction
def _hold(part, s, n, largest):
    apart()
    zero, one, most = s.dtype.type(0), s.dtype.type(1), s.dtype.type(largest)
    beyond = zero
    for t in range(np.uint64(n)):
        g = s[G + t]
        beyond += one if abs(g) > most else zero
        part[t] = min(max(g, -most), most)
    return beyond != zero


@driver
def store(s, grad, first, n):
    """G to the gradient, held at the largest finite number; whether that was needed."""
    beyond = False
    if grad.itemsize == 4:
        beyond = _hold(view(grad.address + 4 * first, n, np.float32), s, n, _FLOAT_MAX)
    elif grad.itemsize == 8:
        beyond = _hold(view(grad.address + 8 * first, n, np.float64), s, n, _DOUBLE_MAX)
    return beyond


@inner
def shift(s, through, alike):
    """pre' through + alike, for counted tokens, on top of G."""
    apart()
    through, alike = s.dtype.type(through), s.dtype.type(alike)
    for t in range(np.uint64(TILE)):
        s[G + t] += (through * s[FLOWS + t] + alike) * s[M + t]


@inner
def _hold_sum(part, s, n, through, alike, largest):
    apart()
    for t in range(np.uint64(n)):
        more = through * np.float64(s[FLOWS + t]) + alike if s[M + t] != 0 else 0.0
        part[t] = min(max(np.float64(part[t]) + more, -largest), largest)


@driver
def add(s, grad, first, n, through, alike):
    """pre' through + alike, for counted tokens, on top of the gradient."""
    if grad.itemsize == 4:
        _hold_sum(view(grad.address + 4 * first, n, np.float32), s, n, through, alike, _FLOAT_MAX)
    else:
        _hold_sum(view(grad.address + 8 * first, n, np.float64), s, n, through, alike, _DOUBLE_MAX)
