"""The oracle of what runs along tokens without a loss: returns, their moments, an affine map. Plain loops, float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ._contract import Double, Int, Real

Mask = npt.NDArray[np.uint8] | None


def token_gae(
    rewards: Real | None,
    final: Double | None,
    values: Real | None,
    mask: Mask,
    start: Int,
    stop: Int,
    gamma: float,
    lam: float,
    out: Real,
    n_threads: int = 1,
) -> None:
    """delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lam A_next, from the last counted token back."""
    largest = float(np.finfo(out.dtype).max)
    for i, (a, b) in enumerate(zip(start, stop, strict=True)):
        value_next = advantage_next = 0.0
        reward_at_the_end = 0.0 if final is None else float(final[i])
        for t in range(b - 1, a - 1, -1):
            if mask is not None and not mask[t]:
                out[t] = 0
                continue
            reward = (0.0 if rewards is None else float(rewards[t])) + reward_at_the_end
            value = 0.0 if values is None else float(values[t])
            advantage_next = reward + gamma * value_next - value + gamma * lam * advantage_next
            value_next, reward_at_the_end = value, 0.0
            out[t] = min(max(advantage_next, -largest), largest)


def token_moments(
    values: Real, mask: Mask, start: Int, stop: Int, centre: float, out: Double, n_threads: int = 1
) -> None:
    """Count, sum of v - centre and sum of its square over the counted tokens of each completion."""
    for i, (a, b) in enumerate(zip(start, stop, strict=True)):
        counted = values[a:b] if mask is None else values[a:b][mask[a:b] != 0]
        deviations = [float(v) - centre for v in counted]
        out[i] = len(deviations), math.fsum(deviations), math.fsum(d * d for d in deviations)


def token_affine(
    values: Real, mask: Mask, start: Int, stop: Int, shift: float, scale: float, out: Real, n_threads: int = 1
) -> None:
    """(v - shift) scale on counted tokens, 0 on masked ones; what is too large is the largest number."""
    largest = float(np.finfo(out.dtype).max)
    for a, b in zip(start, stop, strict=True):
        for t in range(a, b):
            counted = mask is None or mask[t] != 0
            out[t] = min(max((float(values[t]) - shift) * scale, -largest), largest) if counted else 0
