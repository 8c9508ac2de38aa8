"""What the backends compute of tokens and of no loss: recursions, moments, and two log-probs that are apart.

The references below are sums written out, of Python floats, one counted token at a time: none runs along the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from grpo_fast import _backends
from grpo_fast import _contract as c

#: Around every boundary the loops have: lanes, blocks, empty, and longer than what threads share.
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 255, 256, 257, 300, 511, 513)
LONG = (16385, 0, 3, 20000, 1)
BOUND = c.EXP_BOUND[np.dtype(np.float64)]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
SEEDS = pytest.mark.parametrize("seed", range(4))
UNTOUCHED = 7.5
POISON = (np.nan, np.inf, -np.inf, 3e38)


def _variants() -> list[str]:
    native = _backends.get("cython").isas() if _backends.why_not("cython") is None else []
    return [*(f"cython/{isa}" for isa in native), *(name for name in _backends.NAMES if name != "cython" or not native)]


@pytest.fixture(params=_variants())
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    name, _, isa = request.param.partition("/")
    reason = _backends.why_not(name)
    if reason is not None:
        pytest.skip(reason)
    module = _backends.get(name)
    before = module.isa() if isa else None
    if isa:
        module.select_isa(isa)
    yield module
    if isa:
        module.select_isa(before)


class Layout(NamedTuple):
    """Completions in shuffled ranges with gaps between them, and which of their tokens count."""

    start: np.ndarray
    stop: np.ndarray
    mask: np.ndarray | None
    counted: np.ndarray  # (n_tokens,) bool: of a completion, and not masked
    owned: np.ndarray

    def tokens(self, i: int) -> np.ndarray:
        """Slots of the tokens of completion i that count."""
        slots = np.arange(self.start[i], self.stop[i])
        return slots[self.counted[slots]]


def layout(rng: np.random.Generator, lengths: tuple[int, ...] = LENGTHS, masked: bool = True) -> Layout:
    start = np.zeros(len(lengths), np.int64)
    end = 3
    for i in rng.permutation(len(lengths)):
        start[i] = end
        end += lengths[i] + int(rng.integers(0, 5))
    stop = start + np.array(lengths, np.int64)
    owned = np.zeros(end + 2, bool)
    for a, b in zip(start, stop, strict=True):
        owned[a:b] = True
    holes = rng.random(end + 2) < 0.3
    for i in rng.choice(len(lengths), min(len(lengths), 2), replace=False):
        holes[start[i] : stop[i]] = True  # nothing counts
    # any byte that is not zero counts
    mask = np.where(holes, 0, rng.integers(1, 256, len(owned))).astype(np.uint8) if masked else None
    return Layout(start, stop, mask, owned & ~holes if masked else owned, owned)


def poisoned(rng: np.random.Generator, where: Layout, values: np.ndarray, dtype: Any) -> np.ndarray:
    """The values where they count; elsewhere what must not be read into anything."""
    out = values.astype(dtype)
    bad = ~where.counted
    out[bad] = rng.choice(POISON, int(bad.sum())).astype(dtype)
    return out


def per_token(where: Layout, dtype: Any) -> np.ndarray:
    return np.full(len(where.owned), UNTOUCHED, dtype)


def threaded(kernels: Any, function: str, out: np.ndarray, *arguments: Any) -> np.ndarray:
    """Runs the function into ``out``; where it takes threads, any number of them fills in the same bits."""
    getattr(kernels, function)(*arguments, out)
    for n_threads in (2, 3):
        again = np.full_like(out, UNTOUCHED if out.ndim == 1 else np.nan)
        getattr(kernels, function)(*arguments, again, n_threads)
        np.testing.assert_array_equal(again.view(np.uint8), out.view(np.uint8))
    return out


def check_tokens(where: Layout, got: np.ndarray, exact: np.ndarray, scale: np.ndarray | float, dtype: Any) -> None:
    """Counted tokens to 1e-12 of the scale and a rounding to the dtype; 0 on masked ones, nothing on slots of nobody."""
    assert (got[~where.owned] == UNTOUCHED).all()
    assert (got[where.owned & ~where.counted] == 0).all()
    largest = float(np.finfo(dtype).max)
    want = np.clip(exact, -largest, largest)[where.counted]
    bound = 1e-12 * np.broadcast_to(scale, exact.shape)[where.counted] + np.finfo(dtype).eps * np.abs(want)
    error = np.abs(got[where.counted].astype(np.float64) - want)
    assert (error <= bound + np.finfo(dtype).tiny).all(), f"off by {error.max()}, {(error / (bound + 1e-300)).max()} x"


# ---- returns and advantages along tokens -------------------------------------------------------------


def discounted(where: Layout, delta: np.ndarray, size: np.ndarray, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """sum_l decay^l delta_{t+l} over the counted tokens from t on, and the same of the sizes."""
    sums, scale = np.zeros(len(delta)), np.zeros(len(delta))
    for i in range(len(where.start)):
        slots = where.tokens(i)
        for k, t in enumerate(slots):
            powers = decay ** np.arange(len(slots) - k)
            sums[t] = math.fsum(powers * delta[slots[k:]])
            scale[t] = math.fsum(powers * size[slots[k:]])
    return sums, scale


@SEEDS
@DTYPES
def test_gae(kernels: Any, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng([1, seed])
    for given in range(8):
        where = layout(rng, masked=bool(rng.random() < 0.7))
        n, rows = len(where.owned), len(where.start)
        gamma, lam = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.97)][int(rng.integers(4))]
        other = rng.choice([np.float32, np.float64])
        rewards = poisoned(rng, where, rng.normal(0, 1, n), dtype) if given & 1 else None
        values = poisoned(rng, where, rng.normal(0, 1, n), other) if given & 2 else None
        final = rng.normal(0, 3, rows) if given & 4 else None
        delta, size = np.zeros(n), np.zeros(n)
        for i in range(rows):
            slots = where.tokens(i)
            for t, following in zip(slots, [*slots[1:], None], strict=False):
                terms = [float(rewards[t]) if rewards is not None else 0.0]
                terms += [float(final[i])] if final is not None and following is None else []
                if values is not None:
                    terms += [gamma * float(values[following]) if following is not None else 0.0, -float(values[t])]
                delta[t], size[t] = math.fsum(terms), math.fsum(map(abs, terms))
        exact, scale = discounted(where, delta, size, gamma * lam)
        ranges = (where.mask, where.start, where.stop)
        got = threaded(kernels, "token_gae", per_token(where, dtype), rewards, final, values, *ranges, gamma, lam)
        check_tokens(where, got, exact, scale, dtype)


def test_gae_by_hand(kernels: Any) -> None:
    """Two completions in one buffer, the last token of the first and the middle one of the second masked."""
    rewards = np.array([1.0, 2.0, np.nan, 3.0, np.nan, 5.0])
    values = np.array([0.5, 0.25, np.inf, 1.0, np.nan, -1.0])
    mask = np.array([1, 1, 0, 1, 0, 1], np.uint8)
    out = np.full(6, UNTOUCHED)
    start, stop = np.array([0, 3]), np.array([3, 6])
    kernels.token_gae(rewards, np.array([8.0, 0.0]), values, mask, start, stop, 0.5, 0.5, out)
    # 2 + 8 - 0.25; 1 + 0.5 * 0.25 - 0.5 + 0.25 * 9.75; 5 + 1; 3 - 0.5 - 1 + 0.25 * 6
    assert out.tolist() == [3.0625, 9.75, 0.0, 3.0, 0.0, 6.0]


def test_gae_saturates_in_float32(kernels: Any) -> None:
    rewards = np.full(300, 3e38, np.float32)
    for sign in (1, -1):
        for out in (np.zeros(300, np.float32), np.zeros(300)):
            kernels.token_gae(
                np.float32(sign) * rewards, None, None, None, np.array([0]), np.array([300]), 1.0, 1.0, out
            )
            assert np.isfinite(out).all()
            assert out[0] == (sign * np.finfo(np.float32).max if out.dtype == np.float32 else out[0])
            assert out.dtype == np.float32 or abs(out[0]) == pytest.approx(9e40)


# ---- moments and the affine map ----------------------------------------------------------------------


@SEEDS
@DTYPES
def test_moments(kernels: Any, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng([2, seed])
    for centre in (0.0, 0.7, -1e3):
        where = layout(rng, masked=bool(rng.random() < 0.7))
        values = poisoned(rng, where, rng.normal(0.5, 2, len(where.owned)), dtype)
        out = np.full((len(where.start), 3), np.nan)
        threaded(kernels, "token_moments", out, values, where.mask, where.start, where.stop, centre)
        for i, (count, first, second) in enumerate(out):
            deviations = values[where.tokens(i)].astype(np.float64) - centre
            assert count == len(deviations)
            assert abs(first - math.fsum(deviations)) <= 1e-12 * math.fsum(np.abs(deviations))
            assert abs(second - math.fsum(deviations**2)) <= 1e-12 * math.fsum(deviations**2)


@SEEDS
@DTYPES
def test_affine(kernels: Any, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng([3, seed])
    where = layout(rng, masked=seed % 2 == 0)
    shift, scale = 0.3, -1.7
    for source in (np.float32, np.float64):
        values = poisoned(rng, where, rng.normal(0, 1, len(where.owned)), source)
        exact = (values.astype(np.float64) - shift) * scale
        terms = (np.abs(values.astype(np.float64)) + abs(shift)) * abs(scale)
        arguments = (where.mask, where.start, where.stop, shift, scale)
        got = threaded(kernels, "token_affine", per_token(where, dtype), values, *arguments)
        check_tokens(where, got, exact, terms, dtype)
        if source == dtype:  # in place
            values[~where.owned] = UNTOUCHED
            kernels.token_affine(values, *arguments, values)
            np.testing.assert_array_equal(values, got)


def test_affine_saturates(kernels: Any) -> None:
    values, out = np.array([1.0, -1.0, 1e300, -1e300, 2.0]), np.zeros(5, np.float32)
    largest = float(np.finfo(np.float32).max)
    kernels.token_affine(values, None, np.array([0]), np.array([4]), 0.0, 1e30, out)
    np.testing.assert_allclose(out, [1e30, -1e30, largest, -largest, 0.0], rtol=1e-7)
    kernels.token_affine(values, None, np.array([0]), np.array([4]), 0.0, 1e30, values)
    np.testing.assert_array_equal(values, [1e30, -1e30, np.finfo(float).max, -np.finfo(float).max, 2.0])


# ---- two log-probs of the same tokens ----------------------------------------------------------------


def exp(x: float) -> float:
    return math.exp(min(max(x, -BOUND), BOUND))


def k3(y: float) -> float:
    if abs(y) > 0.5:
        return math.expm1(min(max(y, -BOUND), BOUND)) - y
    return math.fsum(y**n / math.factorial(n) for n in range(2, 20))


def log_ratios(where: Layout, a: np.ndarray, b: np.ndarray, i: int) -> list[float]:
    return [0.0 if math.isnan(b[t]) else float(a[t]) - float(b[t]) for t in where.tokens(i)]


def pair(rng: np.random.Generator, where: Layout, dtype: Any, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs some of which the other side did not score."""
    n = len(where.owned)
    logp = -rng.exponential(1.0, n)
    other = np.where(rng.random(n) < 0.1, np.nan, logp - rng.normal(0, spread, n))
    kinds = rng.permutation([dtype, rng.choice([np.float32, np.float64])])
    return poisoned(rng, where, logp, kinds[0]), poisoned(rng, where, other, kinds[1])


