"""Random ragged batches for the frameworks, and their padded form.

Everything comes from a seed. Log-probabilities lie on a grid of 2^-10, so that float32 and float64 hold the same
numbers and their differences are exact; no log-ratio comes near the logarithm of a usual clip bound, so a branch is
never a matter of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

GRID = 1024
#: What the library finds in slots that do not count. The frameworks multiply masks in, so theirs hold finite numbers.
POISON = np.nan


@dataclass(frozen=True)
class Ragged:
    """Completions in one flat buffer. Ids are strings in no order, every group has its own size."""

    token_offsets: np.ndarray
    group_ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    old_logp: np.ndarray
    ref_logp: np.ndarray
    sampling_logp: np.ndarray
    token_weight: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    sum_pi_squared: np.ndarray
    token_rewards: np.ndarray
    token_advantages: np.ndarray
    rewards: np.ndarray  # (n_completions, n_rewards)
    advantages: np.ndarray
    baselines: np.ndarray
    junk: np.ndarray  # finite numbers for the masked slots the frameworks see

    @property
    def n(self) -> int:
        return len(self.token_offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.token_offsets)

    @property
    def owner(self) -> np.ndarray:
        return np.repeat(np.arange(self.n), self.lengths)

    @property
    def counts(self) -> np.ndarray:
        """Counted tokens of every completion."""
        return np.bincount(self.owner[self.mask], minlength=self.n)

    @property
    def n_tokens(self) -> int:
        return int(self.mask.sum())

    def poisoned(self, name: str, dtype: Any = np.float64) -> np.ndarray:
        """An array of tokens with NaN wherever the mask is 0."""
        array = getattr(self, name).astype(dtype)
        array[~self.mask] = POISON
        return array

    def seen(self, name: str) -> np.ndarray:
        """An array of tokens with finite junk wherever the mask is 0, another one for every name."""
        return np.where(self.mask, getattr(self, name), -np.abs(np.roll(self.junk, TOKENS.index(name))))

    def take(self, rows: Any) -> Ragged:
        """These completions, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        slots = np.concatenate(
            [np.arange(self.token_offsets[i], self.token_offsets[i + 1]) for i in rows] + [np.zeros(0, np.int64)]
        ).astype(np.int64)
        per_row = {name: getattr(self, name)[rows] for name in ("group_ids", "rewards", "advantages", "baselines")}
        per_token = {name: getattr(self, name)[slots] for name in TOKENS}
        offsets = np.concatenate([[0], np.cumsum(self.lengths[rows])]).astype(np.int64)
        return Ragged(token_offsets=offsets, **per_row, **per_token)


TOKENS = (
    "mask", "logp", "old_logp", "ref_logp", "sampling_logp", "token_weight", "entropy", "values", "sum_pi_squared",
    "token_rewards", "token_advantages", "junk",
)  # fmt: skip


