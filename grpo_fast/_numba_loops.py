# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""The loops over a block, one per formula, and which of them a plan needs.

The loops know no formulas: they are made from the tables of ``_numba_formulas`` when a plan first asks for them, and
the kernel calls them by their addresses, a block at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba.np.unsafe.ndarray import to_fixed_tuple

from . import _contract as c
from ._contract import Plan
from ._numba_blocks import FLOWS, LAM, LANES, LOGP, N_PLAN, N_ROWS, OLD, TILE, WHOLE, A, C, D, G, M, R, X
from ._numba_exp import exp, ordered, unordered
from ._numba_formulas import KL_ESTIMATORS, SURROGATES, clamp, clip, identity, k3, sign_clip
from ._numba_jit import STAMP, apart, driver, inner, loop, reduction, view

SURROGATE, KL, LOG_RATIO, APPROX_KL, RATIO, RATIO_SQ, CLIP_LOW, CLIP_HIGH, LEAST, MOST, NON_FINITE = map(
    c.STATS.index,
    ("surrogate", "kl", "log_ratio", "approx_kl", "ratio", "ratio_sq", "clip_low", "clip_high",
     "log_ratio_min", "log_ratio_max", "non_finite"),
)  # fmt: skip

# ---- stages ------------------------------------------------------------------------------------------


def _pre(formula: Any) -> Any:
    """The formula's loop over a block: X to LAM, which is then clamped into [lam_lo, lam_hi], and to FLOWS."""

    @inner
    def loop(plan, s, size, lam_lo, lam_hi):
        apart()
        real = s.dtype.type
        lo, hi, lam_lo, lam_hi, zero = real(plan.pre_lo), real(plan.pre_hi), real(lam_lo), real(lam_hi), real(0)
        for t in range(size & WHOLE):
            value, slope = formula(s[X + t], s[A + t], lo, hi)
            held = min(max(value, lam_lo), lam_hi)
            s[LAM + t] = held
            s[FLOWS + t] = slope if held == value else zero

    return loop


_identity, _clamp, _sign_clip = map(_pre, (identity, clamp, sign_clip))


@driver
def pre_stage(plan, s, size):
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


@reduction
def exp_stage(s, size, bound):
    """R; the sums of lam, r - 1 - lam, r and r^2."""
    apart()
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


@inner
def extremes(s, size):
    """Least and largest counted LAM."""
    apart()
    zero = s.dtype.type(0)
    first, last = ordered(s.dtype.type(-np.inf)), ordered(s.dtype.type(np.inf))
    least, most = last, first
    for t in range(size & WHOLE):
        counted, lam = s[M + t] != zero, ordered(s[LAM + t])
        least = min(least, lam if counted else last)
        most = max(most, lam if counted else first)
    return np.float64(unordered(least, zero)), np.float64(unordered(most, zero))


@inner
def _plan(numbers):
    return Plan(*to_fixed_tuple(view(numbers, N_PLAN, np.float64), N_PLAN))


def surrogate_loop(formula: Any, dtype: Any, keep: bool = True) -> Any:
    """The formula's loop: its part of G, and the sums of c f and of what is clipped into the row; that of c df/dlam.

    NaN, and the row as it was, where the sum of c f is not finite in float32: then it is done over in float64.
    """
    stamp, most, narrow = STAMP, float(np.finfo(dtype).max), dtype is np.float32

    @loop(keep)
    def surrogate(numbers, scratch, size, weight, own_lam, row):
        stamp  # noqa: B018
        s: Any = view(scratch, TILE * N_ROWS, dtype)
        sums: Any = view(row, len(c.STATS), np.float64)
        plan = _plan(numbers)
        p = (dtype(plan.p0), dtype(plan.p1), dtype(plan.p2), dtype(plan.p3))
        bound, low, high = dtype(plan.exp_bound), dtype(plan.clip_lo), dtype(plan.clip_hi)
        weight, own_lam, zero = dtype(weight), dtype(own_lam), dtype(0)
        total, through, below, above = 0.0, 0.0, 0.0, 0.0
        for begin in range(np.uint64(0), size, np.uint64(LANES)):  # equal float32 terms round the same way, every time
            part, part_through, part_below, part_above = zero, zero, zero, zero
            for t in range(begin, begin + np.uint64(LANES)):
                r, a, c_t = s[R + t], s[A + t], s[C + t]
                f, lam_slope, logp_slope = formula(s[LAM + t], r, s[LOGP + t], s[OLD + t], a, p, bound)
                lam_slope *= c_t
                s[G + t] = weight * (own_lam * s[FLOWS + t] * lam_slope + c_t * logp_slope)
                part += c_t * f
                part_through += lam_slope
                part_below += s[M + t] if (a < zero) & (r < low) else zero
                part_above += s[M + t] if (a > zero) & (r > high) else zero
            total += np.float64(part)
            through += np.float64(part_through)
            below += np.float64(part_below)
            above += np.float64(part_above)
        if narrow and not abs(total) <= most:
            return np.nan
        sums[SURROGATE] += total
        sums[CLIP_LOW] += below
        sums[CLIP_HIGH] += above
        return through

    return surrogate


