"""clip_cov and kl_cov: which tokens of a batch are treated apart, and what that changes.

The batch goes through the kernels as if nothing were selected; the k selected tokens then go through
them once more, each as a completion of its own, and replace what the first pass made of them. Choosing
them streams over the tokens a slice at a time in NumPy, whatever the backend, and keeps k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _validate as check
from ._contract import KL_NONE, STATS, Batch, Double, Int, Plan, Real
from .tables import SELECTIONS

SLICE = 1 << 16  # tokens looked at at a time, or one completion
_SURROGATE, _KL = STATS.index("surrogate"), STATS.index("kl")


class Tokens(NamedTuple):
    """Counted tokens of a slice of completions."""

    number: Int  # among all counted tokens of the batch
    slot: Int
    owner: Int
    logp: Double
    advantage: Double


def select(name: str, options: dict[str, Any], plan: Plan, batch: Batch) -> Int:
    """The slots of the selected tokens, in ascending order."""
    if "selected" in options:
        return _given(options["selected"], batch)
    sums: list[tuple[float, float]] = []
    n, least, most = 0, np.inf, -np.inf
    for tokens in _slices(batch):
        sums.append((tokens.logp.sum(), tokens.advantage.sum()))
        n += len(tokens.slot)
        least, most = min(least, tokens.advantage.min(initial=np.inf)), max(most, tokens.advantage.max(initial=-np.inf))
    if n == 0:
        return np.zeros(0, np.int64)
    mean_logp, mean_advantage = (math.fsum(column) / n for column in zip(*sums, strict=True))
    mean_advantage = min(max(mean_advantage, least), most)  # equal advantages: no covariance, not its rounding
    k = max(int(options.get(SELECTIONS[name].options[0], 2e-4) * n), 1)
    kept_rank, kept_slot = np.zeros(0), np.zeros(0, np.int64)
    for tokens in _slices(batch):
        cov = (tokens.advantage - mean_advantage) * (tokens.logp - mean_logp)
        if name == "kl_cov":
            rank: npt.NDArray[Any] = -cov
            slot = tokens.slot
        else:
            low, high = options.get("clip_cov_lb", 1.0), options.get("clip_cov_ub", 5.0)
            able = (low < cov) & (cov < high) & ~_clipped(plan, batch, tokens)
            rank = _hash(tokens.number[able], options.get("seed", 0))
            slot = tokens.slot[able]
        rank, slot = np.concatenate([kept_rank.astype(rank.dtype), rank]), np.concatenate([kept_slot, slot])
        best = np.argsort(rank, kind="stable")[:k]  # of equal ones the first
        kept_rank, kept_slot = rank[best], slot[best]
    return np.sort(kept_slot)


def replace(
    kernels: Any,
    name: str,
    options: dict[str, Any],
    plan: Plan,
    batch: Batch,
    slots: Int,
    grad: Real | None,
    stats: Double,
) -> None:
    """Makes of the selected tokens what the method makes of them, in ``grad`` and ``stats``."""
    owner = owners(batch.start, batch.stop, slots)
    alone = _alone(batch, slots, owner)
    plain = np.empty((len(slots), len(STATS)))
    changed = np.empty_like(plain)
    part = None if grad is None else np.empty(len(slots), grad.dtype)
    kernels.policy_loss(plan._replace(kl=KL_NONE), alone._replace(ref_logp=None), None, plain, 1)
    if name == "clip_cov":
        alone = alone._replace(token_weight=None, completion_weight=np.zeros(len(slots)))
    else:
        plan = plan._replace(p0=options.get("ppo_kl_coef", 1.0))
    kernels.policy_loss(plan, alone, part, changed, 1)
    np.add.at(stats[:, _SURROGATE], owner, changed[:, _SURROGATE] - plain[:, _SURROGATE])
    if grad is not None and part is not None:
        grad[slots] = part


def _slices(batch: Batch) -> Iterator[Tokens]:
    lengths = batch.stop - batch.start
    ends = np.cumsum(lengths)
    seen = 0
    first = 0
    while first < len(lengths):
        base = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, base + SLICE, side="right")), first + 1)
        owner = np.repeat(np.arange(first, last), lengths[first:last])
        within = np.arange(len(owner)) - np.repeat(ends[first:last] - lengths[first:last] - base, lengths[first:last])
        slot = batch.start[owner] + within
        if batch.mask is not None:
            counted = batch.mask[slot] != 0
            slot, owner = slot[counted], owner[counted]
        number = seen + np.arange(len(slot))
        seen += len(slot)
        logp = batch.logp[slot].astype(np.float64)
        yield Tokens(number, slot, owner, logp, advantages_of(batch, slot, owner))
        first = last


def advantages_of(batch: Batch, slot: Int, owner: Int) -> Double:
    """The advantage of every token in ``slot``, all levels summed."""
    total = np.zeros(len(slot))
    if batch.advantages is not None:
        total += batch.advantages[owner]
    if batch.step_advantages is not None and batch.step_offsets is not None and batch.step_ends is not None:
        # ends are unique once shifted by their completion, so that one search finds every token's step
        width = int((batch.stop - batch.start).max(initial=0)) + 1
        of_step = np.repeat(np.arange(len(batch.start)), np.diff(batch.step_offsets))
        first = int(batch.step_offsets[0])
        keys = of_step * width + batch.step_ends[first : first + len(of_step)]
        at = np.searchsorted(keys, owner * width + (slot - batch.start[owner]))
        inside = at < batch.step_offsets[1:][owner] - first
        total[inside] += batch.step_advantages[first + at[inside]]
    if batch.token_advantages is not None:
        total += batch.token_advantages[slot]
    return total


def _clipped(plan: Plan, batch: Batch, tokens: Tokens) -> npt.NDArray[np.bool_]:
    if batch.old_logp is None:
        return np.zeros(len(tokens.slot), np.bool_)
    x = tokens.logp - batch.old_logp[tokens.slot]
    r = np.exp(np.clip(x, -plan.exp_bound, plan.exp_bound))
    above = (tokens.advantage > 0) & (r > plan.clip_hi)
    below = (tokens.advantage < 0) & (r < plan.clip_lo)
    return np.asarray(above | below)


def _hash(number: Int, seed: int) -> npt.NDArray[np.uint64]:
    """splitmix64 of the seed and a token's number: a random order that no split into threads or slices changes."""
    with np.errstate(over="ignore"):
        z = number.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def _given(selected: npt.ArrayLike, batch: Batch) -> Int:
    slots = check.integers("selected", selected)
    order = np.argsort(slots, kind="stable")
    again = np.flatnonzero(np.diff(slots[order]) == 0)
    if len(again):
        k = int(order[again[0] + 1])
        raise ValueError(f"selected: selected[{k}]={slots[k]} is there twice; name every token once")
    owner = owners(batch.start, batch.stop, slots)
    wrong = (owner < 0) | (slots < 0) | (slots >= len(batch.logp))
    if batch.mask is not None and len(slots):
        wrong |= batch.mask[np.where(wrong, 0, slots)] == 0
    if wrong.any():
        k = int(np.argmax(wrong))
        raise ValueError(f"selected: selected[{k}]={slots[k]} is not the index of a token that counts; drop it")
    return np.sort(slots)