CASES = pytest.mark.parametrize(
    ("spread", "clamp"),
    [(0.02, math.inf), (0.3, 0.25), (3.0, 20.0), (200.0, math.inf), (200.0, 20.0), (400.0, 350.0), (0.3, 0.0)],
)


@CASES
@DTYPES
def test_mismatch(kernels: Any, dtype: Any, spread: float, clamp: float) -> None:
    rng = np.random.default_rng(4)
    for masked in (True, False):
        where = layout(rng, masked=masked)
        a, b = pair(rng, where, dtype, spread)
        out = np.full((len(where.start), len(c.MISMATCH)), np.nan)
        threaded(kernels, "mismatch", out, a, b, where.mask, where.start, where.stop, clamp)
        for i, row in enumerate(out):
            x = log_ratios(where, a, b, i)
            y = [min(max(value, -clamp), clamp) for value in x]
            exact = {
                "tokens": float(len(x)),
                "unscored": float(sum(math.isnan(b[t]) for t in where.tokens(i))),
                "log_ratio": math.fsum(x),
                "log_ratio_abs": math.fsum(map(abs, x)),
                "log_ratio_min": min(x, default=math.inf),
                "log_ratio_max": max(x, default=-math.inf),
                "ratio": math.fsum(map(exp, y)),
                "ratio_sq": math.fsum(exp(2 * value) for value in y),
                "k2": math.fsum(value * value / 2 for value in y),
                "k2_max": max((value * value / 2 for value in y), default=0.0),
                "k3": math.fsum(map(k3, y)),
                "k3_max": max(map(k3, y), default=0.0),
                "non_finite": 0.0,
            }
            assert tuple(exact) == c.MISMATCH
            for name, got in zip(exact, row, strict=True):
                if name in ("tokens", "unscored", "log_ratio_min", "log_ratio_max", "non_finite"):
                    assert got == exact[name], name
                else:  # only the first is a sum of terms of both signs
                    scale = exact["log_ratio_abs"] if name == "log_ratio" else exact[name]
                    assert abs(got - exact[name]) <= 1e-12 * scale, f"{name}: {got} and not {exact[name]}"


