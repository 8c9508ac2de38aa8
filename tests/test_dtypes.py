"""Precisions: float32 against float64, 16-bit input, and log-ratios far beyond what exp can hold."""

from __future__ import annotations

import itertools
from decimal import Decimal, localcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from batches import BACKENDS, BORDERS, Batch, arguments, away_from_kinks, cast, random_batch
from options import KL_CLAMPS, SELECTED, kinks, of_method

import grpo_fast as gf
from grpo_fast import tables

SINGLE = 2e-7


def run(batch: Batch, options: dict[str, Any], backend: str, **more: Any) -> Any:
    args, keywords = arguments(batch, options)
    return gf.grpo_loss(*args, **keywords, **more, backend=backend)


def settings(method: str, level: str) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"loss_type": method, "importance_sampling_level": level, "beta": 0.3}
    if tables.METHODS[method].aggregation == "seq-mean-token-sum-norm":
        base["max_completion_length"] = 100.0
    rows = [{**base, **setting} for setting in of_method(method, level, SELECTED)]
    base = rows[0]
    rows += [
        {**base, "kl_estimator": name + plus, **KL_CLAMPS[1]} for name in tables.KL_ESTIMATORS for plus in ("", "+")
    ]
    return rows + [{**base, "kl_ratio_factor": factor, "weight": "token"} for factor in tables.KL_RATIO_FACTORS]


METHOD_LEVELS = [(method, level) for method, row in tables.METHODS.items() for level in row.levels]


@pytest.mark.parametrize(("method", "level"), METHOD_LEVELS, ids=["-".join(pair) for pair in METHOD_LEVELS])
def test_single_precision(method: str, level: str) -> None:
    pytest.importorskip("torch")
    import reference

    lengths = [n for n in BORDERS if n < 300]
    for (seed, spread), options in itertools.product(((31, 0.01), (32, 0.3), (33, 3.0)), settings(method, level)):
        batch = random_batch(seed, lengths, dtype=np.float32, spread=spread, lead=3)
        data = away_from_kinks(batch, **kinks(options), level=level)
        exact = reference.evaluate(cast(data, np.float64), options, terms=True)
        logp, old, ref = (
            getattr(data, name)[data.counted].astype(np.float64) for name in ("logp", "old_logp", "ref_logp")
        )
        allowed = SINGLE * (1 + max(np.abs(logp - old).max(), np.abs(ref - logp).max()))
        # one gradient is one product of a few roundings, not a sum in which they average: twice the tolerance
        bound = 2 * allowed * exact.grad_terms + 1e-38
        for backend in BACKENDS:
            result = run(data, options, backend)
            assert abs(result.loss - exact.loss) <= allowed * exact.loss_terms, (backend, spread, options)
            off = np.abs(result.grad - exact.grad)
            worst = int(np.argmax(off - bound))
            assert off[worst] <= bound[worst], (backend, spread, options, worst, result.grad[worst], exact.grad[worst])
            assert result.grad.dtype == np.float32


@pytest.mark.parametrize(
    "d", [1e-6, 1e-4, 1e-3, 0.02, 0.4, 0.999, 1.001, 3.0, 20.0, -1e-5, -1e-3, -0.3, -0.999, -1.001, -8.0, -60.0]
)
def test_k3_keeps_its_digits(d: float, backend: str) -> None:
    for dtype, digits in ((np.float32, 1.2e-6), (np.float64, 2e-15)):
        logp = np.array([-0.25], dtype)  # a power of two, so that little is lost before the kernel
        ref = (logp + dtype(d)).astype(dtype)
        with localcontext() as context:
            context.prec = 60
            exact = Decimal(float(ref[0])) - Decimal(float(logp[0]))
            value, slope = float(exact.exp() - exact - 1), float(1 - exact.exp())
        got_value, got_slope = gf.kl(logp, ref, kl_estimator="k3", backend=backend)
        loss = gf.grpo_loss(logp, None, ref, [0.0], [0, 1], beta=1.0, backend=backend)
        for found, expected in (
            (got_value[0], value),
            (got_slope[0], slope),
            (loss.loss, value),
            (loss.grad[0], slope),
        ):
            assert float(found) == pytest.approx(expected, rel=digits * (1 + abs(d)), abs=0)


EXTREMES = (20.0, 80.0, 86.9, 87.1, 88.7, 100.0, 299.0, 301.0, 500.0, 709.0, 710.0, 1000.0)


