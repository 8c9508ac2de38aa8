"""Random plans and batches of the kernel contract, further than the public methods reach."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from grpo_fast import _contract as c
from grpo_fast.tables import KL_ESTIMATORS, SURROGATES

INF = np.inf
#: Lengths around every boundary the loops have: lanes, blocks, and empty.
LENGTHS = (0, 1, 15, 16, 17, 63, 255, 256, 257, 300, 511, 530)


def plan(rng: np.random.Generator, surrogate: str, level: int, dtype: np.dtype[Any], **fields: Any) -> c.Plan:
    """A plan with everything else drawn."""
    bounds = SURROGATES[surrogate].bounds(**REQUIRED.get(surrogate, {}))
    params = list(bounds.params)
    if surrogate == "ratio" and rng.random() < 0.5:
        params[0] = 0.3  # what a selection adds
    sequence = level != c.LEVEL_TOKEN
    pre = rng.choice([c.PRE_IDENTITY, c.PRE_CLAMP, c.PRE_SIGN_CLIP])
    clamp = rng.random() < 0.3
    drawn = {
        **{f"p{k}": value for k, value in enumerate(params)},
        "clip_lo": bounds.clip_lo,
        "clip_hi": bounds.clip_hi,
        "reduce": rng.choice([c.REDUCE_MEAN, c.REDUCE_SUM]) if sequence else c.REDUCE_MEAN,
        "pre": pre,
        "pre_lo": -INF if pre == c.PRE_IDENTITY else -0.31,
        "pre_hi": INF if pre == c.PRE_IDENTITY else 0.37,
        "lam_lo": -0.21 if clamp else -INF,
        "lam_hi": 0.23 if clamp else INF,
        "weight_use": rng.choice([c.USE_MULTIPLY, c.USE_LOG_OFFSET, c.USE_GEOMETRIC_MEAN])
        if sequence
        else c.USE_MULTIPLY,
        "kl": rng.choice([c.KL_NONE, *(row.id for row in KL_ESTIMATORS.values())]),
        "kl_straight_through": rng.choice([0, 0, 1]),
        "kl_clamp_in": rng.choice([INF, 0.4]),
        "kl_clamp_out": rng.choice([INF, 0.05]),
        "beta": rng.choice([0.0, 0.3]),
        "rho": rng.choice([c.RHO_NONE, c.RHO_RATIO, c.RHO_RATIO_DETACHED]),
        "rho_level": rng.choice([c.LEVEL_TOKEN, c.LEVEL_SEQUENCE, c.LEVEL_SEQUENCE_TOKEN]),
    }
    drawn.update(fields)
    defaults = c.Plan._field_defaults
    values = {name: type(defaults.get(name, 0.0))(value) for name, value in drawn.items()}
    return c.Plan(surrogate=SURROGATES[surrogate].id, level=level, exp_bound=c.EXP_BOUND[np.dtype(dtype)], **values)


#: Options without a default.
REQUIRED: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_bound": "relative"}, "dro": {"dro_beta": 0.3},
    "dppo_tv": {"epsilon": 0.05, "epsilon_high": 0.04, "delta": 1.3}, "dppo_kl": {"epsilon": 0.01, "epsilon_high": 0.02},
}  # fmt: skip


def kinks(p: c.Plan) -> list[float]:
    """Every log-ratio at which some bound of the plan changes branch."""
    ratios = [p.clip_lo, p.clip_hi, p.p0, p.p1, p.p2]
    logs = [np.log(r) for r in ratios if 0 < r < INF] + [p.pre_lo, p.pre_hi, p.lam_lo, p.lam_hi]
    return [v for v in logs if np.isfinite(v)]


def batch(
    rng: np.random.Generator,
    p: c.Plan,
    dtype: np.dtype[Any],
    lengths: tuple[int, ...] = LENGTHS,
    spread: float = 0.25,
    mask: bool | None = None,
) -> c.Batch:
    """Completions in shuffled ranges with gaps, poison in everything masked, and what the plan may use."""
    dtype = np.dtype(dtype)
    order = rng.permutation(len(lengths))
    start = np.zeros(len(lengths), np.int64)
    end = 3
    for i in order:
        start[i] = end
        end += lengths[i] + int(rng.integers(0, 5))
    stop = start + np.array(lengths)
    n = end + 2
    masked = rng.random(n) < 0.25
    if lengths:
        i = int(rng.integers(len(lengths)))
        masked[start[i] : stop[i]] = True
    use_mask = bool(rng.random() < 0.7) if mask is None else mask
    counted = np.zeros(n, bool)
    for a, b in zip(start, stop, strict=True):
        counted[a:b] = True
    if use_mask:
        counted &= ~masked

    def token(values: np.ndarray, *kinds: Any) -> np.ndarray:
        values = values.astype(rng.choice([dtype, *kinds]))
        values[~counted] = rng.choice([np.nan, INF, -INF, 0.0])
        return values

    logp = -rng.exponential(1.0, n)
    x = rng.normal(0, spread, n)
    for kink in kinks(p):  # data within rounding of a bound may take either branch
        near = np.abs(x - kink) < 1e-3
        x[near] += 3e-3
    for _ in range(3):
        x[_undecided(p, logp, logp - x)] += 3e-3
    d = rng.normal(0, 0.3, n)
    for kink in (p.kl_clamp_in, -p.kl_clamp_in):
        d[np.abs(d - kink) < 1e-3] += 3e-3
    has_old = rng.random() < 0.85
    level = rng.choice(["completion", "step", "both", "token", "all"])
    steps = [np.sort(rng.permutation(m)[: int(rng.integers(0, min(m, 9) + 1))]) for m in lengths]
    step_ends = np.concatenate([*steps, np.zeros(0)]).astype(np.int64)
    step_offsets = np.concatenate([[0], np.cumsum([len(s) for s in steps])]).astype(np.int64)
    with_steps, with_tokens = level in ("step", "both", "all"), level in ("token", "all")
    weighted = rng.random() < 0.6 or p.weight_use != c.USE_MULTIPLY
    return c.Batch(
        start,
        stop,
        token(logp),
        token(logp - x) if has_old else None,
        token(logp + d) if p.kl else None,
        (~masked).astype(np.uint8) if use_mask else None,
        token(rng.uniform(0.2, 2.0, n), np.float32, np.float64) if weighted else None,
        completion_weight(rng, p, len(lengths)) if rng.random() < 0.3 else None,
        rng.normal(0, 1, len(lengths)) if level in ("completion", "both", "all") else None,
        rng.normal(0, 1, len(step_ends)) if with_steps else None,
        step_offsets if with_steps else None,
        step_ends if with_steps else None,
        token(rng.normal(0, 1, n), np.float32, np.float64) if with_tokens else None,
        rng.uniform(0.1, 1.0, len(lengths)),
        rng.uniform(0.1, 1.0, len(lengths)) if p.kl and rng.random() < 0.3 else None,
    )


def _undecided(p: c.Plan, logp: np.ndarray, old_logp: np.ndarray) -> np.ndarray:
    """Where the divergence of a surrogate that compares probabilities is within rounding of its thresholds."""
    now, before = np.exp(logp), np.exp(np.minimum(old_logp, 0))
    moved = now - before
    kl = before * (old_logp - logp) + (1 - before) * np.log((1 - before + 1e-8) / (1 - now + 1e-8))
    near = {
        SURROGATES["dppo_tv"].id: [moved - p.p1, moved + p.p0],
        SURROGATES["dppo_kl"].id: [kl - p.p1, kl - p.p0, moved],
    }.get(p.surrogate, [])
    return np.any([np.abs(values) < 1e-5 for values in near] or [np.zeros(len(logp), bool)], axis=0)


def terms(p: c.Plan, t: Any, lam: np.ndarray, surrogate: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Absolute terms of the surrogate before they cancel; ``size`` are those of the advantage."""
    weight = 1.0 if t.weight is None or p.weight_use != c.USE_MULTIPLY else np.abs(t.weight)
    r = np.exp(np.clip(lam, -p.exp_bound, p.exp_bound))
    if p.surrogate == SURROGATES["dro"].id:
        return weight * (size * np.abs(t.logp) + p.p0 / 2 * lam**2)
    if p.surrogate == SURROGATES["ratio"].id:
        return weight * (size * r + p.p0 * np.abs(lam))
    whole = np.abs(surrogate) * size / np.where(t.A == 0, 1.0, np.abs(t.A))
    if p.surrogate == SURROGATES["vespo"].id:  # those of the exponent, which multiply
        k, rate = np.where(t.A >= 0, p.p0, p.p2), np.where(t.A >= 0, p.p1, p.p3)
        whole = whole * (1 + rate + k * np.abs(lam) + rate * r)
    return whole


def completion_weight(rng: np.random.Generator, p: c.Plan, n: int) -> np.ndarray:
    """Of either sign, where no logarithm is taken of it."""
    signs = rng.choice([-1.0, 1.0], n) if p.weight_use == c.USE_MULTIPLY else 1.0
    return rng.uniform(0.5, 2.0, n) * signs


def cells() -> list[tuple[str, int]]:
    return list(itertools.product(SURROGATES, (c.LEVEL_TOKEN, c.LEVEL_SEQUENCE, c.LEVEL_SEQUENCE_TOKEN)))
