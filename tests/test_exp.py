"""The exp of the kernels: how many ULP it is off, over its whole range, and what it does at the ends."""

from __future__ import annotations

import platform
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from grpo_fast._contract import EXP_BOUND

numba = pytest.importorskip("numba")

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def exp(x: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp(x), exp(x) - 1 and exp(x) - 1 - x of the Numba backend."""
    from grpo_fast._numba_exp import exp32, exp64

    scalar = exp32 if dtype == np.float32 else exp64

    @numba.njit
    def loop(x: Any, bound: Any, out: Any) -> None:
        for t in range(x.size):
            out[0, t], out[1, t], out[2, t] = scalar(x[t], bound)

    x = np.ascontiguousarray(np.atleast_1d(x), dtype)
    out = np.empty((3, x.size), dtype)
    loop(x, dtype(EXP_BOUND[np.dtype(dtype)]), out)
    return out[0], out[1], out[2]


def samples(dtype: Any, n: int) -> np.ndarray:
    """Every scale on both sides of 0, the inner interval, its ends, and the whole range."""
    rng = np.random.default_rng(0)
    bound = EXP_BOUND[np.dtype(dtype)]
    parts = [
        rng.uniform(-bound, bound, n),
        rng.uniform(-1, 1, n),
        rng.choice([-1.0, 1.0], n) * np.exp(rng.uniform(-40, np.log(bound), n)),
        *(np.linspace(edge - 1e-3, edge + 1e-3, n // 10) for edge in (-1.0, 1.0, -0.5 * np.log(2), 0.5 * np.log(2))),
    ]
    return np.concatenate(parts).astype(dtype)


def errors(got: np.ndarray, exact: list[Decimal]) -> np.ndarray:
    """|got - exact| in ULP of the exact result."""
    ulp = np.spacing(np.abs(np.array([float(e) for e in exact], got.dtype)))
    pairs = zip(got.tolist(), exact, ulp.tolist(), strict=True)
    return np.array([float(abs(Decimal(g) - e) / Decimal(u)) for g, e, u in pairs])


def test_float32_over_the_range() -> None:
    bits = np.arange(0, np.float32(87).view(np.int32) + 1, 397, dtype=np.int32)
    for sign in (1, -1):
        x = np.float32(sign) * bits.view(np.float32)
        exact = np.exp(x.astype(np.float64))
        ulp = np.abs(exp(x, np.float32)[0] - exact) / np.spacing(exact.astype(np.float32))
        assert ulp.max() < (1.0 if sign > 0 else 2.6)


@DTYPES
def test_ulp(dtype: Any) -> None:
    x = samples(dtype, 1000)
    with localcontext() as context:
        context.prec = 60
        numbers = [Decimal(float(value)) for value in x]
        exponentials = [value.exp() for value in numbers]
        e, minus_1, tail = exp(x, dtype)
        assert errors(e, exponentials).max() < 2.6
        assert errors(minus_1, [y - 1 for y in exponentials]).max() < 2.5
        kept = np.abs(x) > 1e-15  # beyond, 60 digits are not enough
        tails = [y - 1 - value for y, value, keep in zip(exponentials, numbers, kept, strict=True) if keep]
        assert errors(tail[kept], tails).max() < 5


@DTYPES
def test_exact_at_zero_and_saturated_at_the_ends(dtype: Any) -> None:
    bound = EXP_BOUND[np.dtype(dtype)]
    assert [part.tolist() for part in exp([0.0, -0.0], dtype)] == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    e, minus_1, tail = exp([bound, -bound, 2 * bound, -2 * bound, np.inf, -np.inf], dtype)
    assert e[2] == e[4] == e[0]
    assert e[3] == e[5] == e[1] > 0
    assert np.isfinite(e).all() and (minus_1 == e - 1).all()
    assert tail[3] == -1 + 2 * bound  # the linear term does not saturate
    assert tail[4] == -np.inf and tail[5] == np.inf


@DTYPES
def test_nan_stays_nan(dtype: Any) -> None:
    assert np.isnan(exp([np.nan], dtype)).all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks at x86 registers")
@DTYPES
def test_vectorised(dtype: Any) -> None:
    from grpo_fast import _numba_loops

    @numba.njit(_nrt=False)
    def stage(s: Any) -> Any:
        return _numba_loops.exp_stage(s, np.uint64(256), 80.0)

    stage(np.zeros(256 * 12, dtype))
    (assembly,) = stage.inspect_asm().values()
    if "vmulss" not in assembly and "ymm" not in assembly and "zmm" not in assembly:
        pytest.skip("no AVX here")
    assert max(assembly.count("ymm"), assembly.count("zmm")) > 50
