"""What frameworks compute, written down a second time: facts by hand from their sources, formulas in plain NumPy.

Nothing here is taken from ``convention_rows``: a number that is wrong there, in a row that was only read as in one that
was executed, is a number that disagrees here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import grpo_fast as gf
from grpo_fast import tables
from grpo_fast.conventions import CONVENTIONS

Array = npt.NDArray[np.float64]
INF = float("inf")

# --- advantages ---------------------------------------------------------------------------------------

#: Per framework: the winners of [1, 0, 0, 0] and of a millionth of [3, 1, 0, 0], a group of one reward of 2 (None: refused), what a
#: reward that is NaN does.
ADVANTAGES: dict[str, tuple[float, float, float | None, str]] = {
    "paper": (1.732050768, 1.61976781, 0.0, "refused"),  # ddof 0, eps 1e-8
    "trl": (1.499700060, 0.0197211015, 0.0, "left out"),  # ddof 1, eps 1e-4
    "verl": (1.499997000, 0.828427125, 1.999998000, "refused"),  # ddof 1, eps 1e-6, (r - 0) / (1 + eps)
    "openrlhf": (1.499999997, 1.41321427, None, "refused"),  # ddof 1, eps 1e-9
    "nemo-rl": (1.000000000, 1.69059892, 0.0, "refused"),  # of the others: ddof 1, eps 1e-6, undivided where std is 0
    "slime": (1.499997000, 0.828427125, 0.0, "refused"),
    "skyrl": (1.499997000, 0.828427125, 1.999998000, "refused"),
    "areal": (1.499970001, 0.175220131, 0.0, "refused"),  # ddof 1, eps 1e-5
    "prime-rl": (0.75, 2e-6, 0.0, "refused"),  # r - mean
    "open-instruct": (0.75, 2e-6, 0.0, "refused"),
    "tinker": (0.75, 2e-6, 0.0, "refused"),
    "liger": (1.499700060, 0.0197211015, 0.0, "left out"),
    "torchtune": (1.499700060, 0.0197211015, None, "refused"),
    "tunix": (1.499997000, 0.828427125, None, "refused"),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_advantages(name: str) -> None:
    winner, ahead, alone, nan = ADVANTAGES[name]
    got = gf.group_advantages([1.0, 0.0, 0.0, 0.0, 3e-6, 1e-6, 0.0, 0.0], group_ids=[0] * 4 + [1] * 4, convention=name)
    assert abs(got[0] - winner) < 6e-10
    assert abs(got[4] / ahead - 1) < 6e-9  # where eps is as large as the deviation, or larger
    if alone is None:
        with pytest.raises(ValueError, match=r"^singleton: "):
            gf.group_advantages([2.0, 1.0, 0.0], group_ids=[0, 1, 1], convention=name)
    else:
        assert abs(gf.group_advantages([2.0, 1.0, 0.0], group_ids=[0, 1, 1], convention=name)[0] - alone) < 6e-10
    if nan == "left out":
        assert gf.group_advantages([np.nan, 2.0, 1.0, 0.0], group_ids=[0] * 4, convention=name)[0] == 0.0
    else:
        with pytest.raises(ValueError, match=r"^rewards: "):
            gf.group_advantages([np.nan, 2.0, 1.0, 0.0], group_ids=[0] * 4, convention=name)


def test_the_deviation_that_open_instruct_has_in_its_other_mode() -> None:
    got = gf.group_advantages([1.0, 0.0, 0.0, 0.0], group_ids=[0] * 4, convention="open-instruct", scale="group")
    assert abs(got[0] - 1.732050768) < 6e-10  # "standard": ddof 0, eps 1e-8


@pytest.mark.parametrize("name", ["trl", "liger"])
def test_several_rewards_are_summed_first(name: str) -> None:
    rewards = [[4.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    got = gf.group_advantages(rewards, group_ids=[0] * 4, convention=name)
    assert abs(got[0] - 2.75 / (np.sqrt(10.75 / 3) + 1e-4)) < 1e-12


# --- losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A completion: advantage, log r, old log-probs, reference - logp, counted tokens."""

    advantage: float
    lam: list[float]
    old: list[float]
    d: list[float]
    counts: list[bool]


