"""Is the oracle the contract? Numbers worked out by hand, then gradients by differentiation.

Three opinions meet here: literals; 4th-order central differences of the oracle's own loss; and a
restatement of the contract in scalar Python on complex numbers (``restated_loss``), differentiated by
complex steps, where what is detached is a value frozen at the point of differentiation.
"""

from __future__ import annotations

import cmath
import itertools
import math
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest

from grpo_fast import _contract as c
from grpo_fast import _numpy, tables

CLIP, CISPO, SAPO, GPG = (tables.SURROGATES[name].id for name in ("clip", "cispo", "sapo", "gpg"))
RATIO, VESPO, DPPO_TV, DPPO_KL, DRO = (
    tables.SURROGATES[name].id for name in ("ratio", "vespo", "dppo_tv", "dppo_kl", "dro")
)
K1, K2, K3, KABS = (tables.KL_ESTIMATORS[name].id for name in ("k1", "k2", "k3", "abs"))
TOKEN, SEQUENCE, SEQUENCE_TOKEN = c.LEVEL_TOKEN, c.LEVEL_SEQUENCE, c.LEVEL_SEQUENCE_TOKEN
LEVELS = tables.LEVELS.values()
NAN, INF = math.nan, math.inf
LOG2, LOG3 = math.log(2), math.log(3)
FLOATS = tuple(k for k in c.Batch._fields if k.endswith(("old_logp", "ref_logp", "weight", "advantages")))
CLIP_02 = {"surrogate": CLIP, "p0": 0.8, "p1": 1.2, "p2": INF, "clip_lo": 0.8, "clip_hi": 1.2}
NO_CLIP = {"surrogate": CLIP, "p0": 0.0, "p1": INF, "p2": INF}


def f64(values: Any) -> Any:
    return None if values is None else np.array(values, np.float64)


def batch_of(logp: Any, *, start: Any = None, stop: Any = None, **given: Any) -> c.Batch:
    """A batch; without start and stop it is one completion that owns everything."""
    logp = logp if isinstance(logp, np.ndarray) else f64(logp)
    start, stop = ([0], [len(logp)]) if start is None else (start, stop)
    ints = {k: None if given.get(k) is None else np.array(given[k], np.int64) for k in ("step_offsets", "step_ends")}
    floats = {k: given[k] if isinstance(given.get(k), np.ndarray) else f64(given.get(k)) for k in FLOATS}
    mask = None if given.get("mask") is None else np.array(given["mask"], np.uint8)
    weights = f64(given.get("weights", np.ones(len(start))))
    start, stop = np.array(start, np.int64), np.array(stop, np.int64)
    kl_weights = f64(given.get("kl_weights"))
    return c.Batch(
        start=start, stop=stop, logp=logp, mask=mask, weights=weights, kl_weights=kl_weights, **floats, **ints
    )


def run(plan: c.Plan, batch: c.Batch, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """(stats, gradient); the slots of no completion keep -7."""
    stats, grad = np.full((len(batch.start), len(c.STATS)), 77.0), np.full(len(batch.logp), -7, dtype)
    _numpy.policy_loss(plan, batch, grad, stats, 1)
    return stats, grad


def one(plan: dict[str, Any], x: Any, **given: Any) -> tuple[dict[str, float], list[float]]:
    """One completion with log-ratios x and logp = -1 (unless ``logp`` is given); A = 1 unless given."""
    logp = f64(given.pop("logp", np.full(len(x), -1.0)))
    if not {"advantages", "token_advantages", "step_advantages"} & set(given):
        given["advantages"] = [1.0]
    stats, grad = run(c.Plan(**plan), batch_of(logp, old_logp=logp - f64(x), **given))
    return dict(zip(c.STATS, stats[0].tolist(), strict=True)), grad.tolist()


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-13, abs=1e-14)


# ---- tables ------------------------------------------------------------------------------------------


def test_the_oracle_has_every_row_of_the_tables():
    assert set(_numpy.SURROGATES) == {row.id for row in tables.SURROGATES.values()}
    assert set(_numpy.KL_ESTIMATORS) == {row.id for row in tables.KL_ESTIMATORS.values()}
    assert set(_numpy.PRE) == {c.PRE_IDENTITY, c.PRE_CLAMP, c.PRE_SIGN_CLIP}


