"""What the parts of the oracle share: exp that saturates, selecting what counts, narrowing."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._contract import Double, Real

Bool: TypeAlias = npt.NDArray[np.bool_]

#: 2 / (k + 2)!, so that exp(d) - 1 - d = d^2/2 sum_k _TAIL[k] d^k; 18 terms reach 1e-18 at |d| = 1.
_TAIL = [2.0 / math.factorial(k + 2) for k in range(18)]


def _exp(x: Double, bound: float) -> Double:
    """exp, saturated: beyond +-bound it is exp(+-bound)."""
    return np.exp(np.clip(x, -bound, bound))


def _exp_minus_1_minus(d: Double, bound: float) -> Double:
    """exp(d) - 1 - d to a few ULP, for tiny d too; exp saturates, the linear term does not."""
    small = np.where(np.abs(d) < 1, d, 0.0)
    series = small * small / 2 * np.polynomial.polynomial.polyval(small, _TAIL)
    return np.where(np.abs(d) < 1, series, np.expm1(np.clip(d, -bound, bound)) - d)


def _counted(mask: npt.NDArray[np.uint8] | None, start: int, stop: int) -> Bool:
    return np.ones(stop - start, np.bool_) if mask is None else mask[start:stop] != 0


def _narrow(values: Double, dtype: np.dtype[np.floating]) -> Real:
    """As ``dtype``, saturated at its largest finite number."""
    largest = float(np.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype)