def _row(advantage: float, *tokens: tuple[float, float, float], counts: list[bool] | None = None) -> Row:
    lam, old, d = (list(column) for column in zip(*tokens, strict=True))
    return Row(advantage, lam, old, d, counts or [True] * len(tokens))


BATCH = [
    _row(1.0, (0.15, -1.0, 0.3), (0.4, -0.7, -0.2), (-0.5, -1.2, 0.1)),  # beyond the clip range from above
    _row(-0.8, (0.1, -0.9, -0.4), (-0.4, -0.5, 0.2), (1.5, -3.0, 0.7), (0.25, -1.5, -0.1)),  # and below; 4.5 > 3
    _row(0.5, (0.3, -1.0, 0.2), (0.1, -2.0, 0.1), counts=[False, False]),  # empty
    _row(0.7, (-25.0, -1.0, -10.5)),  # beyond +-20; k1 and k3 near 10
    _row(-0.6, (0.22, -1.0, -0.4), (0.3, -1.1, 0.9), counts=[True, False]),
    _row(0.7, (0.24, -1.0, 14.0), (0.26, -1.3, 0.6), (0.275, -1.3, -0.6)),  # between clip ranges of frameworks
    _row(-0.9, (12.0, -13.0, 45.0)),  # beyond a cap of 10; beyond clamps of 20 and 40
    _row(-0.4, (25.0, -26.0, -45.0)),
    _row(0.3, (3e-4, -1.0, 0.0), (4e-4, -1.0, 0.0), (5.3e-4, -1.0, 0.0)),  # GSPO's range
    _row(-0.3, (-2.5e-4, -1.0, 0.0), (-4e-4, -1.0, 0.0)),
    _row(0.45, (0.107, -1.0, 0.0), (0.092, -1.0, 0.0)),  # around an epsilon of 0.1
    _row(-0.45, (-0.12, -1.0, 0.0), (-0.3, -1.0, 0.0)),
    _row(-0.35, (-0.7, -0.2, 0.0), (0.1, -0.2, 0.0)),  # p falls by 0.4
    _row(0.65, (1.5, -3.0, 0.0)),  # a ratio of 4.5, p rises by 0.17
    _row(0.55, (0.36, -0.7, 0.0), (0.31, -0.7, 0.0)),  # by 0.215 and 0.18
    _row(-0.55, (-0.57, -0.7, 0.0), (-0.45, -0.7, 0.0)),  # falls by the same
]


@dataclass(frozen=True)
class Fact:
    """One loss of one framework."""

    kind: str = "ppo"
    low: float = 0.8
    high: float = 1.2
    dual: float = INF  # bound on the ratio where A < 0
    clamp: float = INF  # of token log-ratios, before anything else
    cap: float = INF  # of the log-ratio of a sequence
    level: str = "token"  # "mean": the ratio of a sequence, "sum": of the sum
    agg: str = "token-mean"
    empty: str = "count"
    params: tuple[float, ...] = ()