@CASES
@DTYPES
def test_mismatch_weights(kernels: Any, dtype: Any, spread: float, clamp: float) -> None:
    rng = np.random.default_rng(5)
    for low, high, outside in [
        (0.0, 2.0, c.OUTSIDE_CLIP),
        (0.5, 2.0, c.OUTSIDE_ZERO),
        (0.9, math.inf, c.OUTSIDE_CLIP),
        (0.0, math.inf, c.OUTSIDE_ZERO),
        (1.5, 3.0, c.OUTSIDE_ZERO),
    ]:
        where = layout(rng, masked=bool(rng.random() < 0.7))
        a, b = pair(rng, where, dtype, spread)
        exact = np.zeros(len(where.owned))
        for i in range(len(where.start)):
            for t, x in zip(where.tokens(i), log_ratios(where, a, b, i), strict=True):
                w = exp(min(max(x, -clamp), clamp))
                exact[t] = min(max(w, low), high) if outside == c.OUTSIDE_CLIP else w if low <= w <= high else 0.0
        ranges = (where.mask, where.start, where.stop)
        got = threaded(kernels, "mismatch_weights", per_token(where, dtype), a, b, *ranges, clamp, low, high, outside)
        check_tokens(where, got, exact, exact, dtype)


@CASES
@DTYPES
@pytest.mark.parametrize(
    ("statistic", "low", "high"),
    [
        (c.STATISTIC_LOG_RATIO, -0.21, 0.13),
        (c.STATISTIC_LOG_RATIO, -math.inf, 0.4),
        (c.STATISTIC_K2, -math.inf, 0.011),
        (c.STATISTIC_K2, 1e-5, 5.0),
        (c.STATISTIC_K3, -math.inf, 0.013),
        (c.STATISTIC_K3, 1e-4, math.inf),
    ],
)
def test_mismatch_keep(
    kernels: Any, dtype: Any, spread: float, clamp: float, statistic: int, low: float, high: float
) -> None:
    rng = np.random.default_rng(6)
    of: Callable[[float], float] = {
        c.STATISTIC_LOG_RATIO: lambda y: y,
        c.STATISTIC_K2: lambda y: y * y / 2,
        c.STATISTIC_K3: k3,
    }[statistic]
    for masked in (True, False):
        where = layout(rng, masked=masked)
        a, b = pair(rng, where, dtype, spread)
        exact = np.where(where.owned, 0, 7).astype(np.uint8)
        for i in range(len(where.start)):
            for t, x in zip(where.tokens(i), log_ratios(where, a, b, i), strict=True):
                exact[t] = low <= of(min(max(x, -clamp), clamp)) <= high
        keep = np.full(len(where.owned), 7, np.uint8)
        kernels.mismatch_keep(a, b, where.mask, where.start, where.stop, clamp, statistic, low, high, keep)
        np.testing.assert_array_equal(keep, exact)


