# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, arg-type"
"""The formulas, one function each, and their tables: all that a new one needs is its function and its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._numba_exp import exp, fading_exp
from ._numba_jit import formula

# ---- surrogates: (lam, r, logp, old_logp, a, p, bound) -> (value, d/dlam, d/dlogp) --------------------


@formula
def clip(lam, r, logp, old_logp, a, p, bound):
    zero = type(r)(0)
    positive = a > zero
    lower = zero if positive else p[0]
    upper = p[1] if positive else p[2]
    flows = (lower <= r) & (r <= upper)  # ties flow in full
    return -a * min(max(r, lower), upper), -a * r if flows else zero, zero


@formula
def cispo(lam, r, logp, old_logp, a, p, bound):
    weight = min(max(r, p[0]), p[1])  # detached
    return -weight * a * logp, type(r)(0), -weight * a


@formula
def sapo(lam, r, logp, old_logp, a, p, bound):
    zero, one, four = type(r)(0), type(r)(1), type(r)(4)
    tau = p[0] if a > zero else p[1]
    z = tau * (r - one)
    e = exp(-abs(z), bound)[0]
    e = zero if abs(z) > bound else e  # saturated, it would not vanish against a large r
    sigmoid = (one if z >= zero else e) / (one + e)
    return -a * four / tau * sigmoid, -four * a * (e / ((one + e) * (one + e))) * r, zero


@formula
def gpg(lam, r, logp, old_logp, a, p, bound):
    return -a * logp, type(r)(0), -a


@formula
def ratio(lam, r, logp, old_logp, a, p, bound):
    zero, one = type(r)(0), type(r)(1)
    sign = one if lam > zero else (-one if lam < zero else zero)
    return p[0] * abs(lam) - a * r, p[0] * sign - a * r, zero


@formula
def vespo(lam, r, logp, old_logp, a, p, bound):
    zero = type(r)(0)
    k = p[0] if a >= zero else p[2]
    rate = p[1] if a >= zero else p[3]
    phi = fading_exp(rate + k * lam - rate * r)  # detached
    return -phi * a * logp, zero, -phi * a


@formula
def _less_probability(logp, bound):
    """Probability - 1, to full precision."""
    zero = type(logp)(0)
    return exp(zero if logp > zero else logp, bound)[1]


@formula
def dppo_tv(lam, r, logp, old_logp, a, p, bound):
    zero = type(r)(0)
    moved = _less_probability(logp, bound) - _less_probability(old_logp, bound)
    through = moved <= p[1] if a > zero else moved >= -p[0]
    weight = min(r, p[2]) if through else zero  # detached
    return -weight * a * logp, zero, -weight * a


@formula
def dppo_kl(lam, r, logp, old_logp, a, p, bound):
    zero, one, tiny, eps = type(r)(0), type(r)(1), type(r)(1e-30), type(r)(1e-8)
    now, before = _less_probability(logp, bound), _less_probability(old_logp, bound)
    # q (old - logp) + (1 - q) log(x) <= threshold, without the logarithm
    threshold = p[1] if a > zero else p[0]
    rest = threshold - (one + before) * (old_logp - logp)
    near = (eps - before) / (eps - now) <= exp(rest / max(-before, tiny), bound)[0]
    towards = now <= before if a > zero else now >= before
    weight = min(r, p[2]) if near | towards else zero  # detached
    return -weight * a * logp, zero, -weight * a


@formula
def dro(lam, r, logp, old_logp, a, p, bound):
    return type(r)(0.5) * p[0] * lam * lam - a * logp, p[0] * lam, -a


#: By the number in ``tables.SURROGATES``.
SURROGATES: dict[int, Callable[..., Any]] = {
    0: clip,
    1: cispo,
    2: sapo,
    3: gpg,
    4: ratio,
    5: vespo,
    6: dppo_tv,
    7: dppo_kl,
    8: dro,
}

# ---- KL estimators: (d, bound) -> (value, d/dlogp, their sum), d = ref_logp - logp --------------------
# The sum is the slope under a ratio factor, and would cancel.


@formula
def k1(d, bound):
    return -d, type(d)(1), type(d)(1) - d


@formula
def k2(d, bound):
    half = type(d)(0.5) * d * d
    return half, -d, half - d


@formula
def k3(d, bound):
    _, minus_1, tail = exp(d, bound)
    return tail, -minus_1, -d


@formula
def absolute(d, bound):
    zero, one = type(d)(0), type(d)(1)
    sign = one if d > zero else (-one if d < zero else zero)
    return abs(d), -sign, abs(d) - sign


#: By the number in ``tables.KL_ESTIMATORS``.
KL_ESTIMATORS: dict[int, Callable[..., Any]] = {1: k1, 2: k2, 3: k3, 4: absolute}

# ---- what the level does to x: (x, a, lo, hi) -> (value, slope) --------------------------------------


@formula
def identity(x, a, lo, hi):
    return x, type(x)(1)


@formula
def clamp(x, a, lo, hi):
    held = min(max(x, lo), hi)
    return held, type(x)(1) if held == x else type(x)(0)


@formula
def sign_clip(x, a, lo, hi):
    zero, one = type(x)(0), type(x)(1)
    clipped = min(max(x, lo), hi)
    held = min(x, clipped) if a > zero else max(x, clipped)
    return held, one if held == x else zero