def owners(start: Int, stop: Int, slots: Int) -> Int:
    """The completion of every slot, -1 where there is none."""
    nonempty = np.flatnonzero(stop > start)
    if len(nonempty) == 0:
        return np.full(len(slots), -1)
    order = nonempty[np.argsort(start[nonempty], kind="stable")]
    at = np.searchsorted(start[order], slots, side="right") - 1
    owner = np.where(at >= 0, order[at], -1)
    return np.where((owner >= 0) & (slots < stop[owner]), owner, -1)


def _alone(batch: Batch, slots: Int, owner: Int) -> Batch:
    """Every selected token as a completion of its own."""

    def of_token(values: Real | None) -> Real | None:
        return None if values is None else values[slots]

    def of_completion(values: Double | None) -> Double | None:
        return None if values is None else values[owner]

    return Batch(
        start=np.arange(len(slots)),
        stop=np.arange(len(slots)) + 1,
        logp=batch.logp[slots],
        old_logp=of_token(batch.old_logp),
        ref_logp=of_token(batch.ref_logp),
        mask=None,
        token_weight=of_token(batch.token_weight),
        completion_weight=of_completion(batch.completion_weight),
        advantages=advantages_of(batch, slots, owner),
        step_advantages=None,
        step_offsets=None,
        step_ends=None,
        token_advantages=None,
        weights=batch.weights[owner],
        kl_weights=of_completion(batch.kl_weights),
    )