# ---- surrogates, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "A", "value", "slope"),
    [  # low 0.8, cap 1.2 for A > 0, cap 3 for A < 0
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.95, -0.3, 0.285, 0.285),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (4.0, -2.0, 6.0, 0.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip(r, A, value, slope):
    stats, grad = one({"surrogate": CLIP, "p0": 0.8, "p1": 1.2, "p2": 3.0}, [math.log(r)], advantages=[A])
    assert stats["surrogate"] == close(value)
    assert grad == close([slope])


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("bound", ["p0", "p1", "p2"])
def test_a_tie_with_a_bound_of_the_clip_flows_in_full(A, bound):
    plan = {"surrogate": CLIP, "p0": 0.0, "p1": 5.0, "p2": 5.0} | {bound: 1.0}  # r is exactly 1
    assert one(plan, [0.0], advantages=[A])[1] == [-A]


def test_clip_says_what_the_papers_say():
    """The three bounds against -min(min(r, delta) A, clip(r) A) and the dual clip, as published."""
    for r, A in itertools.product([0.3, 0.75, 1.0, 1.25, 1.45, 2.5, 9.0], [1.5, -0.7]):
        clipped = min(max(r, 0.8), 1.3) * A
        for options, expected in [
            ({}, -min(r * A, clipped)),
            ({"delta": 1.4}, -min(min(r, 1.4) * A, clipped)),
            ({"delta": 1.1}, -min(min(r, 1.1) * A, clipped)),
            ({"dual_clip": 3.0}, -min(r * A, clipped) if A > 0 else min(-min(r * A, clipped), -3.0 * A)),
        ]:
            bounds = tables.SURROGATES["clip"].bounds(epsilon=0.2, epsilon_high=0.3, **options)
            plan = {"surrogate": CLIP} | dict(zip(("p0", "p1", "p2"), bounds.params, strict=True))
            assert one(plan, [math.log(r)], advantages=[A])[0]["surrogate"] == close(expected), (r, A, options)


def test_cispo():
    plan = {"surrogate": CISPO, "p0": 0.8, "p1": 1.2}
    stats, grad = one(plan, np.log([0.5, 1.1, 2.0]), logp=[-1.0, -2.0, -0.5], advantages=[-2.0])
    # -w A logp with w = 0.8, 1.1, 1.2: 2 (-0.8 - 2.2 - 0.6)
    assert stats["surrogate"] == close(-7.2)
    assert grad == close([1.6, 2.2, 2.4])


def test_sapo():
    plan = {"surrogate": SAPO, "p0": 2.0, "p1": 4.0}
    # A = 1: z = 2 (r - 1) = log 3, sigmoid 3/4: value -1 4/2 3/4, slope -4 3/16 r
    r = 1 + LOG3 / 2
    stats, grad = one(plan, [math.log(r)], advantages=[1.0])
    assert (stats["surrogate"], grad) == (close(-1.5), close([-0.75 * r]))
    # A = -3: z = 4 (r - 1) = -log 3, sigmoid 1/4: value 3 4/4 1/4, slope 12 3/16 r
    r = 1 - LOG3 / 4
    stats, grad = one(plan, [math.log(r)], advantages=[-3.0])
    assert (stats["surrogate"], grad) == (close(0.75), close([2.25 * r]))
    assert one(plan, [0.0], advantages=[1.0])[1] == [-1.0]  # on-policy it is the policy gradient


@pytest.mark.parametrize("bound", c.EXP_BOUND.values())
@pytest.mark.parametrize("lam", [3.0, 86.0, 299.0, 1e6])
def test_sapo_dies_out_far_from_the_policy(lam, bound):
    """An exp saturated from below would leave a slope of exp(-bound) exp(bound) = 1 here."""
    stats, grad = one({"surrogate": SAPO, "p0": 50.0, "p1": 50.0, "exp_bound": bound}, [lam], advantages=[5.0])
    assert stats["surrogate"] == close(-0.4)
    assert abs(grad[0]) < 1e-300


def test_gpg():
    stats, grad = one({"surrogate": GPG}, [0.3, -0.2], logp=[-1.0, -2.0], token_advantages=[2.0, -0.5])
    assert stats["surrogate"] == close(2.0 - 1.0)
    assert grad == [-2.0, 0.5]


def test_ratio():
    """-A r + coefficient |lam|; log_clip is the same without a coefficient."""
    for x, value, slope in ((LOG2, -4 + 0.5 * LOG2, -4 + 0.5), (-LOG2, -1 + 0.5 * LOG2, -1 - 0.5), (0.0, -2.0, -2.0)):
        stats, grad = one({"surrogate": RATIO, "p0": 0.5}, [x], advantages=[2.0])
        assert (stats["surrogate"], grad) == (close(value), close([slope]))
    assert tables.SURROGATES["log_clip"].id == RATIO


@pytest.mark.parametrize(
    ("r", "A", "phi"),
    [
        (1.0, 2.0, 1.0),
        (1.0, -2.0, 1.0),
        (2.0, 2.0, 4 * math.exp(-3)),  # e^3 2^2 e^-6
        (2.0, -2.0, 8 * math.exp(-2)),  # e^2 2^3 e^-4
        (0.5, 2.0, 0.25 * math.exp(1.5)),
        (0.5, 0.0, 0.25 * math.exp(1.5)),
        (1e30, 2.0, 0.0),
    ],
)
def test_vespo(r, A, phi):
    plan = {"surrogate": VESPO, "p0": 2.0, "p1": 3.0, "p2": 3.0, "p3": 2.0}
    stats, grad = one(plan, [math.log(r)], advantages=[A])
    assert stats["surrogate"] == close(phi * A)  # -phi A logp, logp = -1
    assert grad == close([-phi * A])


@pytest.mark.parametrize(
    ("p", "q", "A", "tv", "kl"),
    [  # whether the token passes; bounds 0.2 down, 0.1 up for tv, 0.04 and 0.02 for kl
        (0.5, 0.35, 1.0, False, False),  # 0.15 up; kl = 0.0460
        (0.5, 0.35, -1.0, True, True),  # up is the other way
        (0.5, 0.45, 1.0, True, True),  # kl = 0.0050
        (0.5, 0.65, -1.0, True, False),  # 0.15 down; kl = 0.0457
        (0.5, 0.75, -1.0, False, False),
        (0.5, 0.65, 1.0, True, True),  # down is the other way
        (0.5, 0.5, 1.0, True, True),
        (0.5, 0.9, 0.0, False, False),  # an advantage of 0 counts as negative, and is 0
        (1.0, 0.95, 1.0, True, False),  # kl = -0.049 + 0.05 log(0.05 / 1e-8) = 0.72
    ],
)
def test_dppo(p, q, A, tv, kl):
    x = math.log(p / q)
    for surrogate, low, high, through in ((DPPO_TV, 0.2, 0.1, tv), (DPPO_KL, 0.04, 0.02, kl)):
        for cap in (INF, 1.2):
            plan = {"surrogate": surrogate, "p0": low, "p1": high, "p2": cap}
            stats, grad = one(plan, [x], logp=[math.log(p)], advantages=[A])
            weight = min(p / q, cap) * through
            assert stats["surrogate"] == close(-weight * A * math.log(p))
            assert grad == close([-weight * A])


def test_dppo_holds_log_probs_above_0_at_0():
    """Rounding puts them there. pi - pi_old = 1 - 0.95, and the second token has not moved at all."""
    for surrogate in (DPPO_TV, DPPO_KL):
        plan = {"surrogate": surrogate, "p0": 0.0, "p1": 0.0, "p2": INF}
        for logp, old, A, through in ((1e-3, math.log(0.95), 1.0, 0), (1e-3, 2e-3, -1.0, 1), (2e-3, 1e-3, 1.0, 1)):
            _, grad = run(c.Plan(**plan), batch_of([logp], old_logp=[old], advantages=[A]))
            assert grad.tolist() == close([-A * math.exp(logp - old) * through])


def test_dro():
    stats, grad = one({"surrogate": DRO, "p0": 0.6}, [0.5, -1.0], advantages=[2.0])
    assert stats["surrogate"] == close(2.0 + 0.3 * 0.25 + 2.0 + 0.3)
    assert grad == close([-2.0 + 0.3, -2.0 - 0.6])


def test_the_kl_has_weights_of_its_own():
    plan = NO_CLIP | {"kl": K2, "beta": 0.5}
    logp, ref = [-1.0, -1.0], [-0.5, -3.0]  # d = 0.5, -2
    given = {"start": [0, 1], "stop": [1, 2], "old_logp": logp, "ref_logp": ref, "advantages": [1.0, 1.0]}
    _, grad = run(c.Plan(**plan), batch_of(logp, **given, weights=[2.0, 3.0], kl_weights=[7.0, 0.0]))
    assert grad.tolist() == close([-2.0 - 7.0 * 0.5 * 0.5, -3.0])
    _, grad = run(c.Plan(**plan), batch_of(logp, **given, weights=[2.0, 3.0]))
    assert grad.tolist() == close([-2.0 - 2.0 * 0.5 * 0.5, -3.0 + 3.0 * 0.5 * 2.0])


def test_without_old_logp_the_ratio_is_one_and_the_gradient_flows():
    stats, grad = run(c.Plan(**CLIP_02), batch_of([-1.0, -2.0], advantages=[3.0]))
    assert grad.tolist() == [-3.0, -3.0]
    assert stats[0].tolist() == [-6.0, 0, 0, 0, 2.0, 2.0, 0, 0, 0, 0, 0]


# ---- levels, reduce, pre, clamps, by hand ------------------------------------------------------------

X = [LOG2, LOG3, math.log(36)]  # sum log 216, mean log 6


@pytest.mark.parametrize(
    ("level", "reduce", "value", "grad"),
    [
        (TOKEN, c.REDUCE_MEAN, -77.0, [-2.0, -3.0, -72.0]),  # -(2 1 + 3 1 + 36 2)
        (SEQUENCE, c.REDUCE_MEAN, -24.0, [-8.0, -8.0, -8.0]),  # -6 (1 + 1 + 2), each through the mean
        (SEQUENCE, c.REDUCE_SUM, -864.0, [-864.0, -864.0, -864.0]),
        (SEQUENCE_TOKEN, c.REDUCE_MEAN, -24.0, [-6.0, -6.0, -12.0]),
        (SEQUENCE_TOKEN, c.REDUCE_SUM, -864.0, [-216.0, -216.0, -432.0]),
    ],
)
def test_levels_and_reductions(level, reduce, value, grad):
    plan = NO_CLIP | {"level": level, "reduce": reduce}
    stats, got = one(plan, X, token_advantages=[1.0, 1.0, 2.0])
    assert stats["surrogate"] == close(value)
    assert got == close(grad)


def test_reductions_count_only_what_the_mask_counts():
    plan = NO_CLIP | {"level": SEQUENCE}
    stats, grad = one(plan, [LOG2, 50.0, LOG2 * 3], mask=[1, 0, 255], advantages=[1.0])
    assert stats["log_ratio"] == close(2 * LOG2)
    assert grad == close([-4.0, 0.0, -4.0])


@pytest.mark.parametrize(
    ("pre", "A", "values", "slopes"),
    [
        (c.PRE_CLAMP, 1.0, [-0.5, -0.5, 0.1, 0.25, 0.25], [0, 1, 1, 1, 0]),
        (c.PRE_CLAMP, -1.0, [-0.5, -0.5, 0.1, 0.25, 0.25], [0, 1, 1, 1, 0]),
        (c.PRE_SIGN_CLIP, 1.0, [-0.9, -0.5, 0.1, 0.25, 0.25], [1, 1, 1, 1, 0]),
        (c.PRE_SIGN_CLIP, -1.0, [-0.5, -0.5, 0.1, 0.25, 0.7], [0, 1, 1, 1, 1]),
        (c.PRE_SIGN_CLIP, 0.0, [-0.5, -0.5, 0.1, 0.25, 0.7], [0, 1, 1, 1, 1]),
        (c.PRE_IDENTITY, 1.0, [-0.9, -0.5, 0.1, 0.25, 0.7], [1, 1, 1, 1, 1]),
    ],
)
def test_pre(pre, A, values, slopes):
    """Per token from tokens alone; at the sequence level, where H/n is one number, from its pattern."""
    old = f64([0.9, 0.5, -0.1, -0.25, -0.7])  # logp = 0, so that x is exact and two of the tokens sit on a bound
    plan = NO_CLIP | {"pre": pre, "pre_lo": -0.5, "pre_hi": 0.25}
    for t in range(5):
        stats, grad = run(c.Plan(**plan), batch_of([0.0], old_logp=old[t : t + 1], advantages=[A]))
        assert stats[0, c.STATS.index("log_ratio")] == values[t]
        assert grad[0] == close(-A * math.exp(values[t]) * slopes[t])
    stats, grad = run(c.Plan(**plan, level=SEQUENCE), batch_of(np.zeros(5), old_logp=old, advantages=[A]))
    mean = sum(values) / 5
    assert stats[0, c.STATS.index("log_ratio")] == close(mean)
    assert grad == close([-A * math.exp(mean) * s for s in slopes])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("x", "lam", "flows"), [(0.7, 0.5, 0), (0.5, 0.5, 1), (-0.25, -0.25, 1), (-0.3, -0.25, 0)])
