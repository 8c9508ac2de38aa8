"""Two log-probs of the same tokens, validated and compared: what corrections and diagnostics are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends, _threads
from . import _contract as c
from . import _validate as check
from ._contract import LARGEST, Double, Int, Real
from .losses import Ranges

Mask = npt.NDArray[np.uint8]
_COLUMN = {name: k for k, name in enumerate(c.MISMATCH)}
BOUND = c.EXP_BOUND[np.dtype(np.float64)]


class Mismatch:
    """x = a - b on the counted tokens; ``a`` of the policy in training, ``b`` of the engine that sampled.

    ``names`` are the two arguments as the caller knows them. ``counts`` and the columns are per completion.
    """

    def __init__(
        self,
        names: tuple[str, str],
        ranges: Ranges,
        a: npt.NDArray[Any],
        b: npt.ArrayLike,
        *,
        mask: npt.ArrayLike | None,
        clamp: float,
        unscored: str = "one",
        backend: str | None = None,
    ) -> None:
        self.kernels = _backends.get(backend)
        self.ranges = ranges
        other = check.log_probs(names[1], b)
        check.length(names[1], other, ranges.n_slots, f"token of {names[0]}")
        self.a, self.b = check.kernel_ready(a), check.kernel_ready(other)
        self.mask: Mask | None = None if mask is None else check.mask("mask", mask, ranges.n_slots)
        self.clamp = clamp
        #: Of the results: that of the log-probs, float32 for 16-bit ones.
        self.dtype = np.dtype(np.float64 if np.float64 in (self.a.dtype, self.b.dtype) else np.float32)
        self.table = np.empty((len(ranges.start), len(c.MISMATCH)))
        self._call("mismatch", clamp, self.table)
        if self["non_finite"].any():
            self._raise_non_finite(names)
        if unscored == "error" and self["unscored"].any():
            at = self._first(np.isnan(self.b))
            raise ValueError(
                f"{names[1]}: {names[1]}[{at}]=nan was not scored; mask that token, or pass unscored='one', "
                "which corrects nothing there"
            )
        self.counts: Int = self["tokens"].astype(np.int64)
        if not self.counts.any():
            raise ValueError("mask: no token counts, so there is nothing to compare; drop the batch or check the mask")
        #: Completions with counted tokens.
        self.filled = self.counts > 0

    def __getitem__(self, name: str) -> Double:
        """A column of :data:`grpo_fast._contract.MISMATCH`."""
        return self.table[:, _COLUMN[name]]

    def total(self, *columns: Double) -> list[float]:
        """The exact sum of each of these columns over the completions."""
        return [float(v) for v in self.kernels.sum_columns(np.ascontiguousarray(np.stack(columns, axis=1)))]

    def held_log_ratio(self) -> Double:
        """Sum over tokens of the log-ratio held in +-clamp."""
        total = self["log_ratio"].copy()
        beyond = (self["log_ratio_min"] < -self.clamp) | (self["log_ratio_max"] > self.clamp)
        for i in np.flatnonzero(beyond):  # outliers only
            x = self.log_ratios(np.array([i]))
            total[i] = np.clip(x, -self.clamp, self.clamp).sum()
        return total

    def sequence_log_ratio(self, kind: str) -> Double:
        """log R_i, held in +-clamp; 0 without counted tokens."""
        x = self["log_ratio"] / (1 if kind == "product" else np.maximum(self.counts, 1))
        limit = min(self.clamp, BOUND)
        return np.clip(x, -limit, limit)

    def log_ratios(self, rows: Int | None = None) -> Double:
        """x of the counted tokens of these completions, one after the other, not held."""
        slots, _ = self.slots(rows)
        a, b = self.a[slots].astype(np.float64), self.b[slots].astype(np.float64)
        return np.where(np.isnan(b), 0.0, a - b)

    def slots(self, rows: Int | None = None) -> tuple[Int, Int]:
        """Where the counted tokens of these completions are, and their positions within the completion."""
        return counted_slots(self.ranges, self.mask, rows)

    def weights(self, low: float, high: float, outside: int, rows: npt.NDArray[np.bool_] | None = None) -> Real:
        """exp of the held log-ratio of the tokens of ``rows``, in or out of [low, high]; 0 elsewhere."""
        out = np.zeros(self.ranges.n_slots, self.dtype)
        self._call("mismatch_weights", self.clamp, low, high, outside, out, rows=rows)
        return out

    def keep(self, statistic: int, low: float, high: float, rows: npt.NDArray[np.bool_] | None = None) -> Mask:
        """1 for the counted tokens of ``rows`` with a statistic in [low, high]; 0 elsewhere."""
        out = np.zeros(self.ranges.n_slots, np.uint8)
        self._call("mismatch_keep", self.clamp, statistic, low, high, out, rows=rows)
        return out

    def count(self, keep: Mask) -> Int:
        """How many tokens of each completion are kept."""
        kept: Int = self.kernels.count_tokens(keep, self.ranges.start, self.ranges.stop)
        return kept

    def _call(self, name: str, *arguments: Any, rows: npt.NDArray[np.bool_] | None = None) -> None:
        start, stop = self.ranges.start, self.ranges.stop
        if rows is not None:
            start, stop = start[rows], stop[rows]
        start, stop = np.ascontiguousarray(start), np.ascontiguousarray(stop)
        n_threads = _threads.choose(int((stop - start).sum()))
        getattr(self.kernels, name)(self.a, self.b, self.mask, start, stop, *arguments, n_threads)

    def _first(self, bad: npt.NDArray[np.bool_]) -> int:
        slots, _ = self.slots()
        return int(slots[bad[slots]].min())

    def _raise_non_finite(self, names: tuple[str, str]) -> None:
        found = []
        for name, array, allowed in ((names[0], self.a, False), (names[1], self.b, True)):
            bad = ~check.usable(array) & ~(np.isnan(array) & allowed)
            slots, _ = self.slots()
            if bad[slots].any():
                found.append((int(slots[bad[slots]].min()), name, array))
        at, name, array = min(found, key=lambda entry: entry[0])
        entry = f"{name}[{at}]={array[at]}"
        if np.isfinite(array[at]):
            raise ValueError(f"{name}: {entry} is too large to compute with; log-probs stay within {LARGEST:g}")
        nan = " (NaN, not an infinity, stands for a token that was not scored)" if name == names[1] else ""
        raise ValueError(f"{name}: {entry} is not finite; mask that token or drop it{nan}")


def counted_slots(ranges: Ranges, mask: Mask | None, rows: Int | None = None) -> tuple[Int, Int]:
    """Slots of the counted tokens, and their positions within the completion, completion after completion."""
    start = ranges.start if rows is None else ranges.start[rows]
    lengths = (ranges.stop if rows is None else ranges.stop[rows]) - start
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slots = np.repeat(start, lengths) + position
    if mask is None:
        return slots, position
    counted = mask[slots] != 0
    return slots[counted], position[counted]


def packed(token_offsets: npt.ArrayLike, array: npt.NDArray[Any], name: str) -> Ranges:
    """The ranges of checked offsets into the flat ``array`` of that name."""
    offsets = check.offsets("token_offsets", token_offsets, len(array), name)
    return Ranges(offsets[:-1], offsets[1:], len(array), packed=True)
