"""Make ``grpo_fast/data/tiny_rollouts.parquet``, the sample shipped with the package: real rollouts of a tiny policy.

Everything in it happened: :mod:`tiny_policy` is pretrained (the reference), trained for a few GRPO iterations (old),
samples the file's completions, and is trained on these very completions (new). The three log-probs of a token are what
the three policies give it. All in float64, so that another machine draws the same tokens; written as float32.

    python examples/make_sample.py [--seed 0] [--out FILE]    # seconds; OPENBLAS_NUM_THREADS=1 on a busy machine
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tiny_policy import Adam, Array, Batch, Policy, decode, grade, make_prompts, pretrain, prompt_text

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "grpo_fast" / "data" / "tiny_rollouts.parquet"
N_PROMPTS, GROUP_SIZE, MAX_TOKENS = 64, 8, 14
ACCURACY, PRETRAINING = 0.95, 1000
ITERATIONS, EPOCHS, LEARNING_RATE, EPSILON = 6, 6, 3e-3, 0.2
#: Chance that the "engine" loses a sample before it is written down.
ABORTED = 0.04

SOURCE = (
    "examples/make_sample.py --seed {seed}: completions of examples/tiny_policy.py, pretrained on worked solutions, "
    "{accuracy:.0%} of their statements right (ref), after {iterations} GRPO iterations on the outcome (old: sampled "
    "these), and after {epochs} more gradient steps on these completions (new); at most {max_tokens} tokens, those of "
    "truncated completions masked; {aborted} of {sampled} samples were aborted at random and are missing; rows are "
    "shuffled."
)
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample_idx": pa.int32(),
        "prompt": pa.string(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "step_ends": pa.list_(pa.int32()),
        "step_rewards": pa.list_(pa.float32()),
        "logp": pa.list_(pa.float32()),
        "old_logp": pa.list_(pa.float32()),
        "ref_logp": pa.list_(pa.float32()),
        "mask": pa.list_(pa.uint8()),
        "truncated": pa.bool_(),
    }
)


def outcome_advantages(rewards: Array, group_ids: Array) -> Array:
    """(n_completions,) rewards minus the mean of their group, over its standard deviation."""
    size = np.maximum(np.bincount(group_ids), 1)
    centred = rewards - (np.bincount(group_ids, rewards) / size)[group_ids]
    deviation = np.sqrt(np.bincount(group_ids, centred**2) / size)
    return centred / (deviation[group_ids] + 1e-6)


def train_on(policy: Policy, optimizer: Adam, batch: Batch, epochs: int) -> None:
    """``epochs`` steps down the clipped GRPO loss (token mean) of a batch that ``policy`` has sampled."""
    grades = grade(batch)
    counted = ~grades.truncated[batch.rows]
    advantages = outcome_advantages(grades.rewards, batch.group_ids)[batch.rows]
    old_logp = policy.logp(batch)
    for _ in range(epochs):
        ratio = np.exp(policy.logp(batch) - old_logp)
        kept = counted & np.where(advantages > 0, ratio <= 1 + EPSILON, ratio >= 1 - EPSILON)
        optimizer.step(policy.backward(batch, np.where(kept, -advantages * ratio, 0.0) / np.sum(counted)))


def make_table(seed: int = 0) -> pa.Table:
    """The sample, one row per completion, with its source in the schema's metadata."""
    rng = np.random.default_rng(seed)
    policy = pretrain(Policy(rng, hidden=64, dtype=np.float64), rng, accuracy=ACCURACY, steps=PRETRAINING)
    ref = policy.copy()
    optimizer = Adam(policy.parameters, lr=LEARNING_RATE)
    for _ in range(ITERATIONS):
        train_on(policy, optimizer, policy.sample(make_prompts(32, rng), 16, rng, max_tokens=MAX_TOKENS)[0], epochs=2)

    old = policy.copy()
    prompts = make_prompts(N_PROMPTS, rng)
    sampled, _ = old.sample(prompts, GROUP_SIZE, rng, max_tokens=MAX_TOKENS)
    survivors = np.flatnonzero(rng.random(len(sampled)) >= ABORTED)
    order = rng.permutation(survivors)
    completions = sampled.completions
    batch = Batch.of(prompts, sampled.group_ids[order], [completions[row] for row in order])
    train_on(policy, optimizer, batch, EPOCHS)

    grades = grade(batch)
    steps = grades.step_offsets[1:-1]

    def per_row(values: Array, bounds: Array = batch.token_offsets[1:-1]) -> list[Array]:
        return np.split(values, bounds)

    columns: dict[str, Iterable[Any]] = {
        "prompt_id": [f"p{group:03d}" for group in batch.group_ids],
        "sample_idx": order % GROUP_SIZE,
        "prompt": [prompt_text(prompt) for prompt in batch.prompts],
        "text": [decode(tokens) for tokens in batch.completions],
        "token_ids": batch.completions,
        "reward": grades.rewards,
        "step_ends": per_row(grades.step_ends, steps),
        "step_rewards": per_row(grades.step_rewards, steps),
        "logp": per_row(policy.logp(batch)),
        "old_logp": per_row(old.logp(batch)),
        "ref_logp": per_row(ref.logp(batch)),
        "mask": per_row((~grades.truncated[batch.rows]).astype(np.uint8)),
        "truncated": grades.truncated,
    }
    arrays = [pa.array(list(values), type=field.type) for field, values in zip(SCHEMA, columns.values(), strict=True)]
    source = SOURCE.format(
        seed=seed,
        accuracy=ACCURACY,
        iterations=ITERATIONS,
        epochs=EPOCHS,
        max_tokens=MAX_TOKENS,
        aborted=len(sampled) - len(batch),
        sampled=len(sampled),
    )
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({"grpo_fast.source": source}))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(make_table(arguments.seed), arguments.out, compression="zstd")


if __name__ == "__main__":
    main()