def test_lam_is_clamped_with_slope_one_inside_ends_included(level, x, lam, flows):
    plan = c.Plan(**NO_CLIP, level=level, lam_lo=-0.25, lam_hi=0.5)
    stats, grad = run(plan, batch_of([0.0, 0.0], old_logp=[-x, -x], advantages=[1.0]))
    assert stats[0, c.STATS.index("log_ratio_max")] == lam
    assert grad == close([-math.exp(lam) * flows] * 2)


# ---- weights, by hand --------------------------------------------------------------------------------


def test_multiply_weighs_the_surrogate_and_not_the_kl():
    plan = NO_CLIP | {"kl": K2, "beta": 0.5}
    stats, grad = one(plan, [0.0, 0.0], token_weight=[0.5, 2.0], completion_weight=[3.0], ref_logp=[0.0, -3.0])
    assert stats["surrogate"] == close(-7.5)
    assert stats["kl"] == close(0.5 + 2.0)  # d = 1, -2
    assert grad == close([-1.5 - 0.5, -6.0 + 1.0])


def test_multiply_at_the_sequence_level_enters_h():
    stats, grad = one(NO_CLIP | {"level": SEQUENCE}, [LOG2, LOG2], token_weight=[1.0, 3.0])
    assert stats["surrogate"] == close(-8.0)
    assert grad == close([-4.0, -4.0])


def test_log_offset_is_summed_and_clamped():
    # lam = mean x + clamp(log 2) + clamp(log 1/100 -> -1) = log 2 + log 2 - 1
    plan = NO_CLIP | {"level": SEQUENCE, "weight_use": c.USE_LOG_OFFSET, "lam_lo": -1.0, "lam_hi": 1.0}
    stats, grad = one(plan, [LOG2, LOG2], token_weight=[2.0, 0.01])
    assert stats["log_ratio"] == close(2 * LOG2 - 1)
    assert stats["surrogate"] == close(-8 / math.e)  # c_t = 1
    assert grad == close([-4 / math.e, -4 / math.e])


def test_log_offset_may_push_lam_out_of_its_clamp():
    plan = NO_CLIP | {"level": SEQUENCE, "weight_use": c.USE_LOG_OFFSET, "lam_lo": -1.0, "lam_hi": 1.0}
    stats, grad = one(plan, [0.5, 0.5], completion_weight=[2.0])
    assert (stats["log_ratio"], grad) == (1.0, [0.0, 0.0])


def test_a_weight_of_zero_is_a_log_offset_at_the_lower_clamp():
    plan = NO_CLIP | {"level": SEQUENCE_TOKEN, "weight_use": c.USE_LOG_OFFSET, "lam_lo": -1.0, "lam_hi": 1.0}
    assert one(plan, [0.0], token_weight=[0.0])[0]["log_ratio"] == -1.0


def test_geometric_mean():
    plan = NO_CLIP | {"level": SEQUENCE, "weight_use": c.USE_GEOMETRIC_MEAN, "reduce": c.REDUCE_SUM}
    stats, grad = one(plan, [0.0, 9.0, 0.0], token_weight=[2.0, NAN, 8.0], mask=[1, 0, 1])
    weight = math.sqrt((2 + 1e-10) * (8 + 1e-10))  # over the number of tokens, whatever reduces lam
    assert stats["surrogate"] == close(-2 * weight)
    assert grad == close([-2 * weight, 0.0, -2 * weight])


@pytest.mark.parametrize("use", [c.USE_MULTIPLY, c.USE_LOG_OFFSET, c.USE_GEOMETRIC_MEAN])
def test_no_weights_weigh_nothing(use):
    plan = NO_CLIP | {"level": SEQUENCE}
    assert one(plan | {"weight_use": use}, [0.1, 0.2]) == one(plan, [0.1, 0.2])


# ---- KL and rho, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "d", "value", "slope"),
    [
        (K1, 0.5, -0.5, 1.0),
        (K1, -0.5, 0.5, 1.0),
        (K2, 0.5, 0.125, -0.5),
        (K3, LOG2, 1 - LOG2, -1.0),
        (K3, -LOG2, LOG2 - 0.5, 0.5),
        (KABS, 0.5, 0.5, -1.0),
        (KABS, -0.5, 0.5, 1.0),
        (KABS, 0.0, 0.0, 0.0),
    ],
)
def test_kl(kl, d, value, slope):
    plan = {"surrogate": GPG, "kl": kl, "beta": 0.1}
    stats, grad = one(plan, [0.3], ref_logp=[-1.0 + d], advantages=[0.0], weights=[2.0])
    assert stats["kl"] == close(value)  # before beta and w_i
    assert grad == close([0.2 * slope])
    stats, grad = one(plan | {"kl_straight_through": 1}, [0.3], ref_logp=[-1.0 + d], advantages=[0.0])
    assert (stats["kl"], grad) == (close(value), close([-0.1 * d]))


def kl_of(plan: dict[str, Any], d: float, **given: Any) -> tuple[float, float]:
    plan = {"surrogate": GPG, "beta": 1.0} | plan
    stats, grad = run(c.Plan(**plan), batch_of([0.0], old_logp=[0.0], ref_logp=[d], advantages=[0.0], **given))
    return stats[0, c.STATS.index("kl")], grad[0]


