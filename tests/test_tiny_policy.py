"""The tiny policy of ``examples/``: its checker, its gradient, its samples."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from tiny_policy import (
    MAX_OPERANDS,
    MAX_TOKENS,
    PAD,
    Adam,
    Batch,
    Policy,
    decode,
    encode,
    grade,
    make_prompts,
    pretrain,
    prompt_text,
    write_solutions,
)


def prompt(*digits):
    return np.array([[*digits, *[PAD] * (MAX_OPERANDS - len(digits))]])


def batch_of(prompts, *texts):
    return Batch.of(prompts, np.zeros(len(texts), dtype=np.int64), [encode(text) for text in texts])


CASES = [  # completion of 3+5+9+2, outcome, ends of the steps, rewards of the steps
    ("+3+8+7+9=9.", 1, [1, 3, 5, 7, 10], [1, 1, 1, 1, 1]),
    ("++8++9=9.", 1, [2, 5, 8], [1, 1, 1]),
    ("++++=9.", 1, [6], [1]),
    ("=9.", 1, [2], [1]),
    ("=8.", 0, [2], [0]),
    ("+3+1+7=9.", 1, [1, 3, 5, 8], [1, 0, 1, 1]),  # a wrong step, then the true sum again
    ("+33=9.", 1, [1, 2, 5], [1, 0, 1]),  # a step that takes nothing
    ("++++9+9=9.", 1, [4, 6, 9], [1, 0, 1]),  # more than there is
    ("+3=9=9.", 0, [1, 6], [1, 0]),  # two answers
    ("+3=99.", 0, [1, 5], [1, 0]),
    ("+3=9+8.", 0, [1, 6], [1, 0]),  # nothing is a step after the answer but its end
    (".", 0, [0], [0]),
    ("9.", 0, [0, 1], [0, 0]),
    ("+3+8+7+9=9", 0, [1, 3, 5, 7], [1, 1, 1, 1]),  # truncated
    ("++++++++", 0, [], []),
]


def test_grade_by_hand():
    texts, outcomes, ends, rewards = zip(*CASES, strict=True)
    grades = grade(batch_of(prompt(3, 5, 9, 2), *texts))
    bounds = grades.step_offsets[1:-1]
    assert grades.rewards.tolist() == list(outcomes)
    assert [part.tolist() for part in np.split(grades.step_ends, bounds)] == list(ends)
    assert [part.tolist() for part in np.split(grades.step_rewards, bounds)] == list(rewards)
    assert grades.truncated.tolist() == [not text.endswith(".") for text in texts]


def test_texts():
    assert prompt_text(prompt(3, 5, 9, 2)[0]) == "3+5+9+2 mod 10"
    assert decode(encode("+3++8=0.")) == "+3++8=0."
    prompts = make_prompts(500, np.random.default_rng(0))
    counts = np.sum(prompts != PAD, axis=1)
    assert set(counts) == {2, 3, 4, 5, 6}
    assert np.all(prompts[:, 0] < 10)


def test_right_solutions_are_graded_right():
    rng = np.random.default_rng(1)
    prompts = make_prompts(200, rng)
    grades = grade(write_solutions(prompts, rng, accuracy=1.0))
    assert np.all(grades.rewards == 1) and np.all(grades.step_rewards == 1) and not np.any(grades.truncated)
    sloppy = grade(write_solutions(prompts, rng, accuracy=0.0))
    assert 0.03 < np.mean(sloppy.rewards) < 0.2


def test_gradient_against_finite_differences():
    rng = np.random.default_rng(2)
    policy = Policy(rng, hidden=8, dtype=np.float64)
    batch, _ = policy.sample(make_prompts(5, rng), 3, rng)
    weights = rng.standard_normal(len(batch.token_ids))
    gradients = policy.backward(batch, weights)
    assert gradients.keys() == policy.parameters.keys()
    for name, values in policy.parameters.items():
        assert gradients[name].shape == values.shape
        for index in {tuple(rng.integers(0, values.shape)) for _ in range(40)}:
            kept, step = values[index], 1e-5
            values[index] = kept + step
            above = weights @ policy.logp(batch)
            values[index] = kept - step
            below = weights @ policy.logp(batch)
            values[index] = kept
            assert gradients[name][index] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_sampled_log_probs_are_those_recomputed(dtype, tolerance):
    rng = np.random.default_rng(3)
    policy = pretrain(Policy(rng, hidden=16, dtype=dtype), rng, steps=50)
    prompts = make_prompts(20, rng)
    batch, logp = policy.sample(prompts, 5, rng)
    assert logp.dtype == dtype and len(logp) == len(batch.token_ids) == batch.token_offsets[-1]
    np.testing.assert_allclose(policy.logp(batch), logp, rtol=0, atol=tolerance)
    assert batch.group_ids.tolist() == np.repeat(np.arange(20), 5).tolist()
    again = Batch.of(prompts, batch.group_ids, batch.completions)
    assert np.array_equal(again.token_ids, batch.token_ids) and np.array_equal(again.slots, batch.slots)


def test_probabilities_are_what_is_sampled():
    rng = np.random.default_rng(4)
    policy = Policy(rng, hidden=16)
    policy.parameters["w2"] *= 10
    batch, logp = policy.sample(prompt(1, 2), 20_000, rng, max_tokens=1)
    counts = np.bincount(batch.token_ids, minlength=13)
    expected = np.exp([logp[batch.token_ids == token][0] for token in range(13)])
    assert expected.sum() == pytest.approx(1, abs=1e-5)
    assert np.all(np.abs(counts - 20_000 * expected) < 5 * np.sqrt(20_000 * expected))


def test_completions_end_or_are_cut_off():
    rng = np.random.default_rng(5)
    batch, _ = Policy(rng, hidden=16).sample(make_prompts(50, rng), 4, rng)
    truncated = grade(batch).truncated
    assert 0 < truncated.sum() < len(batch)
    assert np.all(batch.lengths[truncated] == MAX_TOKENS) and batch.lengths.max() == MAX_TOKENS
    assert all("." not in decode(tokens)[:-1] for tokens in batch.completions)


def test_seed_decides_everything():
    def run(seed):
        rng = np.random.default_rng(seed)
        policy = pretrain(Policy(rng, hidden=16), rng, steps=5)
        return policy.sample(make_prompts(10, rng), 4, rng)

    (first, first_logp), (second, second_logp), (other, _) = run(6), run(6), run(7)
    assert np.array_equal(first.token_ids, second.token_ids) and np.array_equal(first_logp, second_logp)
    assert not np.array_equal(first.token_ids, other.token_ids)


def test_training_moves_the_copy_only_and_learns():
    rng = np.random.default_rng(8)
    ref = pretrain(Policy(rng, hidden=16), rng, steps=50)
    frozen = {name: values.copy() for name, values in ref.parameters.items()}
    policy = ref.copy()
    optimizer = Adam(policy.parameters, lr=1e-2)
    batch = write_solutions(make_prompts(50, rng), rng, accuracy=1.0)
    before = policy.logp(batch).mean()
    for _ in range(30):
        optimizer.step(policy.backward(batch, np.full(len(batch.token_ids), -1 / len(batch.token_ids))))
    assert policy.logp(batch).mean() > before + 0.1
    assert all(np.array_equal(frozen[name], values) for name, values in ref.parameters.items())