def extreme_batch(dtype: Any, advantage: float) -> Batch:
    """Completions whose log-ratios and reference log-ratios reach +-1000, alone and next to ordinary tokens."""
    far = [sign * x for x in EXTREMES for sign in (1, -1)]
    batch = random_batch(41, [1] * len(far) + [3] * len(far), dtype=np.float64, holes=0.0)
    old, ref = batch.old_logp.copy(), batch.ref_logp.copy()
    slots = [*range(len(far)), *range(len(far) + 1, len(batch.logp), 3)]
    for slot, x in zip(slots, far * 2, strict=True):
        old[slot] = batch.logp[slot] - x
        ref[slot] = batch.logp[slot] + x
    return Batch(
        **{
            **{name: getattr(batch, name) for name in batch.__dataclass_fields__},
            **{
                name: value.astype(dtype)
                for name, value in (("logp", batch.logp), ("old_logp", old), ("ref_logp", ref))
            },
            "advantages": np.full(batch.rows, advantage),
        }
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("method", "level"), METHOD_LEVELS, ids=["-".join(pair) for pair in METHOD_LEVELS])
def test_extreme_ratios_stay_finite(method: str, level: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = None
    allowed = 1e-12 if dtype == np.float64 else SINGLE * 1001
    for advantage, options in itertools.product((-2.0, 0.0, 3.0, 1e4), settings(method, level)):
        batch = extreme_batch(dtype, advantage)
        if find_spec("torch") is not None:
            import reference

            monkeypatch.setattr(reference, "EXP_BOUND", 87.0 if dtype == np.float32 else 300.0)
            exact = reference.evaluate(cast(batch, np.float64), options, terms=True)
        for backend in BACKENDS:
            result = run(batch, options, backend)
            say = (backend, advantage, options)
            assert np.isfinite(result.loss), say
            assert np.isfinite(result.grad).all(), say
            assert np.isfinite(result.per_completion).all(), say
            assert all(np.isfinite(value) for value in result.metrics.values()), (*say, result.metrics)
            if exact is None:
                continue
            off = np.abs(result.per_completion - exact.per_completion)
            assert off.max() <= allowed * exact.loss_terms, say
            grad = np.clip(exact.grad, -np.finfo(dtype).max, np.finfo(dtype).max)
            bound = 2 * allowed * exact.grad_terms + 1e-38
            bound[exact.grad_terms > np.finfo(dtype).max] = (
                np.inf
            )  # a difference of two infinities, held: any number will do
            worst = int(np.argmax(np.abs(result.grad - grad) - bound))
            assert abs(result.grad[worst] - grad[worst]) <= bound[worst], (*say, worst, result.grad[worst], grad[worst])


def sixteen_bit() -> list[Any]:
    kinds: list[Any] = [np.float16]
    if find_spec("ml_dtypes") is not None:
        import ml_dtypes

        kinds.append(ml_dtypes.bfloat16)
    return kinds


@pytest.mark.parametrize("kind", sixteen_bit(), ids=lambda kind: np.dtype(kind).name)
def test_16_bit_input(kind: Any, backend: str) -> None:
    batch = random_batch(51, [17, 0, 40, 300], lead=2)
    narrow = cast(batch, kind)
    wide = cast(narrow, np.float32)  # exact
    for options in ({}, {"advantage": "token", "weight": "token"}, {"loss_type": "gspo"}, {"kl_estimator": "k1+"}):
        a, b = run(narrow, options, backend), run(wide, options, backend)
        assert a.loss == b.loss
        assert a.metrics == b.metrics
        assert a.grad.dtype == np.float32
        np.testing.assert_array_equal(a.grad, b.grad)
        c = run(narrow, options, backend, grad_dtype=kind)
        assert c.grad.dtype == kind
        np.testing.assert_array_equal(c.grad.astype(np.float32), b.grad.astype(kind).astype(np.float32))
        out = np.full(len(batch.logp), np.nan, kind)
        assert run(narrow, options, backend, grad_out=out).grad is out
        np.testing.assert_array_equal(out.astype(np.float32), c.grad.astype(np.float32))


@pytest.mark.parametrize("kind", [*sixteen_bit(), np.float32], ids=lambda kind: np.dtype(kind).name)
def test_narrow_gradients_saturate(kind: Any, backend: str) -> None:
    logp, old = np.array([-0.5, -0.5]), np.array([-110.5, -110.5])
    result = gf.grpo_loss(
        logp, old, None, [-1.0, 1.0], [0, 1, 2], loss_type="grpo", epsilon_high=1e49, grad_dtype=kind, backend=backend
    )
    grad = result.grad.astype(np.float64)
    assert np.isfinite(grad).all()
    largest = 3.3895313892515355e38 if np.dtype(kind).name == "bfloat16" else float(np.finfo(kind).max)
    np.testing.assert_array_equal(grad, [largest, -largest])


def test_mixed_precision_is_the_widest(backend: str) -> None:
    batch = random_batch(61, [5, 9, 300])
    for name in ("logp", "old_logp", "ref_logp"):
        mixed = cast(batch, np.float32)
        mixed = Batch(**{**mixed.__dict__, name: getattr(batch, name)})
        exact = cast(mixed, np.float64)
        a, b = run(mixed, {}, backend), run(exact, {}, backend)
        assert a.loss == b.loss, name
        assert a.grad.dtype == mixed.logp.dtype
        np.testing.assert_array_equal(a.grad, b.grad.astype(mixed.logp.dtype))


def test_kl_dtypes(backend: str) -> None:
    for kind in (np.float32, np.float64, *sixteen_bit()):
        value, slope = gf.kl(
            np.array([-1.0, -0.5], kind), np.array([-0.75, -1.0], kind), kl_estimator="k2", backend=backend
        )
        assert value.dtype == slope.dtype == (np.float64 if kind == np.float64 else np.float32)
        np.testing.assert_allclose(value, [0.03125, 0.125], rtol=1e-7)
        np.testing.assert_allclose(slope, [-0.25, 0.5], rtol=1e-7)


def test_byte_order_changes_nothing(backend: str) -> None:
    logp, ref = np.array([-0.1, -0.7, -1.3]), np.array([-0.2, -0.5, -1.2])
    swapped, swapped_ref = logp.astype(">f8"), ref.astype(">f8")
    native = gf.grpo_loss(logp, None, None, [0.3], [0, 3], backend=backend)
    result = gf.grpo_loss(swapped, None, None, [0.3], [0, 3], backend=backend)
    assert result.loss == native.loss  # and not that of float32
    assert result.grad.dtype == np.float64
    for a, b in zip(gf.kl(logp, ref, backend=backend), gf.kl(swapped, swapped_ref, backend=backend), strict=True):
        assert b.dtype == np.float64
        np.testing.assert_array_equal(a, b)