def test_kl_clamps():
    inner = {"kl": K2, "kl_clamp_in": 2.0}
    assert kl_of(inner, 3.0) == (2.0, 0.0)
    assert kl_of(inner, 2.0) == (2.0, -2.0)  # ends inside
    assert kl_of(inner, -2.0) == (2.0, 2.0)
    outer = {"kl": K1, "kl_clamp_out": 2.0}
    assert kl_of(outer, 3.0) == (-2.0, 0.0)  # k1 may be negative
    assert kl_of(outer, -3.0) == (2.0, 0.0)
    assert kl_of(outer, 2.0) == (-2.0, 1.0)
    both = {"kl": K2, "kl_clamp_in": 2.0, "kl_clamp_out": 1.0, "kl_straight_through": 1}
    assert kl_of(both, 3.0) == (1.0, -3.0)  # the straight-through slope knows no clamp


@pytest.mark.parametrize(
    ("rho", "rho_level", "rhos", "grad"),
    # x = log 2, log 8: rho 2, 8 or their geometric mean 4; k2 with d = 1, 2: k = 1/2, 2, slopes -1, -2
    [
        (c.RHO_NONE, TOKEN, [1, 1], [-1, -2]),
        (c.RHO_RATIO, TOKEN, [2, 8], [-2 + 1, -16 + 16]),
        (c.RHO_RATIO_DETACHED, TOKEN, [2, 8], [-2, -16]),
        (c.RHO_RATIO, SEQUENCE, [4, 4], [-4 + 5, -8 + 5]),  # (4 1/2 + 4 2) / 2 through the mean
        (c.RHO_RATIO_DETACHED, SEQUENCE, [4, 4], [-4, -8]),
        (c.RHO_RATIO, SEQUENCE_TOKEN, [4, 4], [-4 + 2, -8 + 8]),
        (c.RHO_RATIO_DETACHED, SEQUENCE_TOKEN, [4, 4], [-4, -8]),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_rho(rho, rho_level, rhos, grad, level):
    """Also whatever level, reduction, pre and clamp the surrogate uses: rho is the plain ratio."""
    plan = {"surrogate": GPG, "kl": K2, "beta": 0.1, "rho": rho, "rho_level": rho_level, "level": level}
    plan |= {"reduce": c.REDUCE_SUM, "pre": c.PRE_CLAMP, "pre_lo": -0.1, "pre_hi": 0.1, "lam_hi": 0.05}
    stats, got = one(plan, [LOG2, NAN, 3 * LOG2], ref_logp=[0.0, 5.0, 1.0], mask=[1, 0, 1], advantages=[0.0])
    assert stats["kl"] == close(rhos[0] * 0.5 + rhos[1] * 2)
    assert got == close([0.1 * grad[0], 0.0, 0.1 * grad[1]])


def test_exp_of_d_minus_1_minus_d_is_accurate_everywhere():
    getcontext().prec = 60
    for magnitude in np.concatenate([10.0 ** np.arange(-150, 2.4, 0.37), np.linspace(0.01, 3, 100)]):
        for d in (magnitude, -magnitude, np.nextafter(1.0, 0.0), 1.0, -1.0):
            exact = Decimal(float(d)).exp() - 1 - Decimal(float(d))
            if abs(d) < 1e-15:
                exact = Decimal(float(d)) ** 2 / 2 * (1 + Decimal(float(d)) / 3)
            got = _numpy._exp_minus_1_minus(np.array([d]), 300.0)[0]
            assert abs(Decimal(float(got)) - exact) <= Decimal("1e-14") * exact, d


def test_k3_slope_is_accurate_for_tiny_d():
    assert kl_of({"kl": K3}, 1e-12)[1] == pytest.approx(-(1e-12 + 0.5e-24), rel=1e-15)


# ---- saturation, extremes, narrowing -----------------------------------------------------------------


@pytest.mark.parametrize("bound", c.EXP_BOUND.values())
def test_exp_saturates_and_keeps_its_slope(bound):
    """The saturated slope is not 0: exp stays exp(bound) in the gradient, too."""
    plan = NO_CLIP | {"exp_bound": bound, "kl": K3, "beta": 1.0}
    stats, grad = one(plan, [bound + 50.0, 0.0], logp=[0.0, 0.0], ref_logp=[bound + 9.0, -bound - 9.0])
    top = math.exp(bound)
    assert stats["surrogate"] == close(-top - 1)
    assert stats["approx_kl"] == close(top - 1 - (bound + 50.0))  # the linear term unsaturated
    assert stats["ratio_sq"] == close(top * top + 1)
    assert stats["kl"] == close(top - 1 - (bound + 9.0) + (bound + 8.0))
    assert grad == close([-top + 1 - top, -1 + 1 - math.exp(-bound)])


def test_the_linear_term_of_exp_minus_1_minus_does_not_saturate():
    plan = {"surrogate": GPG, "kl": K3, "beta": 1.0, "exp_bound": 87.0}
    stats, grad = one(plan, [-400.0], logp=[0.0], ref_logp=[-500.0], advantages=[0.0])
    assert (stats["approx_kl"], stats["kl"], grad) == (399.0, 499.0, [1.0])


def test_exp_of_rho_saturates():
    plan = {"surrogate": GPG, "kl": K1, "beta": 1.0, "rho": c.RHO_RATIO, "exp_bound": 87.0}
    stats, grad = one(plan, [1000.0], logp=[0.0], ref_logp=[-2.0], advantages=[0.0])
    assert (stats["kl"], grad) == (close(2 * math.exp(87)), close([3 * math.exp(87)]))


EXTREMES = [0.0, -0.0, 5e-324, -1e-300, -87.0, -3.4e38, 3.4e38, -1.7e308, 1.7e308]


@pytest.mark.parametrize("surrogate", tables.SURROGATES.values(), ids=list(tables.SURROGATES))
@pytest.mark.parametrize("level", LEVELS)
def test_finite_input_raises_no_warning(surrogate, level):
    """The suite turns warnings into errors; here whatever warns, raises."""
    values = f64(list(itertools.product(EXTREMES, repeat=3)))
    given = {"old_logp": values[:, 1], "ref_logp": values[:, 2], "token_advantages": values[::-1, 0]}
    columns = {k: np.ascontiguousarray(v) for k, v in given.items()}
    bounds = surrogate.bounds(**({"dro_beta": 0.5} if "dro_beta" in surrogate.options else {}))
    params = dict(zip(("p0", "p1", "p2", "p3"), bounds.params, strict=False))
    for kl, rho, use in itertools.product([K1, K2, K3, KABS], [0, 1, 2], [0, 1, 2] if level else [0]):
        plan = c.Plan(surrogate.id, **params, level=level, kl=kl, beta=0.1, rho=rho, rho_level=level, weight_use=use)
        batch = batch_of(values[:, 0].copy(), token_weight=np.abs(values[:, 2]), **columns)
        stats, grad = run(plan, batch, np.float32)
        beyond = np.abs(np.c_[values, values[::-1, :1]]) > 1e50
        assert stats[0, -1] == beyond.any(axis=1).sum()
        assert not np.isinf(grad).any()


def test_the_gradient_saturates_at_the_largest_float32():
    stats, grad = run(c.Plan(GPG), batch_of([-1.0, -1.0, -1.0], token_advantages=[1e200, -1e39, 0.1]), np.float32)
    largest = np.finfo(np.float32).max
    assert grad.tolist() == [-largest, largest, -np.float32(0.1)]
    assert stats[0, 0] == 1e200


def test_float32_arrays_are_widened_before_any_arithmetic():
    logp, old = np.array([-0.1, -30.0], np.float32), np.array([-0.3, -30.0001], np.float32)
    batch = batch_of(logp, old_logp=old, advantages=[1.0])
    wide = batch._replace(logp=logp.astype(np.float64), old_logp=old.astype(np.float64))
    for a, b in zip(run(c.Plan(**NO_CLIP), batch), run(c.Plan(**NO_CLIP), wide), strict=True):
        assert np.array_equal(a, b)


# ---- mask, ranges, statistics ------------------------------------------------------------------------


def test_ranges_in_any_order_with_gaps_holes_and_empties():
    """Slots 5..6, none, 0..2, all-masked 8..9; 3, 4, 7 belong to nobody."""
    x = f64([LOG2, NAN, LOG3, INF, NAN, 0.0, LOG2, -INF, NAN, INF])
    logp = np.where(np.isfinite(x), -1.0, NAN)
    batch = batch_of(
        logp,
        old_logp=np.where(np.isfinite(x), -1.0 - np.where(np.isfinite(x), x, 0), x),
        start=[5, 4, 0, 8],
        stop=[7, 4, 3, 10],
        mask=[1, 0, 7, 1, 1, 1, 255, 1, 0, 0],
        advantages=[1.0, NAN, 2.0, INF],
        weights=[1.0, 5.0, 10.0, 5.0],
    )
    stats, grad = run(c.Plan(**NO_CLIP), batch)
    assert grad == close([-40.0, 0.0, -60.0, -7, -7, -1.0, -2.0, -7, 0.0, 0.0])
    assert stats[0] == close([-3, 0, LOG2, 1 + 0 - LOG2, 3, 5, 0, 0, 0, LOG2, 0])
    assert stats[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, INF, -INF, 0]
    assert stats[2] == close([-10, 0, LOG2 + LOG3, 3 - LOG2 - LOG3, 5, 13, 0, 0, LOG2, LOG3, 0])
    assert stats[3].tolist() == stats[1].tolist()


def test_without_a_gradient_the_statistics_are_the_same():
    batch = batch_of([-1.0, -2.0], old_logp=[-1.1, -1.7], advantages=[1.0])
    stats = np.empty((1, len(c.STATS)))
    _numpy.policy_loss(c.Plan(**CLIP_02), batch, None, stats, 1)
    assert np.array_equal(stats, run(c.Plan(**CLIP_02), batch)[0])


def test_clip_columns_count_tokens_at_the_token_level():
    x = np.log([0.5, 0.5, 2.0, 2.0, 1.0, 2.0])
    stats, _ = one(CLIP_02, x, token_advantages=[1, -1, 1, -1, 1, 0])
    assert (stats["clip_low"], stats["clip_high"]) == (1.0, 1.0)


@pytest.mark.parametrize("level", [SEQUENCE, SEQUENCE_TOKEN])
def test_ratio_columns_are_one_number_at_the_sequence_levels(level):
    stats, _ = one(
        CLIP_02 | {"level": level}, [0.0, NAN, 2 * LOG2, LOG2], token_advantages=[1, 1, -1, 0.5], mask=[1, 0, 1, 1]
    )
    assert stats["log_ratio"] == stats["log_ratio_min"] == stats["log_ratio_max"] == close(LOG2)
    assert stats["approx_kl"] == close(1 - LOG2)
    assert stats["ratio_sq"] == close(4.0)
    assert (stats["clip_low"], stats["clip_high"]) == (0.0, close(2 / 3))
    stats, _ = one(CLIP_02 | {"level": level}, [-LOG2] * 4, token_advantages=[1, -1, -1, -0.5])
    assert (stats["clip_low"], stats["clip_high"]) == (0.75, 0.0)


def test_a_ratio_at_its_bound_is_not_clipped():
    plan = {**CLIP_02, "clip_lo": 1.0, "clip_hi": 1.0}
    stats, _ = one(plan, [0.0, 0.0], token_advantages=[1, -1])
    assert (stats["clip_low"], stats["clip_high"]) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_counts_tokens_not_values(bad):
    arrays = {name: np.full(6, -1.0) for name in ("logp", "old_logp", "ref_logp", "token_advantages", "token_weight")}
    for t, name in enumerate(arrays):
        arrays[name][t] = bad
        arrays[name][0] = bad  # all of them at once: one token
        arrays[name][5] = bad  # masked
    logp = arrays.pop("logp")
    for level in LEVELS:
        plan = c.Plan(**CLIP_02, kl=K3, beta=0.1, level=level, rho=c.RHO_RATIO, rho_level=level)
        stats, grad = run(plan, batch_of(logp.copy(), mask=[1, 1, 1, 1, 1, 0], **arrays), np.float32)
        assert stats[0, c.STATS.index("non_finite")] == 5
        assert grad[5] == 0


def test_the_advantage_of_a_token_is_the_sum_of_what_is_given():
    batch = batch_of(
        np.full(9, -1.0),
        start=[4, 0, 9],
        stop=[9, 3, 9],
        advantages=[10.0, 20.0, 30.0],
        step_advantages=[1.0, 2.0, 3.0],
        step_offsets=[0, 2, 3, 3],
        step_ends=[1, 3, 0],
        token_advantages=f64(range(9)) / 10,
    )
    _, grad = run(c.Plan(GPG), batch)
    assert -grad == close([23.0, 20.1, 20.2, 7, 11.4, 11.5, 12.6, 12.7, 10.8])


def test_no_advantages_are_zero():
    assert run(c.Plan(**NO_CLIP), batch_of([-1.0]))[1].tolist() == [0.0]


# ---- gradients ---------------------------------------------------------------------------------------


def zclip(z: complex, lo: float, hi: float) -> complex:
    """clip that a complex step sees through: decided by the real part, z itself inside."""
    return lo if z.real < lo else hi if z.real > hi else z


def zmin(a: complex, b: complex) -> complex:
    return a if complex(a).real <= complex(b).real else b


def zmax(a: complex, b: complex) -> complex:
    return a if complex(a).real >= complex(b).real else b


def restated_surrogate(
    plan: c.Plan, lam: complex, frozen_lam: float, logp: complex, frozen: float, old: float, A: float
) -> complex:
    r = cmath.exp(lam)
    if plan.surrogate == CLIP:  # -min(r A, clip(r) A), and for A < 0 no more than -cap A
        if A > 0:
            return -zmin(r * A, zclip(r, 0.0, plan.p1) * A)
        return zmin(-zmin(r * A, zmax(r, plan.p0) * A), -plan.p2 * A)
    if plan.surrogate == CISPO:  # the weight is detached
        return -zclip(math.exp(frozen_lam), plan.p0, plan.p1) * A * logp
    if plan.surrogate == SAPO:
        tau = plan.p0 if A > 0 else plan.p1
        return -A * 4 / tau / (1 + cmath.exp(-tau * (r - 1)))
    if plan.surrogate == RATIO:
        return -A * r + plan.p0 * (lam if complex(lam).real > 0 else -lam)
    if plan.surrogate == VESPO:  # the weight is detached
        k, rate = (plan.p0, plan.p1) if A >= 0 else (plan.p2, plan.p3)
        return -math.exp(rate + k * frozen_lam - rate * math.exp(frozen_lam)) * A * logp
    if plan.surrogate in (DPPO_TV, DPPO_KL):  # the weight and the verdict are detached
        p, q = min(math.exp(frozen), 1.0), min(math.exp(old), 1.0)
        if plan.surrogate == DPPO_TV:
            through = p - q <= plan.p1 if A > 0 else q - p <= plan.p0
        else:
            kl = q * (old - frozen) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            through = kl <= plan.p1 or p <= q if A > 0 else kl <= plan.p0 or p >= q
        return -min(math.exp(frozen_lam), plan.p2) * through * A * logp
    if plan.surrogate == DRO:
        return plan.p0 * lam * lam / 2 - A * logp
    assert plan.surrogate == GPG
    return -A * logp


def restated_kl(plan: c.Plan, d: complex, frozen_d: float) -> complex:
    def value(d: complex) -> complex:
        d = zclip(d, -plan.kl_clamp_in, plan.kl_clamp_in)
        k = {
            K1: lambda: -d,
            K2: lambda: d * d / 2,
            K3: lambda: cmath.exp(d) - d - 1,
            KABS: lambda: d if complex(d).real > 0 else -d,
        }[plan.kl]()
        return zclip(k, -plan.kl_clamp_out, plan.kl_clamp_out)

    if plan.kl_straight_through:  # value of k, slope of k2: k2 - stop_gradient(k2) + stop_gradient(k)
        return d * d / 2 - frozen_d**2 / 2 + value(frozen_d)
    return value(d)


def restated_completion(
    plan: c.Plan, logp: list[complex], frozen: list[float], tokens: list[dict[str, float]], kl_share: float = 1.0
) -> complex:
    """One completion of the contract's L, of its counted tokens. Detached is what is made of ``frozen``:

    the weight of cispo; at sequence_token the reduction with pre in it, lam_t = stop_gradient(lam_i) + x_t -
    stop_gradient(x_t), and rho likewise; RHO_RATIO_DETACHED; the value of a straight-through KL.
    """
    n = len(tokens)
    weights = [t["weight"] for t in tokens]

    def ratios(logp: list[Any]) -> list[complex]:
        return [a - t["old"] for a, t in zip(logp, tokens, strict=True)]

    def pre(x: complex, A: float) -> complex:
        if plan.pre == c.PRE_CLAMP:
            return zclip(x, plan.pre_lo, plan.pre_hi)
        if plan.pre == c.PRE_SIGN_CLIP:
            clipped = zclip(x, plan.pre_lo, plan.pre_hi)
            return zmin(x, clipped) if A > 0 else zmax(x, clipped)
        return x

    def pres(logp: list[Any]) -> list[complex]:
        return [pre(x, t["A"]) for x, t in zip(ratios(logp), tokens, strict=True)]

    def lams(logp: list[Any]) -> list[complex]:
        y = pres(logp)
        if plan.level != TOKEN:
            reduced_over = y if plan.level == SEQUENCE else pres(frozen)
            lam = sum(reduced_over) / (n if plan.reduce == c.REDUCE_MEAN else 1)
            if plan.weight_use == c.USE_LOG_OFFSET:
                lam += sum(min(max(math.log(w), plan.lam_lo), plan.lam_hi) for w in weights)
            own = ratios(frozen) if plan.level == SEQUENCE else ratios(logp)
            y = [lam + a - b for a, b in zip(own, ratios(frozen), strict=True)]
        return [zclip(complex(v), plan.lam_lo, plan.lam_hi) for v in y]

    def rhos(logp: list[Any]) -> list[complex]:
        x = ratios(logp)
        if plan.rho == c.RHO_NONE:
            return [1.0] * n
        if plan.rho == c.RHO_RATIO_DETACHED:
            x = ratios(frozen)
        if plan.rho_level == TOKEN:
            return [cmath.exp(a) for a in x]
        if plan.rho_level == SEQUENCE:
            return [cmath.exp(sum(x) / n)] * n
        fixed = ratios(frozen)
        return [cmath.exp(sum(fixed) / n + a - b) for a, b in zip(x, fixed, strict=True)]

    cs = {
        c.USE_MULTIPLY: weights,
        c.USE_LOG_OFFSET: [1.0] * n,
        c.USE_GEOMETRIC_MEAN: [math.prod(w + 1e-10 for w in weights) ** (1 / n)] * n,
    }[plan.weight_use]
    loss = 0j
    for t, ct, lam, flam, a, fa, rho in zip(
        tokens, cs, lams(logp), lams(frozen), logp, frozen, rhos(logp), strict=True
    ):
        loss += ct * restated_surrogate(plan, lam, complex(flam).real, a, fa, t["old"], t["A"])
        if plan.kl != c.KL_NONE:
            loss += kl_share * plan.beta * rho * restated_kl(plan, t["ref"] - a, t["ref"] - fa)
    return loss


def restated(plan: c.Plan, batch: c.Batch) -> tuple[float, np.ndarray]:
    """The loss, and its gradient by complex steps; slots of nobody -7."""
    loss, grad = 0.0, np.full(len(batch.logp), -7.0)
    for i in range(len(batch.start)):
        start, stop = int(batch.start[i]), int(batch.stop[i])
        grad[start:stop] = 0.0
        counted = [t for t in range(start, stop) if batch.mask[t]]
        ends = list(range(batch.step_offsets[i], batch.step_offsets[i + 1]))
        tokens = [
            {
                "old": float(batch.old_logp[t]),
                "ref": float(batch.ref_logp[t]) if batch.ref_logp is not None else 0.0,
                "weight": float(batch.token_weight[t] * batch.completion_weight[i]),
                "A": float(batch.advantages[i] + batch.token_advantages[t])
                + next((float(batch.step_advantages[j]) for j in ends if batch.step_ends[j] >= t - start), 0.0),
            }
            for t in counted
        ]
        if not counted:
            continue
        frozen = [float(batch.logp[t]) for t in counted]
        w = float(batch.weights[i])
        share = 1.0 if batch.kl_weights is None else float(batch.kl_weights[i]) / w
        loss += w * restated_completion(plan, frozen, frozen, tokens, share).real
        for k, t in enumerate(counted):
            stepped = [complex(v, 1e-40 if j == k else 0.0) for j, v in enumerate(frozen)]
            grad[t] = w * restated_completion(plan, stepped, frozen, tokens, share).imag / 1e-40
    return loss, grad


def ragged_batch(seed: int, with_kl: bool = True) -> c.Batch:
    """Ranges out of order with gaps, an empty one, an all-masked one, one of one token; NaN where nobody looks."""
    rng = np.random.default_rng(seed)
    start, stop = [20, 9, 9, 0, 17, 14], [31, 14, 9, 8, 18, 16]
    n = 33
    mask = (rng.random(n) < 0.7).astype(np.uint8)
    mask[14:16], mask[17], mask[[0, 10, 25]] = 0, 1, 1
    unread = (mask == 0) | np.isin(np.arange(n), [8, 16, 18, 19, 31, 32])

    def column(values: np.ndarray) -> np.ndarray:
        return np.where(unread, rng.choice([NAN, INF, -INF], n), values)

    logp = rng.normal(-1.5, 0.8, n)
    return batch_of(
        column(logp),
        start=start,
        stop=stop,
        old_logp=column(logp - rng.normal(0, 0.35, n)),
        ref_logp=column(logp + rng.normal(0, 0.8, n)) if with_kl else None,
        mask=mask,
        token_weight=column(rng.uniform(0.3, 1.8, n)),
        completion_weight=rng.uniform(0.5, 1.5, 6),
        advantages=rng.normal(0, 1, 6),
        step_advantages=rng.normal(0, 0.7, 5),
        step_offsets=[0, 2, 3, 3, 5, 5, 5],
        step_ends=[3, 7, 2, 0, 5],
        token_advantages=column(rng.normal(0, 0.8, n)),
        weights=rng.uniform(0.5, 2, 6),
        kl_weights=rng.uniform(0.5, 2, 6) if with_kl and seed % 2 else None,
    )


PARAMS: dict[int, dict[str, float]] = {
    CLIP: {"p0": 0.8, "p1": 1.15, "p2": 1.4, "clip_lo": 0.8, "clip_hi": 1.15},
    CISPO: {"p0": 0.85, "p1": 1.2},
    SAPO: {"p0": 1.0, "p1": 1.3},
    GPG: {},
}
MORE: dict[int, dict[str, float]] = {
    RATIO: {"p0": 0.4},
    VESPO: {"p0": 1.5, "p1": 1.2, "p2": 0.7, "p3": 2.0},
    DPPO_TV: {"p0": 0.05, "p1": 0.03, "p2": 1.15},
    DPPO_KL: {"p0": 0.02, "p1": 0.01, "p2": 1.15},
    DRO: {"p0": 0.7},
}
KLS: list[dict[str, Any]] = [
    {},
    {"kl": K3},
    {"kl": K3, "rho": c.RHO_RATIO, "rho_level": TOKEN},
    {"kl": K2, "rho": c.RHO_RATIO, "rho_level": SEQUENCE, "kl_clamp_in": 0.7},
    {"kl": KABS, "rho": c.RHO_RATIO, "rho_level": SEQUENCE_TOKEN, "kl_clamp_out": 0.6},
    {"kl": K1, "rho": c.RHO_RATIO, "rho_level": SEQUENCE, "kl_clamp_out": 0.5},
    {"kl": K3, "rho": c.RHO_RATIO_DETACHED, "rho_level": SEQUENCE, "kl_clamp_in": 0.8, "kl_clamp_out": 0.2},
    {"kl": K1, "kl_straight_through": 1, "rho": c.RHO_RATIO, "rho_level": TOKEN},
    {"kl": K3, "kl_straight_through": 1, "kl_clamp_in": 0.5, "rho": c.RHO_RATIO, "rho_level": SEQUENCE},
    {"kl": KABS, "rho": c.RHO_RATIO_DETACHED, "rho_level": TOKEN},
]
SHAPES: list[dict[str, Any]] = [
    {"level": level, "reduce": reduce, "weight_use": use, **pre, **clamp}
    for level, reduce, use in [
        (TOKEN, c.REDUCE_MEAN, c.USE_MULTIPLY),
        *itertools.product([SEQUENCE, SEQUENCE_TOKEN], [c.REDUCE_MEAN, c.REDUCE_SUM], [0, 1, 2]),
    ]
    for pre in ({"pre": p, "pre_lo": -0.2, "pre_hi": 0.3} for p in _numpy.PRE)
    for clamp in ({}, {"lam_lo": -0.25, "lam_hi": 0.15})
]
GRID = [
    c.Plan(**{"surrogate": s, "beta": 0.3, **PARAMS[s], **shape, **KLS[(k + j) % len(KLS)]})
    for (k, shape), s in itertools.product(enumerate(SHAPES), PARAMS)
    for j in (0, 3, 7)
] + [
    c.Plan(**{"surrogate": s, "beta": 0.3, **MORE[s], **shape, **KLS[(k + s) % len(KLS)]})
    for (k, shape), s in itertools.product(enumerate(SHAPES), MORE)
    if (k + s) % 2 == 0
]


def name(plan: c.Plan) -> str:
    return ",".join(f"{k}={v}" for k, v in plan._asdict().items() if v != c.Plan._field_defaults.get(k))


def loss_of(plan: c.Plan, batch: c.Batch) -> float:
    stats = np.empty((len(batch.start), len(c.STATS)))
    _numpy.policy_loss(plan, batch, None, stats, 1)
    kl_weights = batch.weights if batch.kl_weights is None else batch.kl_weights
    surrogate, kl = (stats[:, c.STATS.index(column)] for column in ("surrogate", "kl"))
    return float(batch.weights @ surrogate + plan.beta * (kl_weights @ kl))


@pytest.mark.parametrize("plan", GRID, ids=name)
def test_loss_and_gradient_are_the_restated_contract(plan):
    batch = ragged_batch(seed=GRID.index(plan), with_kl=plan.kl != c.KL_NONE)
    loss, expected = restated(plan, batch)
    stats, grad = run(plan, batch)
    assert loss_of(plan, batch) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(grad, expected, rtol=1e-11, atol=1e-12)
    assert not stats[:, c.STATS.index("non_finite")].any()


def test_the_grid_reaches_every_branch():
    """The data clips, clamps and lets through; else the test above would prove little."""
    plans = [p for p in GRID if p.surrogate == CLIP and p.level == TOKEN]
    low, high = c.STATS.index("clip_low"), c.STATS.index("clip_high")
    totals = sum(run(p, ragged_batch(k, p.kl != c.KL_NONE))[0].sum(axis=0) for k, p in enumerate(plans))
    assert totals[low] > 5
    assert totals[high] > 5
    for field in ("pre", "reduce", "level", "weight_use", "kl", "rho", "rho_level", "kl_straight_through"):
        values = {getattr(p, field) for p in GRID}
        assert values == set(range(max(values) + 1)), field
    assert any(p.rho and p.rho_level != p.level for p in GRID)


def detaches_nothing(plan: c.Plan) -> bool:
    rho = plan.rho == c.RHO_NONE or (plan.rho == c.RHO_RATIO and plan.rho_level != SEQUENCE_TOKEN)
    return (
        plan.surrogate not in (CISPO, VESPO, DPPO_TV, DPPO_KL)
        and plan.level != SEQUENCE_TOKEN
        and rho
        and not plan.kl_straight_through
    )


@pytest.mark.parametrize("plan", [p for p in GRID if detaches_nothing(p)][::2], ids=name)
def test_gradient_is_the_central_difference_of_the_oracles_own_loss(plan):
    """Nothing detached: L itself is differentiated. A difference that straddles a kink says nothing and
    is told by its two one-sided halves; few may be."""
    batch = ragged_batch(seed=1000 + GRID.index(plan), with_kl=plan.kl != c.KL_NONE)
    _, grad = run(plan, batch)
    h, straddles, checked = 2e-4, 0, 0

    def at(t: int, step: float) -> float:
        logp = batch.logp.copy()
        logp[t] += step
        return loss_of(plan, batch._replace(logp=logp))

    owned = [t for a, b in zip(batch.start, batch.stop, strict=True) for t in range(a, b) if batch.mask[t]]
    for t in owned:
        a, b, z, d, e = at(t, -2 * h), at(t, -h), at(t, 0), at(t, h), at(t, 2 * h)
        left, right = (3 * z - 4 * b + a) / (2 * h), (4 * d - 3 * z - e) / (2 * h)
        if abs(left - right) > 1e-5 * (1 + abs(grad[t])):
            straddles += 1
            continue
        checked += 1
        assert (a - 8 * b + 8 * d - e) / (12 * h) == pytest.approx(grad[t], rel=1e-8, abs=1e-9), t
    assert checked >= 9
    assert straddles <= 2


@pytest.mark.parametrize("plan", GRID[::7], ids=name)
def test_a_completion_knows_nothing_of_its_neighbours(plan):
    batch = ragged_batch(seed=3, with_kl=plan.kl != c.KL_NONE)
    stats, grad = run(plan, batch)
    for i in range(len(batch.start)):
        a, b = batch.start[i], batch.stop[i]
        steps = slice(batch.step_offsets[i], batch.step_offsets[i + 1])
        alone = batch._replace(
            start=f64([0]).astype(np.int64),
            stop=np.array([b - a]),
            step_offsets=np.array([0, steps.stop - steps.start]),
            step_ends=batch.step_ends[steps],
            step_advantages=batch.step_advantages[steps],
            kl_weights=None if batch.kl_weights is None else batch.kl_weights[i : i + 1],
            **{k: getattr(batch, k)[i : i + 1] for k in ("advantages", "completion_weight", "weights")},
            **{
                k: None if getattr(batch, k) is None else getattr(batch, k)[a:b]
                for k in ("logp", "old_logp", "ref_logp", "mask", "token_weight", "token_advantages")
            },
        )
        one_stats, one_grad = run(plan, alone)
        assert np.array_equal(one_stats[0], stats[i])
        assert np.array_equal(one_grad, grad[a:b])


# ---- counting and summing ----------------------------------------------------------------------------


def test_count_tokens():
    start, stop = np.array([3, 0, 2]), np.array([6, 2, 2])
    counts = _numpy.count_tokens(np.array([1, 0, 1, 255, 0, 2], np.uint8), start, stop)
    assert counts.tolist() == [2, 1, 0]
    assert counts.dtype == np.int64
    assert _numpy.count_tokens(None, start, stop).tolist() == [3, 2, 0]
    assert _numpy.count_tokens(None, start[:0], stop[:0]).shape == (0,)


def test_sum_columns_is_exact_in_any_order():
    table = np.array([[1e16, 1.0], [1.0, INF], [-1e16, 1.0], [1e-3, 2.0]])
    for order in itertools.permutations(range(4)):
        assert _numpy.sum_columns(table[list(order)]).tolist() == [1.001, INF]
    assert _numpy.sum_columns(np.empty((0, 3))).tolist() == [0, 0, 0]


def test_sum_columns_raises_nothing():
    big = 1.7e308
    table = np.array([[INF, NAN, big, big], [-INF, 1.0, big, big], [0.0, 1.0, -big, 0.0]])
    total = _numpy.sum_columns(table).tolist()
    assert math.isnan(total[0])
    assert math.isnan(total[1])
    assert total[2:] == [big, INF]


# ---- pools -------------------------------------------------------------------------------------------


def standardized(values: Any, **plan: Any) -> list[float]:
    out = np.full(len(values), -7.0)
    _numpy.standardize(f64(values), np.arange(len(values)), np.array([0, len(values)]), c.PoolPlan(**plan), out)
    return out.tolist()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [  # 0, 1, 5: mean 2, squares 4 + 1 + 9 = 14
        ({"scale": c.SCALE_NONE}, [-2, -1, 3]),
        ({"scale": c.SCALE_NONE, "baseline": c.BASELINE_NONE}, [0, 1, 5]),
        ({"scale": c.SCALE_NONE, "baseline": c.BASELINE_LEAVE_ONE_OUT}, [-3, -1.5, 4.5]),
        ({"eps": 0.5}, [v / (math.sqrt(14 / 3) + 0.5) for v in (-2, -1, 3)]),
        ({"eps": 0.5, "ddof": 1}, [v / (math.sqrt(7) + 0.5) for v in (-2, -1, 3)]),
        ({"eps": 0.5, "ddof": 3}, [-2, -1, 3]),
        ({"eps": 0.5, "scale": c.SCALE_BATCH, "batch_std": 1.5}, [-1, -0.5, 1.5]),
        ({"eps": 0.5, "scale": c.SCALE_BATCH, "batch_std": 0.0}, [-2, -1, 3]),
        ({"eps": 0.5, "baseline": c.BASELINE_NONE}, [v / (math.sqrt(14 / 3) + 0.5) for v in (0, 1, 5)]),
    ],
)
def test_standardize(plan, expected):
    assert standardized([0.0, 1.0, 5.0], **plan) == close(expected)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, 0.0),
        ({"singleton": c.SINGLETON_RAW}, 2.0),
        ({"singleton": c.SINGLETON_RAW, "scale": c.SCALE_BATCH, "batch_std": 9.0}, 2.0),
        ({"singleton": c.SINGLETON_RAW, "scale": c.SCALE_NONE}, 3.0),
    ],
)
def test_singletons(plan, expected):
    assert standardized([3.0], eps=0.5, **plan) == [expected]


