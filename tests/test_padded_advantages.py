"""Padded advantages are the packed ones, whichever side the padding is on and whatever it holds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import grpo_fast as gf
from grpo_fast import tables

LENGTHS = np.array([5, 1, 0, 7, 3, 4, 6, 2])
WIDTH = 9
IDS = ["b", "a", "b", "a", "c", "b", "c", "a"]


def inside(side: str) -> np.ndarray:
    """(B, L) the slots that completions own."""
    slots = np.arange(WIDTH)
    return slots < LENGTHS[:, None] if side == "right" else slots >= WIDTH - LENGTHS[:, None]


def padded(side: str, flat: np.ndarray, poison: float = np.nan) -> np.ndarray:
    out = np.full((len(LENGTHS), WIDTH), poison)
    out[inside(side)] = flat
    return out.astype(flat.dtype)


def arguments(name: str, dtype: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Per completion and per token: what an estimator needs."""
    rng = np.random.default_rng(2)
    n = int(LENGTHS.sum())
    row = tables.ESTIMATORS[name]
    options: dict[str, Any] = {"estimator": name, "singleton": "raw" if "singleton" in row.takes else None}
    options |= {"k": 2 if name == "pkpo" else None, "group_ids": IDS}
    if name == "remax":
        options["baseline_rewards"] = rng.random(len(LENGTHS)).astype(dtype)
    tokens = {argument: -rng.exponential(size=n).astype(dtype) for argument in row.needs if argument != "token_offsets"}
    return options, {k: v for k, v in tokens.items() if k not in ("k", "baseline_rewards")}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", tables.ESTIMATORS)