def kl_loop(formula: Any, dtype: Any) -> Any:
    """The formula's loop, clamped and straight-through: its part of G, and the sum of rho k into the row; that sum."""
    stamp = STAMP

    @loop()
    def kl(numbers, scratch, size, weight, rho, row):
        stamp  # noqa: B018
        s: Any = view(scratch, TILE * N_ROWS, dtype)
        sums: Any = view(row, len(c.STATS), np.float64)
        plan = _plan(numbers)
        weight, zero, bound = dtype(weight * plan.beta), dtype(0), dtype(plan.exp_bound)
        most_d, most_k = dtype(plan.kl_clamp_in), dtype(plan.kl_clamp_out)
        total = zero
        if plan.kl_straight_through == 0 and plan.rho == c.RHO_NONE and min(most_d, most_k) == np.inf:
            for t in range(size & WHOLE):
                k, slope, _ = formula(s[D + t], bound)
                s[G + t] += weight * slope * s[M + t]
                total += k
            sums[KL] += np.float64(total)
            return np.float64(total)
        straight_through = plan.kl_straight_through != 0
        own_rho = plan.rho != c.RHO_NONE and plan.rho_level == c.LEVEL_TOKEN
        same_rho = dtype(1 if plan.rho == c.RHO_NONE else rho)
        through = plan.rho == c.RHO_RATIO and plan.rho_level != c.LEVEL_SEQUENCE  # rho has a slope of its own
        for t in range(size & WHOLE):
            d = s[D + t]
            held_d = min(max(d, -most_d), most_d)
            k, slope, both = formula(held_d, bound)
            held_k = min(max(k, -most_k), most_k)
            own = held_k if through else zero
            slope = (both if through else slope) if (held_d == d) & (held_k == k) else own
            slope = own - d if straight_through else slope
            rho_t = exp(s[X + t], bound)[0] if own_rho else same_rho
            k = rho_t * held_k
            s[G + t] += weight * rho_t * slope * s[M + t]
            total += k
        sums[KL] += np.float64(total)
        return np.float64(total)

    return kl


@functools.cache
def known_loop(surrogate: bool, number: int, dtype: Any) -> Any:
    """That of a row of the tables, compiled when first asked for."""
    return surrogate_loop(SURROGATES[number], dtype) if surrogate else kl_loop(KL_ESTIMATORS[number], dtype)


# ---- the commonest losses ---------------------------------------------------------------------------


def _fused(surrogate: Any, kl: Any) -> Any:
    """For a full block of tokens that share advantage and weight, and nothing clamped: no stages, no scratch."""

    @reduction
    def loop(plan, logp, old_logp, ref_logp, grad, advantage, factor, weight, kl_weight, limits, row):
        """Gradient and, if the dtype was enough, statistics; whether it was."""
        apart()
        real = logp.dtype.type
        zero, one, bound = real(0), real(1), real(np.inf)  # what would saturate is not tame
        p = (real(plan.p0), real(plan.p1), real(plan.p2), real(plan.p3))
        most = real(min(limits.log_ratio, plan.exp_bound))
        a, through, beta = real(advantage), real(weight * factor), real(kl_weight * plan.beta)
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
                k, k_slope, _ = kl(d, bound)
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


@inner
def is_common(plan, tokens, own, grad, itemsize):
    """Whether full blocks can go through a fused loop."""
    plain = plan.level == c.LEVEL_TOKEN and plan.pre == c.PRE_IDENTITY and plan.rho == c.RHO_NONE
    free = plan.lam_lo == -np.inf and plan.lam_hi == np.inf and min(plan.kl_clamp_in, plan.kl_clamp_out) == np.inf
    known = plan.surrogate == 0 and plan.kl_straight_through == 0 and (plan.kl == 3 or plan.kl == c.KL_NONE)
    shared = own.step == own.last and tokens.advantage.itemsize == 0 and tokens.weight.itemsize == 0
    alike = tokens.logp.itemsize == itemsize and tokens.old_logp.itemsize == itemsize
    alike &= plan.kl == c.KL_NONE or tokens.ref_logp.itemsize == itemsize
    return plain and free and known and shared and alike and (grad.itemsize == 0 or grad.itemsize == itemsize)


@inner
def common_block(plan, tokens, own, first, row, grad, s, limits):
    at = s.itemsize * first
    logp: Any = view(tokens.logp.address + at, TILE, s.dtype)
    old_logp = view(tokens.old_logp.address + at, TILE, s.dtype)
    out = s[G : G + np.uint64(TILE)] if grad.itemsize == 0 else view(grad.address + at, TILE, s.dtype)
    ref_logp = logp if plan.kl == c.KL_NONE else view(tokens.ref_logp.address + at, TILE, s.dtype)
    return _clip_and_k3(
        plan, logp, old_logp, ref_logp, out, own.advantage, own.factor, own.weight, own.kl_weight, limits, row
    )