@pytest.mark.parametrize("ulp", [2.0**-52, 2.0**-23, 2.0**-10])
@pytest.mark.parametrize("largest", [1.0, 7.99, 8.0, 1e-3, -0.3])
@pytest.mark.parametrize("baseline", [c.BASELINE_MEAN, c.BASELINE_LEAVE_ONE_OUT])
def test_values_within_4_ulp_are_equal(ulp, largest, baseline):
    step = ulp * 2.0 ** math.floor(math.log2(abs(largest)))
    away = -math.copysign(step, largest)  # towards 0, so that the largest magnitude stays
    assert standardized([largest, largest + 4 * away], ulp=ulp, baseline=baseline) == [0.0, 0.0]
    assert 0.0 not in standardized([largest, largest + 5 * away], ulp=ulp, baseline=baseline)


def test_the_ulp_just_below_a_power_of_two_is_the_smaller_one():
    """math.log2 rounds up here: floor(log2) by it doubles the ULP."""
    largest = np.nextafter(8.0, 0.0)
    assert 0.0 not in standardized([largest, largest - 5 * 2.0**-50])
    assert standardized([largest, largest - 4 * 2.0**-50]) == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.0, 0.1, -1e300, 5e-324])
def test_equal_values(value):
    assert standardized([value] * 3) == [0.0] * 3
    # without a baseline the std is 0 and does not divide; 0.1 + 0.1 + 0.1 must not make it 1e-17
    assert standardized([value] * 3, baseline=c.BASELINE_NONE, eps=0.0) == [value] * 3
    assert _numpy.pool_std(f64([value] * 3), 0, 2.0**-52) == 0.0