def test_equal_to_packed(backend: str, name: str, side: str, dtype: Any) -> None:
    options, tokens = arguments(name, dtype)
    rng = np.random.default_rng(3)
    rewards = rng.choice([0.0, 0.5, 1.0], len(LENGTHS)).astype(dtype)
    counted = np.ones(LENGTHS.sum(), bool)
    counted[[1, 8, 15]] = False  # never a row's first slot, where positions start
    mask = padded(side, counted.astype(float), 0.0) != 0
    arrays = {k: padded(side, v) for k, v in tokens.items()}
    found = gf.padded.group_advantages(rewards, mask, **arrays, **options, backend=backend)
    assert found.shape == mask.shape and found.dtype == dtype and not found[~mask].any()
    row = tables.ESTIMATORS[name]
    where: dict[str, Any] = {"token_offsets": np.cumsum([0, *LENGTHS]), "mask": counted}
    if (row.level == "completion" and name != "opo") or name == "remax":
        where = {}
    packed = gf.group_advantages(rewards, **tokens, **options, **where, backend=backend)
    expected = packed if packed.shape == counted.shape else np.repeat(packed, LENGTHS) * counted
    np.testing.assert_array_equal(found[inside(side)], expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_token_rewards(backend: str, side: str) -> None:
    rng = np.random.default_rng(4)
    flat = rng.normal(size=LENGTHS.sum())
    mask, rewards = inside(side), padded(side, flat)
    sums = np.array([part.sum() for part in np.split(flat, np.cumsum(LENGTHS)[:-1])])
    found = gf.padded.group_advantages(token_rewards=rewards, mask=mask, group_ids=IDS, ddof=1, backend=backend)
    expected = gf.group_advantages(sums, group_ids=IDS, ddof=1)[:, None] * mask
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    options: dict[str, Any] = {"estimator": "reinforce_plus_plus", "gamma": 0.9, "backend": backend}
    found = gf.padded.group_advantages(token_rewards=rewards, mask=mask, **options)
    packed = gf.group_advantages(token_rewards=flat, token_offsets=np.cumsum([0, *LENGTHS]), **options)
    np.testing.assert_array_equal(found[mask], packed)


def test_prompts_by_group_size(backend: str) -> None:
    rewards = np.array([[1.0, 0.0, 0.0], [2.0, 2.0, 5.0]])
    mask = np.zeros((2, 3, 4), bool)
    mask[:, :, 1:3] = True
    plain = gf.group_advantages(rewards)
    np.testing.assert_array_equal(gf.padded.group_advantages(rewards, backend=backend), plain)
    np.testing.assert_array_equal(gf.padded.group_advantages(rewards, mask, backend=backend), plain[..., None] * mask)
    mine = {"group_ids": [0, 1, 0, 1, 0, 1]}
    flat = gf.group_advantages(rewards.ravel(), **mine).reshape(2, 3, 1) * mask
    np.testing.assert_array_equal(gf.padded.group_advantages(rewards, mask, **mine, backend=backend), flat)
    several = np.stack([rewards, rewards[:, ::-1]], axis=-1)
    found = gf.padded.group_advantages(several, mask, estimator="gdpo", convention="trl", backend=backend)
    expected = gf.group_advantages(several.reshape(6, 2), group_offsets=[0, 3, 6], estimator="gdpo", convention="trl")
    np.testing.assert_array_equal(found, expected.reshape(2, 3, 1) * mask)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rewards": [1.0, 0.0], "mask": np.ones((3, 2))}, "rewards: expected shape (3,), the leading dimensions of mask"),
    ({"rewards": [1.0, 0.0], "mask": np.ones(3)}, "mask: expected shape (B, L) or (P, G, L), got (3,)"),
    (
        {"token_rewards": np.zeros((2, 4)), "mask": np.ones((2, 3)), "group_ids": [0, 0]},
        "token_rewards: expected shape (2, 3) to go with mask, got (2, 4)",
    ),
    (
        {"token_rewards": [[0.0, 1.0], [0.0, np.nan]], "mask": [[1, 1], [1, 1]], "group_ids": [0, 0]},
        "token_rewards: token_rewards[1, 1]=nan of completion 1",
    ),
    ({"rewards": [1.0, 0.0], "mask": np.ones((2, 3))}, "group_ids: neither group_ids nor group_offsets"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        gf.padded.group_advantages(**arguments)


# ---- process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options", [{}, {"tail": "last"}, {"normalize": "step_index", "credit": "step"}, {"credit": "min"}]
)
def test_process(backend: str, side: str, options: dict[str, Any], dtype: Any) -> None:
    rng = np.random.default_rng(5)
    ends = [np.sort(rng.choice(n, rng.integers(0, min(n, 4) + 1), replace=False)) for n in LENGTHS]
    rewards = [rng.choice([0.0, 1.0, 0.5, np.nan], len(e)).astype(dtype) for e in ends]
    mask = inside(side)
    wide = max(map(len, ends)) + 1
    step_rewards, step_ends = np.full((len(ends), wide), np.nan, dtype), np.full((len(ends), wide), -1)
    for i, (r, e) in enumerate(zip(rewards, ends, strict=True)):
        at = np.sort(rng.choice(wide, len(e), replace=False))  # absent steps in any place
        step_rewards[i, at], step_ends[i, at] = r, e + (0 if side == "right" else WIDTH - LENGTHS[i])
    outcome = rng.random(len(ends)).astype(dtype)
    more: dict[str, Any] = {"group_ids": IDS, "outcome_rewards": outcome, "ddof": 1, "backend": backend, **options}
    found = gf.padded.process_advantages(step_rewards, step_ends, mask, **more)
    offsets = np.cumsum([0, *map(len, ends)])
    packed = gf.process_advantages(
        np.concatenate(rewards), np.concatenate(ends), offsets, np.cumsum([0, *LENGTHS]), **more
    )
    assert found.dtype == dtype and not found[~mask].any()
    np.testing.assert_array_equal(found[mask], packed)


def test_process_by_prompts() -> None:
    rewards = np.array([[[1.0, 0.0], [1.0, np.nan]], [[0.0, 2.0], [1.0, 1.0]]])
    ends = np.array([[[0, 2], [1, -1]], [[0, 1], [0, 2]]])
    mask = np.ones((2, 2, 3), bool)
    mask[0, 1, 2] = False
    found = gf.padded.process_advantages(rewards, ends, mask, eps=0.0)
    for p in range(2):
        alone = gf.padded.process_advantages(rewards[p], ends[p], mask[p], eps=0.0, group_ids=[0, 0])
        np.testing.assert_array_equal(found[p], alone)
    np.testing.assert_allclose(found[0, 1], [2**-0.5, 2**-0.5, 0.0])


def test_process_refused() -> None:
    rewards, ends, mask = np.array([[1.0, np.nan]]), np.array([[1, -1]]), np.ones((1, 3))
    with pytest.raises(
        ValueError, match=r"^step_ends: step_ends\[0, 0\]=-1 with step_rewards\[0, 0\]=1\.0; a step ends"
    ):
        gf.padded.process_advantages(rewards, [[-1, -1]], mask, group_ids=[0])
    with pytest.raises(ValueError, match=r"^step_ends: step_ends\[0, 0\]=3 with"):
        gf.padded.process_advantages(rewards, [[3, -1]], mask, group_ids=[0])
    with pytest.raises(ValueError, match=r"^mask: expected shape \(1, 'L'\)"):
        gf.padded.process_advantages(rewards, ends, np.ones((2, 3)), group_ids=[0])
    with pytest.raises(TypeError, match=r"unexpected keyword 'normalise'; did you mean 'normalize'"):
        gf.padded.process_advantages(rewards, ends, mask, group_ids=[0], normalise="none")
