"""Seven frameworks' own functions against this library: values, and gradients times the number of tokens."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("liger_kernel")
pytestmark = pytest.mark.filterwarnings("ignore")

import grpo_fast.conventions as conventions  # noqa: E402

from .batches import Ragged, contiguous, ragged  # noqa: E402
from .others_features import FEATURES, Feature  # noqa: E402


def batch_of(feature: Feature, seed: int) -> Ragged:
    options = dict(feature.batch)
    together = options.pop("together", False)
    if feature.filled:
        options |= {"empty": 0.0, "blank": 0.0}
    far = feature.far and seed % 2 == 1
    batch = ragged(seed, far=far, **options)
    if feature.filled:
        batch = batch.take(np.flatnonzero(batch.counts > 0))
        options_of_groups = {name: int(np.sum(batch.group_ids == name)) for name in np.unique(batch.group_ids)}
        if len(set(options_of_groups.values())) > 1:
            pytest.skip("a completion without tokens made groups unequal")
    return batch.take(contiguous(batch)) if together else batch


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRPO_FAST_SEEDS", "2"))))
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_their_numbers(feature: Feature, seed: int) -> None:
    if feature.framework not in conventions.CONVENTIONS:
        pytest.skip(f"no convention {feature.framework!r}")
    batch = batch_of(feature, seed)
    theirs, ours = feature.theirs(batch), feature.ours(batch)
    if feature.value:
        close(ours.value, theirs.value, feature.rtol)
    if theirs.grad is not None:
        n = batch.n_tokens
        close(n * ours.grad, n * theirs.grad, feature.rtol)


def close(ours: np.ndarray, theirs: np.ndarray, rtol: float) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * max(1.0, float(np.abs(theirs).max(initial=0.0))))