@DTYPES
def test_bounds_are_kept(kernels: Any, dtype: Any) -> None:
    """Both ends belong to the range, for statistics that floats hold exactly."""
    a, b = np.array([0.0, -0.5, -1.0, -0.5, -0.25], dtype), np.array([-0.5, 0.0, 0.0, -0.5, np.nan], dtype)
    keep = np.zeros(5, np.uint8)
    for statistic, low, high, exact in [
        (c.STATISTIC_LOG_RATIO, -0.5, 0.5, [1, 1, 0, 1, 1]),
        (c.STATISTIC_LOG_RATIO, 0.0, 0.0, [0, 0, 0, 1, 1]),
        (c.STATISTIC_K2, 0.125, 0.5, [1, 1, 1, 0, 0]),
        (c.STATISTIC_K3, 0.0, 0.0, [0, 0, 0, 1, 1]),
    ]:
        kernels.mismatch_keep(a, b, None, np.array([0]), np.array([5]), np.inf, statistic, low, high, keep)
        assert keep.tolist() == exact
    out = np.zeros(5, dtype)
    kernels.mismatch_weights(a, b, None, np.array([0]), np.array([5]), np.inf, 1.0, 1.0, c.OUTSIDE_ZERO, out)
    assert out.tolist() == [0, 0, 0, 1, 1]


