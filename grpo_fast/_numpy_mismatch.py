"""The oracle of two log-probs of the same tokens: plain NumPy, one completion at a time, always in float64.

``_contract.py`` says what the three functions compute; the policy in training is ``a``, the engine that sampled ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from . import _contract as c
from ._contract import Double, Int, Real
from ._numpy_parts import Bool, _counted, _exp, _exp_minus_1_minus, _narrow

Mask = npt.NDArray[np.uint8]
_BOUND = c.EXP_BOUND[np.dtype(np.float64)]


def mismatch(
    a: Real, b: Real, mask: Mask | None, start: Int, stop: Int, clamp: float, out: Double, n_threads: int = 1
) -> None:
    """The row of ``MISMATCH`` of every completion."""
    with np.errstate(all="ignore"):
        for i, (_, _, own, other) in enumerate(_completions(a, b, mask, start, stop)):
            out[i] = _row(own, other, clamp)


def _row(a: Double, b: Double, clamp: float) -> list[float]:
    x = _log_ratio(a, b)
    y = np.clip(x, -clamp, clamp)
    k2, k3 = STATISTICS[c.STATISTIC_K2](y), STATISTICS[c.STATISTIC_K3](y)
    unscored = np.isnan(b)
    unusable = ~(np.abs(a) <= c.LARGEST) | ~((np.abs(b) <= c.LARGEST) | unscored)
    columns = {
        "tokens": len(x),
        "unscored": unscored.sum(),
        "log_ratio": x.sum(),
        "log_ratio_abs": np.abs(x).sum(),
        "log_ratio_min": x.min(initial=np.inf),
        "log_ratio_max": x.max(initial=-np.inf),
        "ratio": _exp(y, _BOUND).sum(),
        "ratio_sq": _exp(2 * y, _BOUND).sum(),
        "k2": k2.sum(),
        "k2_max": k2.max(initial=0.0),
        "k3": k3.sum(),
        "k3_max": k3.max(initial=0.0),
        "non_finite": unusable.sum(),
    }
    return [columns[name] for name in c.MISMATCH]


def mismatch_weights(
    a: Real,
    b: Real,
    mask: Mask | None,
    start: Int,
    stop: Int,
    clamp: float,
    low: float,
    high: float,
    outside: int,
    out: Real,
    n_threads: int = 1,
) -> None:
    """The ratio of every counted token, held in the range or 0 outside of it."""
    with np.errstate(all="ignore"):
        for slots, counted, own, other in _completions(a, b, mask, start, stop):
            ratio = _exp(np.clip(_log_ratio(own, other), -clamp, clamp), _BOUND)
            inside = (low <= ratio) & (ratio <= high)
            weights = np.zeros(len(counted))
            weights[counted] = np.clip(ratio, low, high) if outside == c.OUTSIDE_CLIP else np.where(inside, ratio, 0.0)
            out[slots] = _narrow(weights, out.dtype)


def mismatch_keep(
    a: Real,
    b: Real,
    mask: Mask | None,
    start: Int,
    stop: Int,
    clamp: float,
    statistic: int,
    low: float,
    high: float,
    keep: Mask,
    n_threads: int = 1,
) -> None:
    """1 where a token counts and its statistic is in the range, ends included."""
    with np.errstate(all="ignore"):
        for slots, counted, own, other in _completions(a, b, mask, start, stop):
            value = STATISTICS[statistic](np.clip(_log_ratio(own, other), -clamp, clamp))
            flags = np.zeros(len(counted), np.uint8)
            flags[counted] = (low <= value) & (value <= high)
            keep[slots] = flags


#: Of y, the log-ratio that was held in +-clamp.
STATISTICS: dict[int, Callable[[Double], Double]] = {
    c.STATISTIC_LOG_RATIO: lambda y: y,
    c.STATISTIC_K2: lambda y: y * y / 2,
    c.STATISTIC_K3: lambda y: _exp_minus_1_minus(y, _BOUND),
}


def _completions(
    a: Real, b: Real, mask: Mask | None, start: Int, stop: Int
) -> Iterator[tuple[slice, Bool, Double, Double]]:
    """The slots of every completion, which of them count, and the two log-probs where they do."""
    for first, last in zip(start, stop, strict=True):
        slots, counted = slice(first, last), _counted(mask, first, last)
        yield slots, counted, a[slots][counted].astype(np.float64), b[slots][counted].astype(np.float64)


def _log_ratio(a: Double, b: Double) -> Double:
    """a - b, and 0 where b is unknown."""
    return np.where(np.isnan(b), 0.0, a - b)