def surrogate(fact: Fact, row: Row) -> Array:
    counts = np.array(row.counts)
    lam, old, a = np.array(row.lam)[counts], np.array(row.old)[counts], row.advantage
    logp = old + lam
    if not len(lam):
        return lam
    lam = np.clip(lam, -fact.clamp, fact.clamp)
    if fact.kind == "gmpo":
        lam = np.minimum(lam, fact.high) if a > 0 else np.maximum(lam, -fact.low)
    if fact.level != "token":
        total = lam.sum()
        lam = np.full_like(lam, min(total / len(lam) if fact.level == "mean" else total, fact.cap))
    r = np.exp(lam)
    if fact.kind == "ppo":
        worse = np.maximum(-r * a, -np.clip(r, fact.low, fact.high) * a)
        return np.minimum(worse, -fact.dual * a) if a < 0 else worse
    if fact.kind in ("ratio", "gmpo"):
        return -r * a
    if fact.kind == "cispo":
        return -np.minimum(np.maximum(r, fact.low), fact.high) * a * logp
    if fact.kind == "gpg":
        return -a * logp
    if fact.kind == "sapo":
        tau = fact.params[0] if a > 0 else fact.params[1]
        return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))
    if fact.kind == "dppo":  # low, high: how far probabilities may move
        moved = np.exp(logp) - np.exp(old)
        kept = moved <= fact.high if a > 0 else moved >= -fact.low
        return -a * np.minimum(r, fact.dual) * kept * logp
    if fact.kind == "dppo_kl":
        p, q = np.exp(logp), np.exp(old)
        divergence = q * (old - logp) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        kept = (divergence <= fact.high) | (p <= q) if a > 0 else (divergence <= fact.low) | (p >= q)
        return -a * np.minimum(r, fact.dual) * kept * logp
    if fact.kind == "dro":
        return -a * logp + fact.params[0] / 2 * lam**2
    assert fact.kind == "vespo"
    k, rate = fact.params[:2] if a >= 0 else fact.params[2:]
    w = np.clip(lam, np.log(1e-8), 20.0)
    return -np.exp(rate + k * w - rate * np.exp(w)) * a * logp


def per_completion(agg: str, empty: str, terms: list[Array], length: float = 10.0) -> Array:
    tokens = sum(len(t) for t in terms)
    sequences = len(terms) if empty == "count" else sum(len(t) > 0 for t in terms)
    sums = np.array([t.sum() for t in terms])
    sizes = np.array([max(len(t), 1) for t in terms])
    return {
        "token-mean": sums / tokens,
        "token-sum": sums,
        "seq-mean-token-mean": sums / sizes / sequences,
        "seq-mean-token-sum": sums / sequences,
        "seq-mean-token-sum-norm": sums / length / sequences,
    }[agg]


@dataclass(frozen=True)
class KL:
    estimator: str
    beta: float
    factor: bool = False  # times the ratio
    clamp_in: float = INF
    clamp_out: float = INF
    own: tuple[str, str] | None = None  # aggregated in its own way


def kl_terms(kl: KL, fact: Fact, row: Row, estimator: str | None = None) -> Array:
    counts = np.array(row.counts)
    d = np.clip(np.array(row.d)[counts], -kl.clamp_in, kl.clamp_in)
    value = {"k1": -d, "k2": d * d / 2, "k3": np.expm1(d) - d}[estimator or kl.estimator]
    value = np.clip(value, -kl.clamp_out, kl.clamp_out)
    if not kl.factor or not len(value):
        return value
    lam = np.array(row.lam)[counts]
    return value * np.exp(lam.mean() if fact.level == "mean" else lam)


def arrays() -> dict[str, Any]:
    join = {name: np.concatenate([getattr(row, name) for row in BATCH]) for name in ("lam", "old", "d", "counts")}
    logp = join["old"] + join["lam"]
    counts = join["counts"].astype(bool)
    columns = {"logp": logp, "old_logp": join["old"], "ref_logp": logp + join["d"]}
    return {
        **{name: np.where(counts, column, np.nan) for name, column in columns.items()},
        "advantages": np.array([row.advantage for row in BATCH]),
        "token_offsets": np.cumsum([0, *(len(row.lam) for row in BATCH)]),
        "mask": counts,
    }


def ours(name: str, *, reference: bool = False, **options: Any) -> Array:
    given = arrays()
    if not reference:
        given["ref_logp"] = None
    return gf.grpo_loss(**given, convention=name, backend="numpy", **options).per_completion