def test_pools_touch_their_own_places_only_and_order_cannot_change_a_bit():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 12) * 10.0 ** rng.integers(-3, 4, 12)
    order = np.array([3, 7, 1, 9, 11, 0, 5, 2])
    out = np.full(12, -7.0)
    _numpy.standardize(values, order, np.array([0, 4, 4, 5, 8]), c.PoolPlan(), out)
    assert out[[4, 6, 8, 10]].tolist() == [-7.0] * 4
    assert out[11] == 0.0
    for first in itertools.permutations([3, 7, 1, 9]):
        again = np.full(12, -7.0)
        _numpy.standardize(values, np.array([*first, 11, 2, 0, 5]), np.array([0, 4, 4, 5, 8]), c.PoolPlan(), again)
        assert np.array_equal(again, out)
    group = values[[3, 7, 1, 9]]
    assert out[[3, 7, 1, 9]] == pytest.approx((group - group.mean()) / (group.std() + 1e-8), rel=1e-12)


def test_large_offsets_do_not_cancel():
    """Two passes, never E[x^2] - E[x]^2."""
    assert standardized([1e9 + 1, 1e9 - 1], eps=0.0) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("values", "ddof", "expected"),
    [([0, 1, 5], 0, math.sqrt(14 / 3)), ([5, 0, 1], 1, math.sqrt(7)), ([5], 1, 0.0), ([5, 1], 3, 0.0), ([], 0, 0.0)],
)
def test_pool_std(values, ddof, expected):
    got = _numpy.pool_std(f64(values), ddof, 2.0**-52)
    assert got == close(expected)
    assert type(got) is float


# ---- steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (None, [3, 0, 0, 9, 1, 1, 2, 2, 0, 0]),
        ([10, 20, 30, 40], [23, 20, 20, 9, 11, 11, 12, 12, 10, 40]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_expand_steps(base, expected, dtype):
    out = np.full(10, 9, dtype)  # slot 3 belongs to nobody; the third completion is empty, the last has no step
    offsets, ends = np.array([0, 2, 3, 3, 3]), np.array([1, 3, 0])
    start, stop = np.array([4, 0, 2, 9]), np.array([9, 3, 2, 10])
    _numpy.expand_steps(f64([1, 2, 3]), offsets, ends, start, stop, f64(base), out)
    assert out.tolist() == expected


def test_expand_steps_saturates():
    out = np.zeros(2, np.float32)
    args = np.array([0, 1]), np.array([0]), np.array([0]), np.array([2])
    _numpy.expand_steps(f64([1e300]), *args, f64([-1e100]), out)
    assert out.tolist() == [np.finfo(np.float32).max, -np.finfo(np.float32).max]