@DTYPES
def test_what_is_not_finite_is_counted(kernels: Any, dtype: Any) -> None:
    huge = 1e60 if dtype == np.float64 else np.inf
    a = np.array([-1.0, np.nan, -1.0, np.inf, -huge, np.nan, -1.0, np.nan], dtype)
    b = np.array([-1.0, -1.0, np.nan, -1.0, -1.0, np.nan, huge, np.inf], dtype)
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.uint8)
    out = np.zeros((2, len(c.MISMATCH)))
    kernels.mismatch(a, b, mask, np.array([0, 7]), np.array([7, 8]), np.inf, out)
    assert out[:, c.MISMATCH.index("non_finite")].tolist() == [5, 0]
    assert out[:, c.MISMATCH.index("unscored")].tolist() == [2, 0]


# ---- all of them -------------------------------------------------------------------------------------


def results(kernels: Any, where: Layout, arrays: dict[str, np.ndarray], final: np.ndarray) -> dict[str, np.ndarray]:
    rows, ranges = len(where.start), (where.mask, where.start, where.stop)
    a, b, values = arrays["a"], arrays["b"], arrays["values"]
    tables = {"token_moments": np.full((rows, 3), np.nan), "mismatch": np.full((rows, len(c.MISMATCH)), np.nan)}
    tokens = {name: per_token(where, np.float32) for name in ("token_gae", "token_affine", "mismatch_weights")}
    keep = np.full(len(where.owned), 7, np.uint8)
    threaded(kernels, "token_moments", tables["token_moments"], values, *ranges, 0.25)
    threaded(kernels, "mismatch", tables["mismatch"], a, b, *ranges, 5.0)
    threaded(kernels, "token_gae", tokens["token_gae"], values, final, a, *ranges, 0.99, 0.95)
    threaded(kernels, "token_affine", tokens["token_affine"], values, *ranges, 0.25, 3.0)
    threaded(kernels, "mismatch_weights", tokens["mismatch_weights"], a, b, *ranges, 5.0, 0.5, 2.0, c.OUTSIDE_CLIP)
    kernels.mismatch_keep(a, b, *ranges, 5.0, c.STATISTIC_K3, 0.0, 0.01, keep)
    return tables | tokens | {"mismatch_keep": keep}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "all"])
def test_place_and_order_change_no_bit(kernels: Any, masked: bool) -> None:
    """The same completions elsewhere in another buffer, long ones among them."""
    rng = np.random.default_rng(8)
    here, there = layout(rng, LONG, masked), layout(rng, LONG, masked)
    n = max(len(here.owned), len(there.owned))
    drawn = {name: rng.normal(-1, 0.2, n).astype(np.float32) for name in ("a", "b", "values")}
    moved = {name: np.full(n, np.nan, np.float32) for name in drawn}
    if here.mask is not None and there.mask is not None:
        for (a, b), (x, y) in zip(
            zip(here.start, here.stop, strict=True), zip(there.start, there.stop, strict=True), strict=True
        ):
            there.mask[x:y] = here.mask[a:b]
    for name, array in moved.items():
        for a, x, length in zip(here.start, there.start, here.stop - here.start, strict=True):
            array[x : x + length] = drawn[name][a : a + length]
    final = rng.normal(0, 1, len(LONG))
    first, second = results(kernels, here, drawn, final), results(kernels, there, moved, final)
    for name, result in first.items():
        if result.ndim == 2:
            np.testing.assert_array_equal(second[name], result, err_msg=name)
            continue
        for a, x, length in zip(here.start, there.start, here.stop - here.start, strict=True):
            np.testing.assert_array_equal(second[name][x : x + length], result[a : a + length], err_msg=name)


def test_nothing_to_do(kernels: Any) -> None:
    """No completions, and completions without tokens."""
    for rows in (0, 3):
        where = layout(np.random.default_rng(0), (0,) * rows)._replace(mask=None)
        none = np.zeros(0, np.float32)
        empty = Layout(np.zeros(rows, np.int64), np.zeros(rows, np.int64), None, np.zeros(0, bool), np.zeros(0, bool))
        for place, arrays in ((where, {name: np.zeros(len(where.owned)) for name in ("a", "b", "values")}),
                              (empty, {name: none for name in ("a", "b", "values")})):  # fmt: skip
            got = results(kernels, place, arrays, np.zeros(rows))
            assert (got["token_moments"] == 0).all()
            row = [{"log_ratio_min": np.inf, "log_ratio_max": -np.inf}.get(name, 0.0) for name in c.MISMATCH]
            assert (got["mismatch"] == row).all()
            for name in ("token_gae", "token_affine", "mismatch_weights"):
                assert (got[name] == UNTOUCHED).all()