#: What its users get without naming one, under our names.
LOSS_TYPES = {
    "paper": "grpo", "trl": "dapo", "verl": "grpo", "openrlhf": "grpo", "nemo-rl": "grpo", "slime": "grpo",
    "skyrl": "grpo", "areal": "grpo", "prime-rl": "dppo_tv", "open-instruct": "dapo", "tinker": "importance_sampling",
    "liger": "dapo", "torchtune": "grpo", "tunix": "grpo",
}  # fmt: skip
#: Whose loss is which, where its users name none; and the KL term it has or, where beta is 0, would have.
DEFAULTS: dict[str, tuple[Fact, KL]] = {
    "paper": (Fact(agg="seq-mean-token-mean"), KL("k3", 0.04)),
    "trl": (Fact(), KL("k3", 0.0, factor=True)),
    "verl": (Fact(dual=3.0, clamp=20.0, empty="exclude"), KL("k3", 0.0, clamp_in=20.0, clamp_out=10.0)),
    "openrlhf": (Fact(clamp=20.0, empty="exclude"), KL("k1", 0.0, clamp_out=10.0)),
    "nemo-rl": (Fact(), KL("k3", 0.01, clamp_in=20.0, clamp_out=10.0)),
    "slime": (Fact(agg="seq-mean-token-mean"), KL("k1", 0.0)),
    "skyrl": (
        Fact(clamp=20.0),
        KL("k3", 0.001, clamp_in=20.0, clamp_out=10.0, own=("seq-mean-token-mean", "count")),
    ),
    "areal": (Fact(), KL("k1", 0.0, clamp_out=10.0)),
    "prime-rl": (Fact("dppo", low=0.2, high=0.2), KL("k2", 2e-3)),
    "open-instruct": (Fact(high=1.272), KL("k3", 0.05, clamp_in=40.0)),
    "tinker": (Fact("ratio", agg="token-sum"), KL("k1", 0.0)),
    "liger": (Fact(), KL("k3", 0.04)),
    "torchtune": (Fact(low=0.9, high=1.1), KL("k3", 0.1)),
    "tunix": (Fact(agg="seq-mean-token-mean", clamp=20.0, empty="exclude"), KL("k1", 0.04)),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_loss_that_is_not_named(name: str) -> None:
    fact, _ = DEFAULTS[name]
    assert CONVENTIONS[name].loss_type == LOSS_TYPES[name]
    expected = per_completion(fact.agg, fact.empty, [surrogate(fact, row) for row in BATCH])
    np.testing.assert_allclose(ours(name), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_its_kl_term(name: str) -> None:
    fact, kl = DEFAULTS[name]
    surrogates = per_completion(fact.agg, fact.empty, [surrogate(fact, row) for row in BATCH])

    def expected(kl: KL) -> Array:
        terms = [kl_terms(kl, fact, row) for row in BATCH]
        return surrogates + kl.beta * per_completion(*(kl.own or (fact.agg, fact.empty)), terms)

    np.testing.assert_allclose(ours(name, reference=True), expected(kl), rtol=1e-12, atol=0)
    some = replace(kl, beta=0.7)
    np.testing.assert_allclose(ours(name, reference=True, beta=0.7), expected(some), rtol=1e-12, atol=0)
    got = ours(name, reference=True, beta=0.7, kl_clamp_out=1e30)  # an outer clamp would hide the inner one
    np.testing.assert_allclose(got, expected(replace(some, clamp_out=1e30)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_slope_of_its_kl_term(name: str) -> None:
    """TRL's ratio is differentiated too: (r k3)' = r k3 + r k3'."""
    _, kl = DEFAULTS[name]
    lam, d = 0.1, 0.3
    slope = {"k1": 1.0, "k2": -d, "k3": -np.expm1(d)}[kl.estimator]
    if kl.factor:
        slope = np.exp(lam) * (np.expm1(d) - d + slope)
    got = gf.grpo_loss(
        [-1.0 + lam], [-1.0], [-1.0 + lam + d], [0.0], [0, 1], convention=name, beta=0.7, backend="numpy"
    )
    assert got.grad is not None
    np.testing.assert_allclose(got.grad, [0.7 * slope], rtol=1e-12)


#: Clamps that hold for some estimators only: (framework, estimator, inner, outer).
OTHER_KL = [
    ("verl", "k1", INF, INF), ("verl", "k2", INF, INF), ("skyrl", "k1", INF, INF), ("skyrl", "k2", INF, INF),
    ("slime", "k3", INF, 10.0), ("slime", "k2", INF, INF), ("areal", "k3", INF, 10.0), ("areal", "k2", INF, 10.0),
    ("openrlhf", "k2", INF, 10.0), ("nemo-rl", "k1", 20.0, 10.0), ("nemo-rl", "k2", 20.0, 10.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "estimator", "inner", "outer"), OTHER_KL)
def test_the_clamps_of_its_other_estimators(name: str, estimator: str, inner: float, outer: float) -> None:
    fact, kl = DEFAULTS[name]
    kl = replace(kl, clamp_in=inner, clamp_out=outer)
    terms = [kl_terms(kl, fact, row, estimator) for row in BATCH]
    expected = 0.7 * per_completion(*(kl.own or (fact.agg, fact.empty)), terms)
    expected += per_completion(fact.agg, fact.empty, [surrogate(fact, row) for row in BATCH])
    got = ours(name, reference=True, beta=0.7, kl_estimator=estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=0)


# --- losses by name -----------------------------------------------------------------------------------

_MEANS = {
    **dict.fromkeys(("grpo", "gspo", "gspo_token", "sapo", "rloo", "gmpo"), "seq-mean-token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "importance_sampling": "token-sum",
}  # the others are token means
_PPO, _MEAN = Fact(), Fact(level="mean")
_CISPO = Fact("cispo")
_GPG = Fact("gpg")
_SAPO = Fact("sapo", params=(1.0, 1.05))
_VESPO = Fact("vespo", level="sum", params=(2.0, 3.0, 3.0, 2.0))
_DRO = Fact("dro", params=(0.3,))
_CAPPED = Fact("cispo", low=0.0, high=0.2)
_CLAMPED = Fact(clamp=20.0)
_VERL = Fact(dual=3.0, clamp=20.0)
_DPPO = {"low": 0.2, "high": 0.2}
METHODS: dict[str, dict[str, Fact]] = {
    "paper": {
        "grpo": _PPO, "dapo": Fact(high=1.28), "dr_grpo": _PPO, "gspo": Fact(level="mean", low=0.9997, high=1.0004),
        "gspo_token": Fact(level="mean", low=0.9997, high=1.0004), "cispo": _CISPO, "sapo": _SAPO, "gpg": _GPG,
        "luspo": _MEAN, "gmpo": Fact("gmpo", low=0.4, high=0.4, level="mean"), "vespo": _VESPO,
        "dppo_tv": Fact("dppo", **_DPPO), "dppo_kl": Fact("dppo_kl", **_DPPO), "dro": _DRO,
    },
    "trl": {
        "grpo": _PPO, "bnpo": _PPO, "dapo": _PPO, "dr_grpo": _PPO, "luspo": _PPO, "gspo": _MEAN, "cispo": _CAPPED,
        "sapo": _SAPO, "vespo": _VESPO, "gmpo": Fact("gmpo", low=0.4, high=0.4, level="mean"),
        "rloo": Fact(level="sum"),
    },
    "verl": {
        "grpo": _VERL, "dapo": _VERL, "dr_grpo": _VERL, "gspo_token": Fact(level="mean", cap=10.0),
        "cispo": replace(_CISPO, clamp=20.0), "sapo": replace(_SAPO, clamp=20.0), "gpg": _GPG,
        "gmpo": Fact("gmpo", low=0.2, high=0.2, level="mean"), "dppo_tv": Fact("dppo", **_DPPO, dual=3.0, clamp=20.0),
        "dppo_kl": Fact("dppo_kl", **_DPPO, dual=3.0, clamp=20.0), "dro": _DRO,
    },
    "openrlhf": {"grpo": _CLAMPED, "dapo": _CLAMPED, "gspo": _MEAN},
    "nemo-rl": {"grpo": _PPO, "dapo": _PPO, "gspo": _MEAN, "cispo": _CISPO, "gpg": _GPG},
    "slime": {"grpo": _PPO, "dapo": _PPO, "gspo": _MEAN, "cispo": _CISPO, "gpg": _GPG},
    "skyrl": {
        "grpo": _CLAMPED, "dapo": _CLAMPED, "dr_grpo": _CLAMPED, "gspo_token": Fact(level="mean", cap=10.0),
        "cispo": Fact("cispo", low=1.0, high=6.0, clamp=20.0), "sapo": replace(_SAPO, clamp=20.0), "gpg": _GPG,
        "dppo_tv": Fact("dppo", **_DPPO, clamp=20.0), "dppo_kl": Fact("dppo_kl", **_DPPO, clamp=20.0),
    },
    "areal": {"grpo": _PPO, "dapo": _PPO, "gspo": _MEAN, "sapo": _SAPO},
    "prime-rl": {"dppo_tv": Fact("dppo", **_DPPO)},
    "open-instruct": {
        "dapo": Fact(high=1.272), "grpo": Fact(high=1.272), "cispo": Fact("cispo", low=0.0, high=1.272),
    },
    "tinker": {
        "importance_sampling": Fact("ratio"), "grpo": _PPO, "cispo": Fact("cispo", low=0.0, high=4.0), "dro": _DRO,
    },
    "liger": {
        "grpo": _PPO, "bnpo": _PPO, "dapo": _PPO, "dr_grpo": _PPO, "luspo": _PPO, "gspo": _MEAN, "cispo": _CAPPED,
        "sapo": _SAPO, "vespo": replace(_VESPO, clamp=20.0),
    },
    "torchtune": {"grpo": Fact(low=0.9, high=1.1), "dapo": Fact(low=0.9, high=1.1)},
    "tunix": {
        "grpo": _CLAMPED, "dapo": Fact(high=1.28, clamp=20.0), "dr_grpo": _CLAMPED,
        "gspo_token": Fact(level="mean", clamp=20.0, cap=10.0),
    },
}  # fmt: skip
#: What the KL term of a method has of its own.
KL_BY_NAME: dict[tuple[str, str], dict[str, Any]] = {
    **{("paper", method): {"beta": 0.0} for method in METHODS["paper"] if method != "grpo"},
    ("trl", "gmpo"): {"factor": False},
    ("trl", "rloo"): {"factor": False},
    ("verl", "sapo"): {"own": ("token-mean", "exclude")},
    ("verl", "gmpo"): {"own": ("token-mean", "exclude")},
    ("openrlhf", "grpo"): {"own": ("token-mean", "exclude")},
    ("openrlhf", "gspo"): {"own": ("token-mean", "exclude")},
    ("tunix", "dapo"): {"beta": 0.0},
}
#: Those that choose tokens: their numbers are of a whole batch, and are named here.
SELECTIONS: dict[tuple[str, str], dict[str, float]] = {
    ("paper", "clip_cov"): {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "epsilon": 0.2},
    ("paper", "kl_cov"): {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0},
    ("verl", "clip_cov"): {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "epsilon": 0.2},
    ("verl", "kl_cov"): {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.1},
    ("skyrl", "clip_cov"): {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "epsilon": 0.2},
    ("skyrl", "kl_cov"): {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
}
NAMED = [(name, method) for name, row in METHODS.items() for method in row]
#: Frameworks whose sequence means leave empty rows out, and verl's gmpo, whose do not.
EXCLUDE = ("verl", "openrlhf", "tunix")


@pytest.mark.parametrize(("name", "method"), NAMED, ids=["-".join(pair) for pair in NAMED])
def test_a_loss_by_name(name: str, method: str) -> None:
    fact = METHODS[name][method]
    empty = "exclude" if name in EXCLUDE and (name, method) != ("verl", "gmpo") else "count"
    if fact.level == "token" or fact.kind == "vespo":  # also where only the KL's ratio could tell
        assert CONVENTIONS[name].loss_options(method).get("importance_sampling_level", "token") == "token"
    options: dict[str, float] = {"dro_beta": 0.3} if method == "dro" else {}
    if method == "dr_grpo":
        options["max_completion_length"] = 10.0
    agg = _MEANS.get(method, "token-mean")
    surrogates = per_completion(agg, empty, [surrogate(fact, row) for row in BATCH])
    np.testing.assert_allclose(ours(name, loss_type=method, **options), surrogates, rtol=1e-11, atol=0)

    kl = replace(DEFAULTS[name][1], **KL_BY_NAME.get((name, method), {}))
    for beta, given in ((kl.beta, options), (0.7, {**options, "beta": 0.7})):
        expected = surrogates
        if beta:
            terms = per_completion(*(kl.own or (agg, empty)), [kl_terms(kl, fact, row) for row in BATCH])
            expected = surrogates + beta * terms
        got = ours(name, reference=True, loss_type=method, **given)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize(("name", "method"), SELECTIONS, ids=["-".join(pair) for pair in SELECTIONS])
def test_a_loss_that_selects(name: str, method: str) -> None:
    whose = {key: value for key, value in CONVENTIONS[name].loss_options(method).items() if key in _SELECTING}
    assert whose == {**SELECTIONS[name, method], **({} if name == "paper" else {"importance_sampling_level": "token"})}


def test_verl_leaves_empty_rows_out_of_the_kl_of_gmpo_only() -> None:
    fact, kl = METHODS["verl"]["gmpo"], replace(DEFAULTS["verl"][1], beta=0.7)
    expected = per_completion("seq-mean-token-mean", "count", [surrogate(fact, row) for row in BATCH])
    terms = [kl_terms(kl, fact, row) for row in BATCH]
    expected += 0.7 * per_completion("seq-mean-token-mean", "exclude", terms)
    got = ours("verl", reference=True, loss_type="gmpo", beta=0.7, kl_agg_mode="seq-mean-token-mean")
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["paper", "verl", "tinker"])
def test_dro_has_no_default(name: str) -> None:
    with pytest.raises(ValueError, match=r"^dro_beta: "):
        ours(name, loss_type="dro")


@pytest.mark.parametrize(("name", "clamp"), [("verl", 20.0), ("skyrl", 20.0), ("nemo-rl", INF), ("slime", INF)])
def test_the_clamp_that_the_bounds_of_cispo_hide(name: str, clamp: float) -> None:
    fact = Fact("cispo", low=0.0, high=1e20, clamp=clamp)
    expected = per_completion("token-mean", "count", [surrogate(fact, row) for row in BATCH])
    got = ours(name, loss_type="cispo", epsilon=1.0, epsilon_high=1e20)
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=0)


_SELECTING = {key for row in SELECTIONS.values() for key in row} | {
    "epsilon_high", "delta", "dual_clip", "log_ratio_clamp", "importance_sampling_level",
}  # fmt: skip


def test_every_loss_of_every_framework_is_here() -> None:
    assert set(ADVANTAGES) == set(DEFAULTS) == set(METHODS) == set(CONVENTIONS)
    for name, row in CONVENTIONS.items():
        here = set(METHODS[name]) | {method for framework, method in SELECTIONS if framework == name}
        assert here == set(row.methods), name


# --- rows say everything ------------------------------------------------------------------------------

EVERY_LOSS = ("loss_type", "loss_agg_mode", "beta", "kl_estimator", "kl_ratio_factor", "empty_rows")
WITHOUT_DEVIATION = ("prime-rl", "tinker")  # in any of their modes


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_row_states_every_free_choice(name: str) -> None:
    """None is a statement: the framework has none of it."""
    row = CONVENTIONS[name]
    assert set(EVERY_LOSS) <= set(row.loss)
    for method in row.methods:
        own = tables.METHODS[method]
        kind = tables.SURROGATES[own.surrogate]
        options = {**row.loss, **row.levels.get(row.methods[method].get("importance_sampling_level", ""), {})}
        stated = {*options, *row.methods[method]}
        wanted = {*kind.options, *(tables.SELECTIONS[own.selection].options if own.selection else ())}
        if kind.ratio and not kind.own_clamp:
            wanted.add("log_ratio_clamp")
        assert wanted - {"seed", "selected"} <= stated, method
    wanted = {"baseline", "scale", "singleton", "nan_policy"}
    if name not in WITHOUT_DEVIATION:
        wanted |= {"ddof", "eps"}
    assert wanted <= set(row.advantages)
    assert None not in row.advantages.values()
