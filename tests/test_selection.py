"""Which tokens clip_cov and kl_cov treat apart: against a restatement, by chance, and as the caller says.

The choice shows in the gradient: clip_cov takes the surrogate of a token away, kl_cov adds a term to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import Batch, arguments, deleted, moved, pad, poisoned, random_batch, take

import grpo_fast as gf

CLIP, KL = {"loss_type": "clip_cov", "ref": False}, {"loss_type": "kl_cov", "ref": False}
WIDE = {**CLIP, "clip_cov_lb": -0.4, "clip_cov_ub": 0.6}


def run(batch: Batch, chosen: dict[str, Any], backend: str | None = None, **more: Any) -> Any:
    args, keywords = arguments(batch, chosen)
    return gf.grpo_loss(*args, **{**keywords, **more}, backend=backend)


def choice(
    batch: Batch, chosen: dict[str, Any], backend: str | None = None, *, without: Any = None, **more: Any
) -> np.ndarray:
    """The tokens that are treated apart, by what it does to their gradient."""
    names = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "seed", "kl_cov_ratio"}
    plain = {name: value for name, value in chosen.items() if name not in names}
    without = run(batch, plain, backend, selected=[]).grad if without is None else without
    return np.flatnonzero(run(batch, chosen, backend, **more).grad != without)


def covariance(batch: Batch) -> np.ndarray:
    """Of every counted token, -inf elsewhere: (A - mean A)(logp - mean logp), means over the counted tokens."""
    owner, counted = batch.owner, batch.counted
    cov = np.full(len(batch.logp), -np.inf)
    advantages, logp = batch.advantages[owner[counted]], batch.logp[counted].astype(np.float64)
    cov[counted] = (advantages - advantages.mean()) * (logp - logp.mean())
    return cov


def candidates(batch: Batch, low: float, high: float, epsilon: float = 0.2) -> np.ndarray:
    """As verl 0.9.1 has them: what is clipped, and what is masked, cannot be drawn."""
    cov = covariance(batch)
    ratio = np.exp(np.where(batch.counted, batch.logp, 0.0) - np.where(batch.counted, batch.old_logp, 0.0))
    advantages = batch.advantages[batch.owner]
    clipped = -advantages * np.clip(ratio, 1 - epsilon, 1 + epsilon) > -advantages * ratio
    return np.flatnonzero((low < cov) & (cov < high) & ~clipped & batch.counted)


def a_batch(seed: int, lengths: list[int] | None = None, **more: Any) -> Batch:
    batch = random_batch(seed, [40, 0, 7, 61, 1, 90] if lengths is None else lengths, lead=3, trail=2, **more)
    return replace(batch, advantages=np.random.default_rng(seed).standard_normal(batch.rows))  # none is 0


@pytest.mark.parametrize("ratio", [1e-4, 0.03, 0.2, 0.9, 1.0, 7.0])
@pytest.mark.parametrize(("low", "high"), [(-0.4, 0.6), (0.1, 0.3), (1.0, 5.0), (30.0, 50.0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clip_cov_draws_from_the_candidates_and_no_others(seed: int, low: float, high: float, ratio: float) -> None:
    batch = poisoned(a_batch(seed), seed)
    able = candidates(batch, low, high)
    if low < 1.0:
        assert 0 < len(able) < batch.counted.sum()
    options = {**CLIP, "clip_cov_ratio": ratio, "clip_cov_lb": low, "clip_cov_ub": high, "seed": seed}
    drawn = choice(batch, options)
    assert set(drawn) <= set(able)
    assert len(drawn) == min(max(int(ratio * batch.counted.sum()), 1), len(able))
    result = run(batch, options)
    assert result.metrics["selected_mean"] == result.metrics["pg_clipfrac"] == len(drawn) / batch.counted.sum()


def test_the_bounds_of_clip_cov_are_strict() -> None:
    # two tokens with advantages 1 and -1 and log-probs -1 and -3: means 0 and -2, both covariances are 1 exactly
    arguments = [-1.0, -3.0], [-1.0, -3.0], None, [1.0, -1.0], [0, 1, 2]

    def drawn(**bounds: float) -> int:
        result = gf.grpo_loss(*arguments, loss_type="clip_cov", clip_cov_ratio=1.0, **bounds)
        return int((result.grad == 0).sum())

    assert drawn(clip_cov_lb=1.0, clip_cov_ub=5.0) == 0
    assert drawn(clip_cov_lb=0.5, clip_cov_ub=1.0) == 0
    assert drawn(clip_cov_lb=0.999, clip_cov_ub=1.001) == 2
    assert drawn() == 0  # the defaults are 1 and 5


def test_the_draw_depends_on_the_seed(backend: str) -> None:
    batch = a_batch(4)
    chosen = {**WIDE, "clip_cov_ratio": 0.1}
    drawn = {seed: tuple(choice(batch, {**chosen, "seed": seed}, backend)) for seed in (0, 1, 2, 2**63, 2**64 + 1)}
    assert len(set(drawn.values())) >= 4
    assert tuple(choice(batch, chosen, backend)) == drawn[0]  # the default
    assert tuple(choice(batch, {**chosen, "seed": np.int32(2)}, backend)) == drawn[2]


@pytest.mark.parametrize("options", [{**WIDE, "clip_cov_ratio": 0.1, "seed": 5}, {**KL, "kl_cov_ratio": 0.1}],
                         ids=["clip_cov", "kl_cov"])  # fmt: skip
class TestChoice:
    def test_threads(self, options: dict[str, Any], backend: str) -> None:
        batch = a_batch(6, [300, 5, 70000, 0, 20], holes=0.97)
        one = choice(batch, options, backend, n_threads=1)
        assert len(one) > 100
        for n in (2, 3, -1):
            np.testing.assert_array_equal(choice(batch, options, backend, n_threads=n), one)

    def test_backends(self, options: dict[str, Any], backend: str) -> None:
        batch = a_batch(7)
        np.testing.assert_array_equal(choice(batch, options, backend), choice(batch, options, "numpy"))

    def test_gaps_and_masked_tokens(self, options: dict[str, Any], backend: str) -> None:
        batch = a_batch(8)
        here = choice(batch, options, backend)
        np.testing.assert_array_equal(choice(moved(batch, 11, 4), options, backend), here - 3 + 11)
        np.testing.assert_array_equal(choice(poisoned(batch, 8), options, backend), here)
        short, kept = deleted(batch)
        np.testing.assert_array_equal(kept[choice(short, {**options, "use_mask": False}, backend)], here)

    @pytest.mark.parametrize("left", [False, True])
    def test_padded(self, options: dict[str, Any], left: bool, backend: str) -> None:
        batch = a_batch(9)
        wide = pad(batch, 100, fill=np.nan, left=left)
        _, keywords = arguments(batch, options)
        keywords["mask"] = wide["mask"]
        grads = [
            gf.padded.grpo_loss(wide["logp"], wide["old_logp"], None, batch.advantages, **more, backend=backend).grad
            for more in (keywords, {"loss_type": options["loss_type"], "mask": wide["mask"], "selected": []})
        ]
        np.testing.assert_array_equal(wide["slots"][grads[0] != grads[1]], choice(batch, options, backend))

    def test_empty_rows_among_them(self, options: dict[str, Any]) -> None:
        batch = a_batch(10, [40, 7, 61])
        more = take(batch, [0, 1, 2])
        spread = replace(
            more,
            token_offsets=np.array([0, 0, 40, 40, 47, 108, 108]),
            **{name: getattr(more, name)[[0, 0, 0, 1, 2, 2]] for name in ("advantages", "completion_weight")},
            group_ids=np.arange(6),
            step_offsets=np.zeros(7, np.int64),
            step_ends=np.zeros(0, np.int64),
            step_advantages=np.zeros(0),
        )
        np.testing.assert_array_equal(choice(spread, options), choice(more, options))

    def test_nothing_counts(self, options: dict[str, Any]) -> None:
        batch = a_batch(11, holes=1.0)
        result = run(batch, options)
        assert result.loss == 0.0
        assert result.metrics["selected_mean"] == 0.0

    def test_the_kl_term_stays(self, options: dict[str, Any], backend: str) -> None:
        # beta k with its slope on selected tokens too: what is missing, or more, is the surrogate's
        batch = a_batch(12)
        chosen = {**options, "ref": True, "beta": 0.5}
        with_kl, without = run(batch, chosen, backend), run(batch, {**options}, backend)
        alone = run(batch, {"loss_type": "gpg", "beta": 0.5}, backend, token_weight=np.zeros(len(batch.logp)))
        np.testing.assert_allclose(with_kl.grad, without.grad + alone.grad, rtol=1e-12, atol=1e-17)
        assert with_kl.loss == pytest.approx(without.loss + alone.loss, rel=1e-12)
        assert with_kl.metrics["kl"] == pytest.approx(alone.metrics["kl"], rel=1e-12)

    def test_as_the_caller_says(self, options: dict[str, Any], backend: str) -> None:
        batch = a_batch(13)
        drawn = choice(batch, options, backend)
        here = run(batch, options, backend)
        said = run(batch, {"loss_type": options["loss_type"], "ref": False}, backend, selected=drawn[::-1])
        assert (said.loss, said.metrics) == (here.loss, here.metrics)
        np.testing.assert_array_equal(said.grad, here.grad)
        np.testing.assert_array_equal(said.per_completion, here.per_completion)


def test_the_draw_is_uniform() -> None:
    # N candidates, k of them drawn by each of 600 seeds. With p = k / N the sum of
    # (count - seeds p)^2 / (seeds p (1 - p)) times (N - 1) / N is chi-square of N - 1 degrees of freedom:
    # mean N - 1, standard deviation sqrt(2 (N - 1)). Six of those is one in 10^6 or less.
    batch = a_batch(14, [30, 50, 40], dtype=np.float64)
    able = candidates(batch, -0.4, 0.6)
    seeds, n = 600, len(able)
    without = run(batch, WIDE, "numpy", selected=[], clip_cov_lb=None, clip_cov_ub=None).grad
    place = {slot: k for k, slot in enumerate(able)}
    ratio = 8.5 / int(batch.counted.sum())
    drawn = np.zeros((seeds, n))
    for seed in range(seeds):
        tokens = choice(batch, {**WIDE, "clip_cov_ratio": ratio, "seed": seed}, "numpy", without=without)
        drawn[seed, [place[slot] for slot in tokens]] = 1
    assert (drawn.sum(1) == 8).all()

    def chi_square(counts: np.ndarray, p: float) -> float:
        return float((((counts - seeds * p) ** 2) / (seeds * p * (1 - p))).sum())

    k = 8
    assert n > 40
    assert abs(chi_square(drawn.sum(0), k / n) * (n - 1) / n - (n - 1)) < 6 * np.sqrt(2 * (n - 1))
    # tokens next to each other, and the same token under neighbouring seeds, know nothing of each other
    together = (drawn[:, 1:] * drawn[:, :-1]).sum(0)
    p = k * (k - 1) / (n * (n - 1))
    assert abs(chi_square(together, p) - (n - 1)) < 8 * np.sqrt(2 * (n - 1))
    again = (drawn[1:] * drawn[:-1]).sum(1)  # hypergeometric
    mean, variance = k * k / n, k * k / n * (1 - k / n) * (n - k) / (n - 1)
    assert abs(again.mean() - mean) < 6 * np.sqrt(variance / len(again))
    assert again.var() == pytest.approx(variance, rel=0.25)


@pytest.mark.parametrize("ratio", [1e-4, 0.01, 0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("seed", [15, 16, 17])
def test_kl_cov_takes_the_top_of_a_full_sort(seed: int, dtype: Any, ratio: float) -> None:
    batch = poisoned(a_batch(seed, dtype=dtype), seed)
    n = int(batch.counted.sum())
    order = np.argsort(-covariance(batch), kind="stable")
    expected = np.sort(order[: min(max(int(n * ratio), 1), n)])
    options = {**KL, "kl_cov_ratio": ratio, "ppo_kl_coef": 3.0}
    plain = run(batch, {**KL, "ppo_kl_coef": 3.0}, selected=[])
    result = run(batch, options)
    np.testing.assert_array_equal(np.flatnonzero(result.grad != plain.grad), expected)
    assert result.metrics["selected_mean"] == len(expected) / n
    # in float64 what is added is coefficient sign(log r) / n on each of them
    if dtype == np.float64:
        more = np.zeros(len(batch.logp))
        more[expected] = 3.0 * np.sign(batch.logp[expected] - batch.old_logp[expected]) / n
        np.testing.assert_allclose(result.grad, plain.grad + more, rtol=1e-12, atol=1e-16)


def test_kl_cov_over_more_tokens_than_are_looked_at_at_a_time() -> None:
    lengths = np.random.default_rng(18).integers(0, 4000, 150).tolist()
    batch = a_batch(18, lengths)
    n = int(batch.counted.sum())
    expected = np.sort(np.argsort(-covariance(batch), kind="stable")[: int(n * 0.01)])
    np.testing.assert_array_equal(choice(batch, {**KL, "kl_cov_ratio": 0.01}), expected)
    able = candidates(batch, 2.0, 2.5)
    drawn = choice(batch, {**CLIP, "clip_cov_ratio": 1e-3, "clip_cov_lb": 2.0, "clip_cov_ub": 2.5})
    assert len(drawn) == min(int(n * 1e-3), len(able))
    assert set(drawn) <= set(able)


@pytest.mark.parametrize("advantage", [0.1, 1 / 3, -0.7])
def test_equal_advantages_make_no_choice_of_rounding(advantage: float) -> None:
    # every covariance is 0: the first tokens are taken, wherever the rows and the masked tokens are
    for seed in range(20):
        batch = a_batch(seed, [13, 29, 31, 5])
        batch = replace(batch, advantages=np.full(4, advantage))
        options = {**KL, "kl_cov_ratio": 0.1}
        k = max(int(0.1 * batch.counted.sum()), 1)
        np.testing.assert_array_equal(choice(batch, options), np.flatnonzero(batch.counted)[:k])


def test_of_equal_covariances_the_first_are_taken() -> None:
    # advantages 1 and -1, log-probs -1 and -3 (means 0 and -2): a covariance of 1 on every token, without rounding
    logp = [-1.0, -1.0, -1.0, -1.0, -3.0, -3.0, -3.0, -3.0]
    old = [-1.125, *logp[1:7], -3.125]  # the penalty shows where the ratio is not 1
    for k in (1, 3, 7, 8):
        result = gf.grpo_loss(logp, logp, None, [1.0, -1.0], [0, 4, 8], loss_type="kl_cov", kl_cov_ratio=k / 8,
                              ppo_kl_coef=8.0)  # fmt: skip
        assert result.metrics["selected_mean"] == k / 8
        result = gf.grpo_loss(logp, old, None, [1.0, -1.0], [0, 4, 8], loss_type="kl_cov", kl_cov_ratio=k / 8,
                              ppo_kl_coef=8.0)  # fmt: skip
        penalty = result.grad + np.exp(np.subtract(logp, old)) * np.repeat([1.0, -1.0], 4) / 8
        np.testing.assert_allclose(penalty, [1.0, 0, 0, 0, 0, 0, 0, float(k == 8)], atol=1e-15)


def test_rows_in_another_order_give_kl_cov_the_same_tokens() -> None:
    for seed in range(10):
        batch = a_batch(seed)
        options = {**KL, "kl_cov_ratio": 0.1}
        order = np.random.default_rng(seed).permutation(batch.rows)
        shuffled = take(batch, order)
        slots = np.concatenate([np.arange(batch.token_offsets[row], batch.token_offsets[row + 1]) for row in order])
        np.testing.assert_array_equal(np.sort(slots[choice(shuffled, options)]), choice(batch, options))


@pytest.mark.parametrize("method", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize(
    ("selected", "says"),
    [
        ([4, 7, 4], r"selected: selected\[2\]=4 is there twice; "),
        ([4, 5], r"selected: selected\[1\]=5 is not the index of a token that counts; "),  # masked
        ([3, -1], r"selected: selected\[1\]=-1 is not the index of a token that counts; "),
        ([99, 4], r"selected: selected\[0\]=99 is not the index of a token that counts; "),
        ([0], r"selected: selected\[0\]=0 is not the index of a token that counts; "),  # before the first completion
        ([10], r"selected: selected\[0\]=10 is not the index of a token that counts; "),  # after the last
        ([4.5], "selected: "),
        ([[4]], "selected: "),
        (["4"], "selected: "),
        ([2**63], "selected: "),
    ],
)
def test_a_choice_that_cannot_be(method: str, selected: Any, says: str, backend: str) -> None:
    logp = np.full(12, -1.0)
    mask = np.ones(12, bool)
    mask[5] = False
    with pytest.raises((ValueError, TypeError), match=says):
        gf.grpo_loss(logp, logp, None, [1.0, -1.0], [2, 6, 10], mask=mask, loss_type=method, selected=selected,
                     backend=backend)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss_type": "clip_cov", "selected": [0], "seed": 1}, "seed: "),
        ({"loss_type": "clip_cov", "selected": [0], "clip_cov_ratio": 0.1}, "clip_cov_ratio: "),
        ({"loss_type": "clip_cov", "selected": [0], "clip_cov_lb": 0.1}, "clip_cov_lb: "),
        ({"loss_type": "kl_cov", "selected": [0], "kl_cov_ratio": 0.1}, "kl_cov_ratio: "),
        ({"loss_type": "kl_cov", "seed": 1}, "seed: .*'clip_cov'"),
        ({"loss_type": "grpo", "selected": [0]}, "selected: .*'clip_cov' or 'kl_cov'"),
        ({"loss_type": "clip_cov", "ppo_kl_coef": 1.0}, "ppo_kl_coef: .*'kl_cov'"),
        ({"loss_type": "clip_cov", "clip_cov_lb": 2.0, "clip_cov_ub": 1.0}, "clip_cov_lb: .*swap"),
        ({"loss_type": "clip_cov", "clip_cov_lb": 6.0}, "clip_cov_lb: "),
        ({"loss_type": "clip_cov", "clip_cov_ratio": 0.0}, "clip_cov_ratio: "),
        ({"loss_type": "kl_cov", "kl_cov_ratio": -1.0}, "kl_cov_ratio: "),
        ({"loss_type": "clip_cov", "seed": -1}, "seed: "),
        ({"loss_type": "clip_cov", "seed": 0.5}, "seed: "),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        gf.grpo_loss([-1.0, -2.0], [-1.0, -2.0], None, [1.0], [0, 2], **options)


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_a_gradient_over_the_selection_is_refused(loss_type: str, backend: str) -> None:
    memory = np.array([1, 0])
    with pytest.raises(ValueError, match=r"^grad_out: it overlaps selected, which would be overwritten"):
        gf.grpo_loss(
            [-1.0, -2.0], [-1.0, -2.0], None, [1.0], [0, 2], loss_type=loss_type, selected=memory,
            grad_out=memory.view(np.float64), backend=backend,
        )  # fmt: skip
    assert memory.tolist() == [1, 0]
