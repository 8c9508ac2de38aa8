"""Losses, gradients and metrics against torch autograd, over the tables.

Every method at every level it allows, with every setting of its surrogate and every KL penalty; the
other axes (aggregation and denominators, mask, advantage level, weights, old policy) take turns.
GRPO_FAST_TURNS=20 gives every setting twenty turns instead of one.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
from batches import BACKENDS, Batch, arguments, away_from_kinks, poisoned, random_batch
from options import ADVANTAGES, SELECTED, combinations, kinks, of_method

import grpo_fast as gf
from grpo_fast import tables

torch = pytest.importorskip("torch")
import reference  # noqa: E402

TURNS = int(os.environ.get("GRPO_FAST_TURNS", "1"))
TIGHT = 1e-12

#: Rows of 0 and 1 tokens, a fully masked one, one longer than a chunk of any backend would like.
BATCHES = (
    random_batch(11, [5, 0, 3, 1, 8], lead=2, trail=1),
    random_batch(12, [4, 6, 2, 7], blank=0.4, holes=0.4),
)


def check(batch: Batch, options: dict[str, Any], where: str) -> None:
    expected = reference.evaluate(batch, options)
    args, keywords = arguments(batch, options)
    for backend in BACKENDS:
        result = gf.grpo_loss(*args, **keywords, backend=backend)
        say = f"{where}, {backend}: {options}"
        assert abs(result.loss - expected.loss) <= TIGHT * expected.loss_terms, (
            f"loss {result.loss} {expected.loss}; {say}"
        )
        worst = (
            expected.scale
            * np.abs(result.grad - expected.grad)
            / np.maximum(1.0, expected.scale * np.abs(expected.grad))
        )
        assert worst.max(initial=0.0) <= TIGHT, f"N * gradient off by {worst.max()} at {worst.argmax()}; {say}"
        off = np.abs(result.per_completion - expected.per_completion).max(initial=0.0)
        assert off <= TIGHT * max(expected.loss_terms, 1e-300), f"per_completion off by {off}; {say}"
        for name, value in expected.metrics.items():
            if name == "kl" and not options.get("ref", True):
                continue
            assert result.metrics[name] == pytest.approx(value, rel=TIGHT, abs=TIGHT), f"{name}; {say}"


METHOD_LEVELS = [(method, level) for method, row in tables.METHODS.items() for level in row.levels]


@pytest.mark.parametrize(("method", "level"), METHOD_LEVELS, ids=["-".join(pair) for pair in METHOD_LEVELS])
def test_against_autograd(method: str, level: str) -> None:
    assert method in reference.METHODS, f"{method}: write its restatement into tests/reference.py"
    row = tables.METHODS[method]
    assert reference.METHODS[method][:2] == (row.surrogate, row.aggregation)
    # grpo and dapo are one loss with two aggregations: the second of a kind takes every fourth setting
    first = next(
        pair for pair in METHOD_LEVELS if tables.METHODS[pair[0]].surrogate == row.surrogate and pair[1] == level
    )
    step = 1 if TURNS > 1 or first == (method, level) else 4
    for i, options in enumerate(itertools.islice(combinations(method, level, TURNS), 0, None, step)):
        which = i % len(BATCHES)
        batch = poisoned(BATCHES[which], i) if options["use_mask"] else BATCHES[which]
        check(batch, options, f"batch {which}")


@pytest.mark.parametrize("method", tables.METHODS)
def test_defaults_against_autograd(method: str) -> None:
    # nothing but the loss type (and what one of them has no default for), on larger ragged batches
    batch = random_batch(13, [257, 0, 64, 17, 511, 1, 130], holes=0.1)
    options = {"loss_type": method, **of_method(method, "token", SELECTED)[0]}
    if tables.METHODS[method].aggregation == "seq-mean-token-sum-norm":
        options["max_completion_length"] = 600.0
    for advantage in ADVANTAGES:
        full = {**options, "advantage": advantage}
        moved = away_from_kinks(batch, **kinks(full), level=tables.METHODS[method].levels[0])
        check(moved, full, "defaults")


def test_kl_against_autograd(backend: str) -> None:
    rng = np.random.default_rng(14)
    for scale in (1e-6, 1e-3, 0.3, 3.0, 30.0):
        logp = -rng.exponential(1.0, 40)
        ref = logp + scale * rng.standard_normal(40)
        for name in (name + plus for name in tables.KL_ESTIMATORS for plus in ("", "+")):
            for clamps in (
                {},
                {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0},
                {"kl_clamp_in": 0.3},
                {"kl_clamp_out": 0.02},
            ):
                tensor = torch.from_numpy(logp).requires_grad_()
                value = reference.kl_term(
                    tensor, torch.from_numpy(ref), name, clamps.get("kl_clamp_in"), clamps.get("kl_clamp_out")
                )
                (slope,) = torch.autograd.grad(value.sum(), tensor)
                got_value, got_slope = gf.kl(logp, ref, kl_estimator=name, **clamps, backend=backend)
                say = f"{name} {clamps} {scale}"
                np.testing.assert_allclose(got_value, value.detach().numpy(), rtol=TIGHT, atol=1e-15, err_msg=say)
                np.testing.assert_allclose(got_slope, slope.numpy(), rtol=TIGHT, atol=1e-15, err_msg=say)