def ragged(
    seed: int,
    *,
    group_size: int | None = None,
    least_group: int = 1,
    n_groups: int = 6,
    holes: float = 0.2,
    empty: float = 0.1,
    blank: float = 0.1,
    missing: float = 0.0,
    n_rewards: int = 1,
    wild: float = 0.1,
    far: bool = False,
    shortest: int = 1,
    max_length: int = 40,
) -> Ragged:
    """A batch; ``group_size`` makes all groups equal, as TRL needs them.

    ``holes`` is the share of masked tokens, ``empty`` that of completions without tokens, ``blank`` that of fully
    masked ones, ``missing`` that of rewards that are NaN, ``wild`` that of log-ratios beyond the usual caps;
    ``far`` adds some beyond +-20, where verl clamps. A third of the groups has one and the same reward throughout.
    """
    rng = np.random.default_rng(seed)
    sizes = [group_size] * n_groups if group_size else [*rng.integers(least_group, 8, n_groups - 1), least_group]
    names = [f"prompt-{rng.integers(10**9):09d}" for _ in sizes]
    ids = np.repeat(np.array(names), sizes)
    n = len(ids)
    lengths = rng.integers(shortest, max_length, n)
    lengths[rng.random(n) < empty] = 0
    if n > 3:
        lengths[rng.integers(n)] = shortest
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    mask = rng.random(total) >= holes
    mask &= ~np.repeat(rng.random(n) < blank, lengths)
    if not mask.any():
        mask[:2] = True

    def steps() -> np.ndarray:
        """Log-ratios: k/64 + 1/256."""
        x = rng.standard_normal(total) * 0.3
        out = rng.random(total)
        x = np.where(out < wild, rng.standard_normal(total) * 1.5, x)
        x = np.where(far & (out < wild / 5), rng.choice([-1, 1], total) * rng.uniform(19, 24, total), x)
        return np.floor(x * 64) / 64 + 1 / 256

    logp = -np.ceil(rng.exponential(1.0, total) * GRID + 2) / GRID
    apart = {name: steps() for name in ("old_logp", "ref_logp", "sampling_logp")}
    lift = np.zeros(total)  # log-probabilities stay below 0
    for x in apart.values():
        lift = np.maximum(lift, np.maximum(0.0, logp - x + 1 / 64))
    lift = np.ceil(lift * GRID) / GRID
    logp = logp - lift
    rewards = rng.integers(-8, 9, (n, n_rewards)) / 8
    for g, name in enumerate(names):
        if g % 3 == 0:
            rewards[ids == name] = rewards[ids == name][0]
    rewards[rng.random((n, n_rewards)) < missing] = np.nan
    token_rewards = np.where(rng.random(total) < 0.2, rng.integers(-8, 9, total) / 8, 0.0)
    advantages = rng.standard_normal(n).astype(np.float32).astype(np.float64)
    advantages[rng.integers(n)] = 0.0
    whole = Ragged(
        token_offsets=offsets.astype(np.int64),
        group_ids=ids,
        mask=mask,
        logp=logp,
        old_logp=logp - apart["old_logp"],
        ref_logp=logp - apart["ref_logp"],
        sampling_logp=logp - apart["old_logp"] - np.round(apart["sampling_logp"] * GRID / 2) / GRID,
        token_weight=rng.uniform(0.25, 2.0, total).astype(np.float32).astype(np.float64),
        entropy=rng.exponential(1.0, total).astype(np.float32).astype(np.float64),
        values=rng.standard_normal(total),
        sum_pi_squared=rng.uniform(0.0, 1.0, total),
        token_rewards=token_rewards,
        token_advantages=rng.standard_normal(total).astype(np.float32).astype(np.float64),
        rewards=rewards,
        advantages=advantages,
        baselines=rng.standard_normal(n),
        junk=rng.standard_normal(total),
    )
    return whole.take(rng.permutation(n))


def contiguous(batch: Ragged) -> np.ndarray:
    """The order of rows in which groups lie together, as TRL needs them."""
    return np.argsort(batch.group_ids, kind="stable")


def width(batch: Ragged, extra: int = 0) -> int:
    return max(int(batch.lengths.max(initial=0)), 1) + extra


def pad(batch: Ragged, flat: np.ndarray, fill: float = 0.0, extra: int = 0) -> np.ndarray:
    """(n_completions, width), padded on the right; ``extra`` columns belong to nobody."""
    out = np.full((batch.n, width(batch, extra)), fill, dtype=flat.dtype)
    inside = np.arange(out.shape[1])[None, :] < batch.lengths[:, None]
    out[inside] = flat
    return out


def unpad(batch: Ragged, padded: np.ndarray) -> np.ndarray:
    """The inverse: one number per token."""
    return padded[np.arange(padded.shape[1])[None, :] < batch.lengths[:, None]]


def without_holes(batch: Ragged) -> Ragged:
    """The same completions with every token counted."""
    return replace(batch, mask=np.ones_like(batch.mask))


def outcome_at_end(batch: Ragged, rewards: np.ndarray, extra: int = 0) -> np.ndarray:
    """Padded token rewards with the outcome on the last token of the response, where verl puts it.

    A response without tokens gets it in the last column: verl indexes with its length minus one.
    """
    out = np.zeros((batch.n, width(batch, extra)))
    out[np.arange(batch.n), batch.lengths - 1] = rewards
    return out


def tokens(batch: Ragged, vocabulary: int = 3) -> np.ndarray:
    """Token ids with repetitions, from the batch's own random numbers."""
    return (np.abs(batch.junk * 1000).astype(np.int64) % vocabulary).astype(np.int64)
