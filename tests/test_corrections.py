"""Corrections between sampler and trainer, against a padded restatement, hand numbers and torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

import grpo_fast as gf
from grpo_fast import _backends, _contract, _numpy_mismatch, correction_tables, padded
from grpo_fast.correction_options import resolve
from grpo_fast.corrections import importance_weights
from grpo_fast.diagnostics import POSITION_METRICS, off_policy_metrics
from grpo_fast.off_policy import off_policy_weights, top_entropy_weights

NAN, INF = math.nan, math.inf


class Ragged(NamedTuple):
    old: Any
    sampling: Any
    offsets: Any
    mask: Any

    def padded(self, values: Any, fill: Any, left: bool = False) -> Any:
        lengths = np.diff(self.offsets)
        out = np.full((len(lengths), max(lengths.max(), 1)), fill, np.asarray(values).dtype)
        for i, n in enumerate(lengths):
            row = values[self.offsets[i] : self.offsets[i + 1]]
            if left:
                out[i, out.shape[1] - n :] = row
            else:
                out[i, :n] = row
        return out

    def rows(self) -> list[tuple[Any, Any]]:
        """For every completion its slots that count, and its x on them; NaN is not scored."""
        result = []
        for i in range(len(self.offsets) - 1):
            slots = np.arange(self.offsets[i], self.offsets[i + 1])
            slots = slots[self.mask[slots]]
            x = self.old[slots].astype(np.float64) - self.sampling[slots].astype(np.float64)
            result.append((slots, np.where(np.isnan(x), 0.0, x)))
        return result


def ragged(
    seed: int, scale: float = 0.5, dtype: Any = np.float64, unscored: bool = True, outliers: bool = True
) -> Ragged:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 2, 7, 30, 300], 9)
    lengths[3] = 30
    offsets = np.concatenate([[4], 4 + np.cumsum(lengths)])
    n = offsets[-1] + 3  # slots of no completion before and after
    old = -rng.exponential(1.0, n)
    sampling = old + scale * rng.standard_normal(n)
    if outliers:
        sampling[rng.random(n) < 0.03] -= 40.0
    if unscored:
        sampling[rng.random(n) < 0.05] = NAN
    mask = rng.random(n) < 0.8
    mask[offsets[3]] = True
    mask[offsets[4] : offsets[5]] = False  # nothing counts in one of them
    old[~mask], sampling[~mask] = NAN, INF
    return Ragged(old.astype(dtype), sampling.astype(dtype), offsets, mask)


def held(x: Any, clamp: float) -> Any:
    return np.clip(x, -min(clamp, 300.0), min(clamp, 300.0))


def expected_weights(b: Ragged, mode: str, low: float, high: float, kind: str, clamp: float, normalize: bool) -> Any:
    """One weight per token, by hand."""
    out = np.zeros(len(b.old))
    per_row = []
    for slots, x in b.rows():
        R = math.exp(held(x.sum() if kind == "product" else x.sum() / max(len(x), 1), clamp))
        r = np.exp(held(x, clamp))
        if mode == "token_truncate":
            w = np.minimum(np.maximum(r, low), high)
        elif mode == "token_mask":
            w = np.where((r < low) | (r > high), 0.0, r)
        elif mode == "sequence_truncate":
            w = np.full(len(x), min(max(R, low), high))
        elif mode == "sequence_mask":
            w = np.full(len(x), R if low <= R <= high else 0.0)
        else:
            w = r if low <= R <= high else 0 * r
        out[slots] = w
        if len(x):
            per_row.append((w.mean(), len(x), w))
    if normalize:
        tokens = np.concatenate([w for *_, w in per_row])
        mean = np.mean([m for m, *_ in per_row]) if mode in ("sequence_truncate", "sequence_mask") else tokens.mean()
        out = out / (mean if mean > 1e-8 else 1.0)
    return out


def spread(weight: Any, b: Ragged) -> Any:
    """One per completion on all its counted tokens."""
    if len(weight) == len(b.old):
        return weight
    out = np.zeros(len(b.old))
    for i, (slots, _) in enumerate(b.rows()):
        out[slots] = weight[i]
    return out


@pytest.mark.parametrize("mode", correction_tables.CORRECTIONS)
@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, 5.0), (0.9, INF), (0.25, None)])
@pytest.mark.parametrize("clamp", [None, 20.0, 0.4])
@pytest.mark.parametrize("normalize", [None, "mean"])
def test_weights_against_the_padded_restatement(
    mode: str, bounds: tuple[float | None, float | None], clamp: float | None, normalize: str | None, backend: str
) -> None:
    own = correction_tables.CORRECTIONS[mode].sequence_ratio
    for seed, kind in enumerate(["product", "geometric"] if own else [None]):
        b = ragged(seed, 0.05 if own and kind == "product" else 0.5, outliers=clamp is not None)
        weight, mask, metrics = importance_weights(
            b.old, b.sampling, b.offsets, mode=mode, clip_min=bounds[0], clip_max=bounds[1], sequence_ratio=kind,
            log_ratio_clamp=clamp, batch_normalize=normalize, mask=b.mask, backend=backend,
        )  # fmt: skip
        low, high = bounds[0] or 0.0, INF if bounds[1] is None else bounds[1]
        want = expected_weights(b, mode, low, high, kind or "product", clamp or INF, normalize == "mean")
        per_completion = mode in ("sequence_truncate", "sequence_mask")
        assert weight is not None and weight.shape == ((len(b.offsets) - 1,) if per_completion else b.old.shape)
        np.testing.assert_allclose(spread(weight, b), want, rtol=1e-12, atol=1e-300)
        inside = np.zeros(len(b.old), bool)
        for slots, _ in b.rows():
            inside[slots] = True
        np.testing.assert_array_equal(mask, inside)
        assert mask.dtype == np.bool_
        assert set(metrics) <= set(correction_tables.WEIGHT_METRICS)
        tokens = np.concatenate([want[slots] for slots, _ in b.rows()])
        tokens = tokens * metrics.get("rollout_is_batch_norm_factor", 1.0)
        assert metrics["tokens"] == inside.sum()
        assert metrics["unscored"] == np.isnan(b.sampling[inside]).sum()
        assert metrics["rollout_is_mean"] == pytest.approx(tokens.mean(), rel=1e-10)
        if np.abs(tokens).max() < 1e6:
            assert metrics["rollout_is_std"] == pytest.approx(tokens.std(), rel=1e-6, abs=1e-9)
            ess = 0.0 if not tokens.any() else tokens.mean() ** 2 / (tokens**2).mean()
            assert metrics["rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-8)


STATISTICS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: np.expm1(x) - x}


def expected_keep(b: Ragged, name: str, low: float, high: float, clamp: float) -> Any:
    keep = np.zeros(len(b.old), bool)
    prefix, _, k = name.rpartition("_")
    for slots, x in b.rows():
        value = STATISTICS[k](held(x, clamp))
        if prefix == "token":
            stat = value
        elif len(x) == 0:
            continue
        else:
            stat = {"seq_sum": value.sum(), "seq_mean": value.mean(), "seq_max": value.max()}[prefix]
        keep[slots] = (low <= stat) & (stat <= high)
    return keep


@pytest.mark.parametrize("name", correction_tables.REJECTIONS)
@pytest.mark.parametrize("clamp", [None, 20.0, 0.3])
def test_rejections_against_the_padded_restatement(name: str, clamp: float | None, backend: str) -> None:
    kept = 0
    for seed, scale in enumerate((0.02, 0.3, 1.0)):
        b = ragged(seed, scale)
        for threshold in (1.3, 0.05) if not name.endswith("k1") else (1.3, (0.8, 3.0)):
            low, high = -INF, threshold
            if name.endswith("k1"):
                pair = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
                low, high = math.log(pair[0]), math.log(pair[1])
            _, mask, metrics = importance_weights(
                b.old, b.sampling, b.offsets, reject=[name], reject_threshold=[threshold],
                log_ratio_clamp=clamp, mask=b.mask, backend=backend,
            )  # fmt: skip
            want = expected_keep(b, name, low, high, clamp or INF)
            np.testing.assert_array_equal(mask, want)
            counted = sum(len(slots) for slots, _ in b.rows())
            assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - want.sum() / counted)
            assert metrics[f"rollout_rs_{name}_masked_fraction"] == metrics["rollout_rs_masked_fraction"]
            rows = [(len(slots), want[slots].sum()) for slots, _ in b.rows() if len(slots)]
            assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean([n != k for n, k in rows]))
            assert {key.replace(name, "<reject>") for key in metrics} <= set(correction_tables.WEIGHT_METRICS)
            kept += want.sum()
    assert kept > 0  # the thresholds decide something


def test_several_rejections_are_anded_and_share_a_threshold(backend: str) -> None:
    b = ragged(5, 0.3)
    names = ["token_k3", "seq_mean_k2"]

    def masks(**kw: Any) -> Any:
        return importance_weights(b.old, b.sampling, b.offsets, mask=b.mask, backend=backend, **kw)[1]

    each = [masks(reject=n, reject_threshold=t) for n, t in zip(names, (0.1, 2.0), strict=True)]
    np.testing.assert_array_equal(masks(reject=names, reject_threshold=[0.1, 2.0]), each[0] & each[1])
    np.testing.assert_array_equal(masks(reject="token_k3, seq_mean_k2", reject_threshold="0.1,2.0"), each[0] & each[1])
    shared = masks(reject=names, reject_threshold=0.1)
    np.testing.assert_array_equal(shared, each[0] & masks(reject=names[1], reject_threshold=0.1))
    pair = masks(reject="token_k1", reject_threshold="0.7_1.2")
    np.testing.assert_array_equal(pair, masks(reject=["token_k1"], reject_threshold=[[0.7, 1.2]]))
    assert (pair != masks(reject=["token_k1"], reject_threshold=[[1 / 1.2, 1.2]])).any()
    for threshold in ((0.7, 1.2), [0.7, 1.2], np.array([0.7, 1.2])):  # beside one name the numbers are a pair
        np.testing.assert_array_equal(pair, masks(reject="token_k1", reject_threshold=threshold))


@pytest.mark.parametrize("threshold", [[(0.5, 2), 0.1], ((0.5, 2), 0.1), [[0.5, 2.0], [0.1]], "0.5_2,0.1"])
@pytest.mark.parametrize("names", [["seq_mean_k1", "token_k3"], "seq_mean_k1, token_k3"])
def test_a_pair_and_a_bound_may_stand_in_one_list(names: Any, threshold: Any, backend: str) -> None:
    b = ragged(11, 0.6)

    def mask(reject: Any, reject_threshold: Any) -> Any:
        return importance_weights(
            b.old, b.sampling, b.offsets, reject=reject, reject_threshold=reject_threshold, mask=b.mask, backend=backend
        )[1]

    each = mask("seq_mean_k1", [(0.5, 2.0)]) & mask("token_k3", 0.1)
    assert 0 < each.sum() < b.mask.sum()
    np.testing.assert_array_equal(mask(names, threshold), each)


def test_two_ratios_beside_two_names_can_be_written_either_way() -> None:
    names = ["token_k1", "seq_mean_k1"]
    assert resolve({"reject": names, "reject_threshold": [(0.5, 2.0)]}, None, None).reject == {
        name: (math.log(0.5), math.log(2.0)) for name in names
    }
    assert resolve({"reject": names, "reject_threshold": [(1.5,), (2.0,)]}, None, None).reject == {
        name: (math.log(1 / v), math.log(v)) for name, v in zip(names, (1.5, 2.0), strict=True)
    }


def test_keywords_add_to_a_preset() -> None:
    assert resolve({"clip_max": 3.0, "mode": "token_truncate"}, None, "tis").clip_max == 3.0
    both = resolve({"mode": "token_truncate", "clip_max": 2.0, "reject": ["seq_mean_k3"]}, None, "decoupled_k3_rs")
    assert both == resolve({}, None, "decoupled_k3_rs_token_tis")


#: rollout_is, bounds, rollout_rs, thresholds, bypass of verl 0.9.1's presets.
VERL = {
    "disabled": (None, None, None, None, False),
    "decoupled_token_is": ("token_truncate", (None, 2.0), None, None, False),
    "decoupled_seq_is": ("sequence_truncate", (None, 2.0), None, None, False),
    "decoupled_token_icepop": ("token_mask", (0.5, 5.0), None, None, False),
    "decoupled_seq_is_rs": ("sequence_truncate", (None, 2.0), "seq_sum_k1", [[0.5, 2.0]], False),
    "decoupled_geo_rs": (None, None, "seq_mean_k1", [[0.999, 1.001]], False),
    "decoupled_geo_rs_seq_tis": ("sequence_truncate", (None, 2.0), "seq_mean_k1", [[0.999, 1.001]], False),
    "decoupled_geo_rs_token_tis": ("token_truncate", (None, 2.0), "seq_mean_k1", [[0.999, 1.001]], False),
    "decoupled_k3_rs": (None, None, "seq_mean_k3", [0.01], False),
    "decoupled_k3_rs_seq_tis": ("sequence_truncate", (None, 2.0), "seq_mean_k3", [0.01], False),
    "decoupled_k3_rs_token_tis": ("token_truncate", (None, 2.0), "seq_mean_k3", [0.01], False),
    "bypass_ppo_clip": (None, None, None, None, True),
    "bypass_ppo_clip_geo_rs": (None, None, "seq_mean_k1", [[0.999, 1.001]], True),
    "bypass_ppo_clip_k3_rs": (None, None, "seq_mean_k3", [0.01], True),
    "bypass_pg_is": ("sequence_truncate", (None, 2.0), None, None, True),
    "bypass_pg_token_icepop": ("token_mask", (0.5, 5.0), None, None, True),
    "bypass_pg_geo_rs": (None, None, "seq_mean_k1", [[0.999, 1.001]], True),
    "bypass_pg_geo_rs_seq_tis": ("sequence_truncate", (None, 2.0), "seq_mean_k1", [[0.999, 1.001]], True),
    "bypass_pg_geo_rs_token_tis": ("token_truncate", (None, 2.0), "seq_mean_k1", [[0.999, 1.001]], True),
}


@pytest.mark.parametrize("name", VERL)
def test_presets_of_verl(name: str) -> None:
    mode, bounds, reject, thresholds, bypass = VERL[name]
    b = ragged(7, 0.02)
    found = importance_weights(b.old, b.sampling, b.offsets, mask=b.mask, preset=name)
    if mode is None and reject is None:
        np.testing.assert_array_equal(found[1], importance_weights(
            b.old, b.sampling, b.offsets, mask=b.mask, mode="token_truncate", clip_max=INF)[1])  # fmt: skip
        assert found[0] is None
    else:
        low, high = bounds or (None, None)
        want = importance_weights(
            b.old, b.sampling, b.offsets, mask=b.mask, mode=mode, clip_min=low, clip_max=high,
            reject=reject, reject_threshold=thresholds, log_ratio_clamp=20.0,
        )  # fmt: skip
        np.testing.assert_array_equal(found[1], want[1])
        assert found[2] == want[2]
        assert (found[0] is None) == (mode is None)
        if mode is not None:
            np.testing.assert_array_equal(found[0], want[0])
    assert correction_tables.PRESETS[name].bypass is bypass


@pytest.mark.parametrize("name", correction_tables.PRESETS)
def test_every_preset_resolves_and_an_explicit_keyword_beats_it(name: str) -> None:
    choice = resolve({}, None, name)
    row = correction_tables.PRESETS[name].options
    assert choice.mode == row.get("mode") and tuple(choice.reject) == row.get("reject", ())
    if choice.mode is not None:
        assert resolve({"clip_max": 77.0}, "trl", name).clip_max == 77.0
    assert resolve({}, "trl", name) == choice  # a preset is whole: a convention adds no weights to it


def test_precedence_of_conventions() -> None:
    trl = resolve({}, "trl", None)
    assert (trl.mode, trl.clip_max, trl.log_ratio_clamp) == ("sequence_mask", 3.0, INF)
    assert resolve({"clip_max": 5.0}, "trl", None).clip_max == 5.0
    assert resolve({"mode": "token_truncate"}, "trl==1.16.0", None).clip_max == 3.0
    verl = resolve({"mode": "token_truncate"}, "verl", None)
    assert (verl.clip_max, verl.log_ratio_clamp) == (2.0, 20.0)
    assert resolve({"reject": "token_k1", "reject_threshold": 2.0}, "verl", None).mode is None


# ---- weights of 0 and 1 ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_off_policy_weights(dtype: Any, backend: str) -> None:
    for seed in range(4):
        b = ragged(seed, 0.4, dtype, outliers=False)
        rng = np.random.default_rng(seed)
        advantages = rng.choice([-1.0, 0.0, 1.0], len(b.offsets) - 1)
        of_tokens = rng.choice([-1.0, 0.0, 1.0], len(b.old))
        of_tokens[~b.mask] = NAN
        near = [(-x).sum() / max(len(x), 1) <= 0.05 for _, x in b.rows()]
        found = off_policy_weights(b.old, b.sampling, advantages, b.offsets, 0.05, mask=b.mask, backend=backend)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, [float(ok or A >= 0) for ok, A in zip(near, advantages, strict=True)])
        want = np.zeros(len(b.old))
        for ok, (slots, _) in zip(near, b.rows(), strict=True):
            want[slots] = ok | (of_tokens[slots] >= 0)
        found = off_policy_weights(
            b.old, b.sampling, of_tokens, b.offsets, 0.05, mask=b.mask, advantage_level="token", backend=backend
        )
        np.testing.assert_array_equal(found, want)


def test_off_policy_threshold_is_kept_at_equality() -> None:
    assert off_policy_weights([-1.0, -1.0], [-0.5, -0.5], [-1.0], [0, 2], 0.5) == [1.0]
    assert off_policy_weights([-1.0, -1.0], [-0.5, -0.4375], [-1.0], [0, 2], 0.5) == [0.0]


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_top_entropy(quantile: float) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        entropy, mask = rng.exponential(1.0, 57), rng.random(57) < 0.7
        if seed % 2:
            entropy = np.round(entropy, 1)  # ties
        entropy[~mask] = NAN
        own = sorted(entropy[mask])
        at = (1 - quantile) * (len(own) - 1)
        below, above = own[math.floor(at)], own[math.ceil(at)]
        bound = below + (above - below) * (at - math.floor(at))
        found = top_entropy_weights(entropy, [0, 20, 20, 57], quantile, mask=mask)
        np.testing.assert_array_equal(found, mask & (np.nan_to_num(entropy, nan=-1.0) >= bound - 1e-12))
        np.testing.assert_array_equal(found, top_entropy_weights(entropy, [0, 57], threshold=bound - 1e-12, mask=mask))
    assert top_entropy_weights(np.float16([1, 2]), [0, 2], 0.5).dtype == np.float32


# ---- in the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_truncate"])
def test_decoupled_ppo_is_its_formula(mode: str, backend: str) -> None:
    """-mean over counted tokens of stop(min or mask of pi_prox / pi_behav) min(r A, clip(r) A), r = pi / pi_prox."""
    torch = pytest.importorskip("torch")
    b = ragged(3, 0.3, outliers=False, unscored=False)
    rng = np.random.default_rng(1)
    now = np.where(b.mask, np.nan_to_num(b.old) + 0.2 * rng.standard_normal(len(b.old)), NAN)
    advantages = rng.standard_normal(len(b.offsets) - 1)
    preset = {"preset": "decoupled_ppo", "clip_max": 1.3} if mode == "token_mask" else {"mode": mode, "clip_max": 1.3}
    weight, _, _ = importance_weights(b.old, b.sampling, b.offsets, mask=b.mask, backend=backend, **preset)
    result = gf.grpo_loss(
        now, b.old, None, advantages, b.offsets, mask=b.mask, loss_type="dapo", token_weight=weight,
        weight_level="completion" if len(weight) < len(b.old) else "token", backend=backend,
    )  # fmt: skip
    logp = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    total, n = torch.zeros((), dtype=torch.float64), 0
    for i, (slots, x) in enumerate(b.rows()):
        if len(slots) == 0:
            continue
        lam, w = logp[slots] - torch.tensor(b.old[slots]), torch.tensor(np.exp(x))
        if mode == "token_mask":
            w = torch.where(w > 1.3, 0.0, w)
        elif mode == "token_truncate":
            w = w.clamp(max=1.3)
        else:
            w = torch.exp(torch.tensor(x.sum())).clamp(max=1.3)
        A = float(advantages[i])
        total = total - (w * torch.minimum(lam.exp() * A, lam.exp().clamp(0.8, 1.2) * A)).sum()
        n += len(slots)  # tokens of weight 0 count
    (total / n).backward()
    assert result.loss == pytest.approx(total.item() / n, rel=1e-10)
    grad = np.where(np.isnan(logp.grad.numpy()), 0.0, logp.grad.numpy())
    np.testing.assert_allclose(n * result.grad, n * grad, rtol=1e-9, atol=1e-12)


def test_weights_keep_denominators_and_rejection_shrinks_them(backend: str) -> None:
    old, sampling = np.array([-1.0, -1.0, -1.0, -1.0]), np.array([-1.0, -4.0, -1.0, -1.0])
    weight, mask, _ = importance_weights(
        old, sampling, [0, 4], mode="token_mask", clip_max=2.0, reject="token_k2", reject_threshold=1.0, backend=backend
    )
    assert weight is not None
    np.testing.assert_array_equal(weight, [1, 0, 1, 1])
    np.testing.assert_array_equal(mask, [True, False, True, True])

    def loss(**kw: Any) -> float:
        return gf.grpo_loss(old, old, None, [1.0], [0, 4], backend=backend, **kw).loss

    assert loss() == -1.0
    assert loss(token_weight=weight) == -0.75
    assert loss(mask=mask) == -1.0


# ---- diagnostics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_off_policy_metrics(dtype: Any, backend: str) -> None:
    b = ragged(11, 0.6, dtype, outliers=False)
    metrics, by_position = off_policy_metrics(
        b.old, b.sampling, b.offsets, mask=b.mask, position_edges=[0, 2, 10, 10000], backend=backend
    )
    assert set(metrics) == set(correction_tables.OFF_POLICY_METRICS)
    assert set(by_position) == set(POSITION_METRICS)
    rows = [(slots, x) for slots, x in b.rows() if len(slots)]
    x = np.concatenate([x for _, x in rows])
    k3 = np.exp(x) - 1 - x
    train = np.array([-b.old[slots].astype(np.float64).mean() for slots, _ in rows])
    gap = np.array([-x.mean() for _, x in rows])
    products = np.exp([x.sum() for _, x in rows])
    r = np.exp(x)
    want = {
        "tokens": len(x),
        "unscored": sum(np.isnan(b.sampling[slots]).sum() for slots, _ in rows),
        "kl": -x.mean(),
        "k3_kl": k3.mean(),
        "training_ppl": np.exp(train).mean(),
        "training_log_ppl": train.mean(),
        "rollout_ppl": np.exp(train - gap).mean(),
        "rollout_log_ppl": (train - gap).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": np.abs(gap).mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": np.exp(gap).mean(),
        "chi2_token": (r**2).mean() - 1,
        "chi2_seq": (products**2).mean() - 1,
        "ess_token": 1 / ((r / r.mean()) ** 2).mean(),
        "ess_seq": 1 / ((products / products.mean()) ** 2).mean(),
        "log_ratio_median": np.median(x),
        "k3_kl_trimmed": k3[np.abs(x) <= np.quantile(np.abs(x), 0.99)].mean(),
        "k3_kl_seq_median": np.median([(np.exp(x) - 1 - x).mean() for _, x in rows]),
        "log_ratio_abs_mean": np.abs(x).mean(),
        "log_ratio_abs_p50": np.quantile(np.abs(x), 0.5),
        "log_ratio_abs_p90": np.quantile(np.abs(x), 0.9),
        "log_ratio_abs_p99": np.quantile(np.abs(x), 0.99),
        "log_ratio_abs_p999": np.quantile(np.abs(x), 0.999),
        "log_ratio_abs_max": np.abs(x).max(),
        "ratio_high_share": (r > 2).mean(),
        "ratio_high_mass": r[r > 2].sum() / r.sum(),
        "ratio_low_share": (r < 0.5).mean(),
        "ratio_low_mass": r[r < 0.5].sum() / r.sum(),
    }
    assert set(want) == set(metrics)
    assert want["ratio_high_share"] > 0 and want["ratio_low_share"] > 0
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    position = np.concatenate([slots - b.offsets[i] for i, (slots, _) in enumerate(b.rows())])
    for k, (first, last) in enumerate(((0, 2), (2, 10), (10, 10000))):
        own = x[(first <= position) & (position < last)]
        found = {name: values[k] for name, values in by_position.items()}
        assert found["start"] == first and found["tokens"] == len(own)
        assert found["kl"] == pytest.approx(-own.mean(), abs=1e-12)
        assert found["k3_kl"] == pytest.approx((np.exp(own) - 1 - own).mean(), rel=1e-9)
        assert found["log_ratio_abs_mean"] == pytest.approx(np.abs(own).mean())
        assert found["log_ratio_abs_p50"] == pytest.approx(np.median(np.abs(own)))
        assert found["ess_token"] == pytest.approx(np.exp(own).mean() ** 2 / np.exp(2 * own).mean())
    assert by_position["tokens"][3] == 0 and np.isnan(by_position["kl"][3])


def test_diagnostics_survive_outliers() -> None:
    b = ragged(12, 0.1, outliers=False, unscored=False)
    worse = b.sampling.copy()
    first = b.rows()[3][0][0]
    worse[first] -= 1e4
    calm, _ = off_policy_metrics(b.old, b.sampling, b.offsets, mask=b.mask)
    for clamp in (None, INF):
        wild, _ = off_policy_metrics(b.old, worse, b.offsets, mask=b.mask, log_ratio_clamp=clamp)
        assert all(np.isfinite(value) for value in wild.values())
        for name in ("log_ratio_median", "k3_kl_trimmed", "log_ratio_abs_p50", "log_ratio_abs_p90"):
            assert wild[name] == pytest.approx(calm[name], rel=0.05, abs=1e-3), name
        assert wild["log_ratio_abs_max"] == pytest.approx(1e4, rel=1e-3)
        assert 0 < wild["ess_token"] <= 1 and 0 < wild["ess_seq"] <= 1


# ---- dtypes, places, masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mode", correction_tables.CORRECTIONS)
def test_dtypes(kind: str, mode: str, backend: str) -> None:
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if kind == "bfloat16" else np.dtype(kind)
    b = ragged(4, 0.05)
    narrow = Ragged(b.old.astype(dtype), b.sampling.astype(dtype), b.offsets, b.mask)
    weight, _, _ = importance_weights(
        narrow.old, narrow.sampling, b.offsets, mode=mode, clip_max=3.0, mask=b.mask, backend=backend
    )
    assert weight is not None and weight.dtype == (np.float64 if kind == "float64" else np.float32)
    widened = Ragged(narrow.old.astype(np.float64), narrow.sampling.astype(np.float64), b.offsets, b.mask)
    ratio = correction_tables.CORRECTIONS[mode].sequence_ratio or "product"
    want = expected_weights(widened, mode, 0.0, 3.0, ratio, INF, False)
    np.testing.assert_allclose(spread(weight, b), want, rtol=1e-12 if kind == "float64" else 1e-6, atol=1e-37)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mode", correction_tables.CORRECTIONS)
def test_padded_is_packed_to_the_last_bit(mode: str, left: bool, backend: str) -> None:
    b = ragged(9, 0.2)
    lengths = np.diff(b.offsets)
    old, sampling, mask = (b.padded(v, f, left) for v, f in ((b.old, NAN), (b.sampling, INF), (b.mask, False)))
    options: dict[str, Any] = {
        "mode": mode, "clip_max": 1.5, "batch_normalize": "mean", "reject": "seq_mean_k3,token_k2",
        "reject_threshold": [0.5, 3.0], "backend": backend,
    }  # fmt: skip
    weight, keep, metrics = padded.importance_weights(old, sampling, mask, **options)
    # packed as the padded rows are read: from the first to the last counted slot
    spans = [(s[0], s[-1] + 1) if len(s) else (0, 0) for s, _ in b.rows()]
    slots = np.concatenate([np.arange(*span) for span in spans])
    offsets = np.cumsum([0, *(stop - start for start, stop in spans)])
    want = importance_weights(b.old[slots], b.sampling[slots], offsets, mask=b.mask[slots], **options)
    assert metrics == want[2]
    assert weight is not None and want[0] is not None
    if weight.ndim == 1:
        np.testing.assert_array_equal(weight, want[0])
    else:
        np.testing.assert_array_equal(weight[mask], want[0][b.mask[slots]])
        assert (weight[~mask] == 0).all()
    np.testing.assert_array_equal(keep[mask], want[1][b.mask[slots]])
    assert not keep[~mask].any()
    ours, _ = padded.off_policy_metrics(old, sampling, mask, backend=backend)
    theirs, _ = off_policy_metrics(b.old[slots], b.sampling[slots], offsets, mask=b.mask[slots], backend=backend)
    assert ours == theirs
    advantages = np.where(np.arange(len(lengths)) % 2, 1.0, -1.0)
    np.testing.assert_array_equal(
        padded.off_policy_weights(old, sampling, advantages, mask, 0.01, backend=backend),
        off_policy_weights(
            b.old[slots], b.sampling[slots], advantages, offsets, 0.01, mask=b.mask[slots], backend=backend
        ),
    )
    entropy = np.where(mask, np.abs(np.nan_to_num(old)), NAN)
    found = padded.top_entropy_weights(entropy, mask, 0.3)
    np.testing.assert_array_equal(found[mask], top_entropy_weights(entropy[mask], [0, mask.sum()], 0.3))
    assert (found[~mask] == 0).all()


def test_three_dimensions_and_no_mask(backend: str) -> None:
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.0, (2, 3, 5))
    sampling = old + 0.1 * rng.standard_normal(old.shape)
    weight, keep, _ = padded.importance_weights(old, sampling, mode="sequence_truncate", clip_max=1.1, backend=backend)
    np.testing.assert_allclose(weight, np.minimum(np.exp((old - sampling).sum(-1)), 1.1))
    assert keep.shape == old.shape and keep.all()
    token, _, _ = padded.importance_weights(
        old[..., :1], sampling[..., :1], mode="token_truncate", clip_max=9.0, backend=backend
    )
    assert token is not None and token.shape == (2, 3, 1)


@pytest.mark.parametrize("mode", correction_tables.CORRECTIONS)
def test_order_and_neighbours_do_not_change_a_bit(mode: str, backend: str) -> None:
    b = ragged(2, 0.2)
    order = np.random.default_rng(0).permutation(len(b.offsets) - 1)
    slots = np.concatenate([np.arange(b.offsets[i], b.offsets[i + 1]) for i in order])
    offsets = np.cumsum([0, *np.diff(b.offsets)[order]])
    options: dict[str, Any] = {"mode": mode, "clip_max": 1.4, "batch_normalize": "mean", "backend": backend}
    here, _, metrics = importance_weights(b.old, b.sampling, b.offsets, mask=b.mask, **options)
    there, _, moved = importance_weights(b.old[slots], b.sampling[slots], offsets, mask=b.mask[slots], **options)
    assert here is not None and there is not None
    np.testing.assert_array_equal(there, here[order] if len(there) == len(order) else here[slots])
    assert moved["rollout_is_mean"] == metrics["rollout_is_mean"]


def test_columns_of_the_oracle_by_hand() -> None:
    a, b = np.array([-1.0, -2.0, -3.0, -9.0]), np.array([-2.0, NAN, -2.5, INF])
    out = np.empty((2, len(_contract.MISMATCH)))
    mask = np.array([1, 1, 1, 0], np.uint8)
    _numpy_mismatch.mismatch(a, b, mask, np.array([0, 4]), np.array([4, 4]), 0.75, out)
    row = dict(zip(_contract.MISMATCH, out[0], strict=True))
    y = np.array([0.75, 0.0, -0.5])
    assert row["tokens"] == 3 and row["unscored"] == 1 and row["non_finite"] == 0
    assert (row["log_ratio"], row["log_ratio_abs"], row["log_ratio_min"], row["log_ratio_max"]) == (0.5, 1.5, -0.5, 1.0)
    assert row["ratio"] == pytest.approx(np.exp(y).sum()) and row["ratio_sq"] == pytest.approx(np.exp(2 * y).sum())
    assert row["k2"] == pytest.approx(0.40625) and row["k2_max"] == pytest.approx(0.28125)
    assert row["k3"] == pytest.approx((np.exp(y) - 1 - y).sum()) and row["k3_max"] == pytest.approx(0.3670000166126747)
    empty = dict(zip(_contract.MISMATCH, out[1], strict=True))
    assert (empty["log_ratio_min"], empty["log_ratio_max"], empty["k3_max"], empty["tokens"]) == (INF, -INF, 0, 0)


@pytest.mark.parametrize("outside", [_contract.OUTSIDE_CLIP, _contract.OUTSIDE_ZERO])
def test_kernels_against_the_oracle(outside: int, backend: str) -> None:
    kernels = _backends.get(backend)
    for seed, (da, db) in enumerate([(np.float64, np.float64), (np.float32, np.float64), (np.float32, np.float32)]):
        b = ragged(seed, 0.7)
        a, s, mask = b.old.astype(da), b.sampling.astype(db), b.mask.view(np.uint8)
        start, stop = np.ascontiguousarray(b.offsets[:-1]), np.ascontiguousarray(b.offsets[1:])
        for own_mask in (mask,):
            for clamp in (INF, 20.0, 0.5):
                results = []
                for module in (kernels, _numpy_mismatch):
                    table = np.empty((len(start), len(_contract.MISMATCH)))
                    module.mismatch(a, s, own_mask, start, stop, clamp, table)
                    weights = np.full(len(a), 7.0, da)
                    module.mismatch_weights(a, s, own_mask, start, stop, clamp, 0.6, 2.0, outside, weights)
                    keeps = []
                    for statistic in (1, 2, 3):
                        keep = np.full(len(a), 7, np.uint8)
                        module.mismatch_keep(a, s, own_mask, start, stop, clamp, statistic, -0.2, 0.3, keep)
                        keeps.append(keep)
                    results.append((table, weights, np.stack(keeps)))
                here, there = results
                np.testing.assert_allclose(here[0], there[0], rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(here[1], there[1], rtol=2e-7 if da == np.float32 else 1e-12)
                np.testing.assert_array_equal(here[2], there[2])
                assert (here[1][:4] == 7).all() and (here[2][:, -3:] == 7).all()  # slots of no completion


# ---- bad input ---------------------------------------------------------------------------------------

X = [-1.0, -1.0, -1.0]
TRUNCATE = {"mode": "token_truncate", "clip_max": 2.0}
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (importance_weights, {}, "mode: neither"),
    (importance_weights, {"mode": "token_trunc", "clip_max": 2.0}, r"mode: unknown .*did you mean 'token_truncate'"),
    (importance_weights, {"preset": "decoupled"}, "preset: unknown"),
    (importance_weights, {"convention": "trl==0.1", **TRUNCATE}, "convention: version"),
    (importance_weights, {"convention": "verl"}, r"mode: neither .*convention='verl'.*preset='decoupled_token_is', "),
    (importance_weights, {"convention": "openrlhf"}, r"mode: neither .*preset='tis', preset='icepop'"),
    (importance_weights, {"convention": "nemo-rl"}, r"mode: neither .*\(convention='nemo-rl' sets none by itself\)"),
    (importance_weights, {"mode": "tis"}, r"mode: 'tis' is a preset; did you mean preset='tis'\?"),
    (importance_weights, {"preset": "token_mask"}, r"preset: 'token_mask' is a mode; did you mean mode='token_mask'\?"),
    (importance_weights, {"preset": "tis", "mode": "token_mask"}, r"mode: preset='tis' is mode='token_truncate', got"),
    (importance_weights, {"preset": "decoupled_k3_rs", "reject": "token_k3"}, r"reject: preset='decoupled_k3_rs' is reject="),
    (importance_weights, {"reject": ["token_k1", "seq_mean_k1"], "reject_threshold": (0.5, 2.0)},
     r"pass \[\(0.5, 2\)\] for that pair for both, or \[\(0.5,\), \(2,\)\] for a ratio each"),
    (importance_weights, {"reject": "token_k1,seq_mean_k1", "reject_threshold": np.array([0.5, 2.0])}, "may be one pair"),
    (importance_weights, {"reject": "seq_mean_k1,token_k3", "reject_threshold": [(0.5, 2), (0.1, 1)]}, "'token_k3' takes one"),
    (importance_weights, {"mode": "token_mask"}, "clip_max: .*no default bound"),
    (importance_weights, {"mode": "token_mask", "clip_min": 3.0, "clip_max": 2.0}, "clip_min: 3 exceeds clip_max=2"),
    (importance_weights, {"mode": "token_mask", "clip_min": -1.0, "clip_max": 2.0}, "clip_min: .*>= 0"),
    (importance_weights, {"mode": "token_truncate", "clip_max": -2.0}, "clip_max: .*> 0"),
    (importance_weights, {"mode": "token_truncate", "clip_max": NAN}, "clip_max: .*nan"),
    (importance_weights, {**TRUNCATE, "log_ratio_clamp": -1.0}, "log_ratio_clamp: .*> 0"),
    (importance_weights, {**TRUNCATE, "sequence_ratio": "product"}, "sequence_ratio: .*no use"),
    (importance_weights, {"mode": "sequence_mask", "clip_max": 2.0, "sequence_ratio": "mean"}, "sequence_ratio: unknown"),
    (importance_weights, {**TRUNCATE, "batch_normalize": "median"}, "batch_normalize: unknown"),
    (importance_weights, {"clip_max": 2.0, "reject": "token_k1", "reject_threshold": 2.0}, "clip_max: without a mode"),
    (importance_weights, {"reject": "token_k4", "reject_threshold": 1.0}, "reject: unknown 'token_k4'"),
    (importance_weights, {"reject": "seq_max_k1", "reject_threshold": 1.0}, "reject: unknown 'seq_max_k1'"),
    (importance_weights, {"reject": [], "reject_threshold": 1.0, **TRUNCATE}, "reject: no name"),
    (importance_weights, {"reject": 5, "reject_threshold": 1.0}, "reject: expected a name or a list of names, got 5; "),
    (importance_weights, {"reject": "token_k1", "reject_threshold": "1_2_3"}, "a pair of ratios, got 3 numbers; "),
    (importance_weights, {"reject": "token_k1"}, "reject_threshold: .*needs one"),
    (importance_weights, {**TRUNCATE, "reject_threshold": 2.0}, "reject_threshold: there is nothing"),
    (importance_weights, {"reject": ["token_k1"], "reject_threshold": [0.5, 1.0, 2.0]}, "pair of ratios is one entry"),
    (importance_weights, {"reject": ["token_k1"], "reject_threshold": [[2.0, 0.5]]}, "lower ratio 2 exceeds .*swap"),
    (importance_weights, {"reject": ["token_k1"], "reject_threshold": 0.5}, "lower ratio 2 exceeds the upper 0.5; pass 2"),
    (importance_weights, {"reject": ["token_k2"], "reject_threshold": [[0.5, 2.0]]}, "takes one upper bound"),
    (importance_weights, {"reject": ["token_k2"], "reject_threshold": -1.0}, r"reject_threshold\[0\]: .*> 0"),
    (importance_weights, {"reject": ["token_k2"], "reject_threshold": "a"}, "'a' is no threshold"),
    (importance_weights, {**TRUNCATE, "mask": [0, 0, 0]}, "mask: no token counts"),
    (importance_weights, {**TRUNCATE, "mask": [1, 0]}, "mask: expected one entry per token"),
    (importance_weights, {**TRUNCATE, "sampling_logp": [-1.0]}, r"sampling_logp: expected one entry per token of old_logp \(3\)"),
    (importance_weights, {**TRUNCATE, "sampling_logp": [-1.0, -INF, NAN]}, r"sampling_logp\[1\]=-inf is not finite; mask .*not scored"),
    (importance_weights, {**TRUNCATE, "old_logp": [-1.0, -1.0, NAN]}, r"old_logp\[2\]=nan is not finite"),
    (importance_weights, {**TRUNCATE, "old_logp": [-1.0, -1e60, NAN]}, r"old_logp\[1\]=-1e\+60 is too large"),
    (importance_weights, {**TRUNCATE, "sampling_logp": [-1.0, NAN, -1.0], "unscored": "error"}, r"sampling_logp\[1\]=nan was not scored"),
    (importance_weights, {**TRUNCATE, "token_offsets": [0, 5]}, "token_offsets: .*inside old_logp"),
    (off_policy_weights, {"threshold": None}, "threshold: .*pass"),
    (off_policy_weights, {"threshold": -0.1}, "threshold: .*>= 0"),
    (off_policy_weights, {"advantages": [1.0, 2.0, 3.0]}, "advantages: expected one entry per completion"),
    (off_policy_weights, {"advantages": [1.0, NAN]}, r"advantages\[1\]=nan"),
    (off_policy_weights, {"sampling_logp": [INF, -1.0, -1.0]}, r"sampling_logp\[0\]=inf"),
    (top_entropy_weights, {}, "quantile: either it or threshold"),
    (top_entropy_weights, {"quantile": 0.2, "threshold": 1.0}, "quantile: either it or threshold"),
    (top_entropy_weights, {"quantile": 1.5}, "quantile: .*between 0 and 1"),
    (top_entropy_weights, {"quantile": 0.5, "entropy": [1.0, NAN, 1.0]}, r"entropy\[1\]=nan"),
    (top_entropy_weights, {"quantile": 0.5, "mask": [0, 0, 0]}, "mask: no token counts"),
    (off_policy_metrics, {"tails": (2.0, 0.5)}, "tails: the lower"),
    (off_policy_metrics, {"tails": 2.0}, "tails: expected two"),
    (off_policy_metrics, {"position_edges": [1, 2]}, "position_edges"),
    (off_policy_metrics, {"position_edges": [0, 2, 2]}, "position_edges"),
    (off_policy_metrics, {"log_ratio_clamp": 0.0}, "log_ratio_clamp: .*> 0"),
    (off_policy_metrics, {"mask": [0, 0, 0]}, "mask: no token counts"),
]  # fmt: skip
DEFAULTS: dict[Any, dict[str, Any]] = {
    importance_weights: {"old_logp": X, "sampling_logp": X},
    off_policy_metrics: {"old_logp": X, "sampling_logp": X},
    off_policy_weights: {"logp": X, "sampling_logp": X, "advantages": [1.0, -1.0], "threshold": 0.5},
    top_entropy_weights: {"entropy": [1.0, 2.0, 3.0]},
}


@pytest.mark.parametrize("function, arguments, message", BAD, ids=range(len(BAD)))
def test_bad_input_is_named(function: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as error:
        function(**{"token_offsets": [0, 2, 3], **DEFAULTS[function], **arguments})
    assert ":" in str(error.value) and ";" in str(error.value)
