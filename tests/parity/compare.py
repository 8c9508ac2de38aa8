"""How far two results are from each other, and what is allowed.

A loss: |difference| over the sum of the absolute values of its terms, which are the policy part and the KL part of
every completion (so cancellation inside a completion makes the measure stricter, never looser).

A gradient: N |difference| over max(1, N (|policy part| + |KL part|)) at every counted token, N counted tokens; the two
parts are the framework's own, from a second call without the KL term (and a third without the penalty that dro and
kl_cov have in their policy part). Masked tokens must be exactly 0.

Advantages, weights and other values: |difference| over max(1, |value|) for every completion or counted token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FLOAT64 = 1e-7  # of the frameworks; they carry constants of their own such as 1e-8 in denominators
FLOAT32 = 2e-6  # our float32 against the framework in float64, on the same float32 numbers


class Difference(NamedTuple):
    """Largest absolute and relative difference of the value, and of the gradient."""

    value_abs: float = 0.0
    value_rel: float = 0.0
    grad_abs: float = 0.0
    grad_rel: float = 0.0
    has_grad: bool = False

    def __or__(self, other: tuple) -> Difference:  # type: ignore[override]
        return Difference(*(max(a, b) for a, b in zip(self, other, strict=True)))

    @property
    def worst(self) -> float:
        return max(self.value_rel, self.grad_rel)


def of_values(ours: np.ndarray, theirs: np.ndarray, counted: np.ndarray | None = None) -> Difference:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if counted is not None and counted.shape == ours.shape:
        assert (ours[~counted] == 0).all(), "a masked slot is not 0"
        ours, theirs = ours[counted], theirs[counted]
    assert np.isfinite(theirs).all(), "the framework gave what is not a number"
    off = np.abs(ours - theirs)
    if np.isnan(off).any():
        return Difference(np.inf, np.inf)
    return Difference(float(off.max(initial=0.0)), float((off / np.maximum(1.0, np.abs(theirs))).max(initial=0.0)))


def of_losses(
    ours: float,
    theirs: float,
    terms: float,
    ours_grad: np.ndarray,
    grad: np.ndarray,
    parts: Sequence[np.ndarray],
    mask: np.ndarray,
) -> Difference:
    """``terms``: the sum of absolute terms; ``parts``: the framework's gradient, term by term."""
    assert np.isfinite(theirs), "the framework gave what is not a number"
    assert (ours_grad[~mask] == 0).all(), "the gradient of a masked slot is not 0"
    off = abs(float(ours) - theirs)
    n = max(int(mask.sum()), 1)
    grad_off = np.abs(ours_grad.astype(np.float64) - grad)[mask]
    scale = np.maximum(1.0, n * sum(np.abs(part) for part in parts))[mask]
    if np.isnan(off) or np.isnan(grad_off).any():
        return Difference(np.inf, np.inf, np.inf, np.inf, True)
    relative = 0.0 if off == 0 else off / max(terms, 1e-300)
    return Difference(
        off, relative, float(grad_off.max(initial=0.0)), float((n * grad_off / scale).max(initial=0.0)), True
    )
