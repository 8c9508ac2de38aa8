"""From names and options to a :class:`~grpo_fast.correction_tables.Choice`: preset, convention, bounds, thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any

import numpy as np

from ._validate import number, one_of
from .conventions import correction_options
from .correction_tables import (
    BATCH_NORMALIZE,
    CORRECTIONS,
    PRESETS,
    REJECTIONS,
    SEQUENCE_RATIOS,
    UNSCORED,
    Choice,
)

#: The keywords that choose a correction; :func:`grpo_fast.importance_weights` explains them.
OPTIONS = frozenset(
    {"mode", "clip_min", "clip_max", "sequence_ratio", "batch_normalize", "reject", "reject_threshold",
     "log_ratio_clamp", "unscored"}
)  # fmt: skip
_OF_MODE = ("clip_min", "clip_max", "sequence_ratio", "batch_normalize")


def resolve(options: Mapping[str, Any], convention: str | None, preset: str | None) -> Choice:
    """Explicit keyword, then preset, then convention; every explicit option is used or refused."""
    explicit = {name: value for name, value in options.items() if value is not None}
    base = {name: value for name, value in correction_options(convention).items() if name in OPTIONS}
    if preset is not None:  # complete in itself: what it leaves out is off
        chosen = PRESETS[one_of("preset", preset, PRESETS)].options
        base = {name: base[name] for name in ("log_ratio_clamp", "unscored") if name in base} | chosen
    given = {**base, **explicit}
    mode = given.get("mode")
    if mode is None and not given.get("reject") and preset is None:
        raise ValueError(
            "mode: neither a weight nor a rejection was asked for; pass mode, reject or preset"
            + ("" if convention is None else f" (convention={convention!r} has none of its own)")
        )
    return Choice(
        log_ratio_clamp=positive_or_inf("log_ratio_clamp", given.get("log_ratio_clamp", inf)),
        unscored=one_of("unscored", given.get("unscored", "one"), UNSCORED),
        reject=_rejections(given.get("reject"), given.get("reject_threshold")),
        **_mode(mode, given, explicit),
    )


def _mode(mode: str | None, given: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    if mode is None:
        for name in _OF_MODE:
            if name in explicit:
                raise ValueError(f"{name}: without a mode there are no weights; pass mode, or leave {name} out")
        return {}
    row = CORRECTIONS[one_of("mode", mode, CORRECTIONS)]
    if "sequence_ratio" in explicit and row.sequence_ratio is None:
        takers = ", ".join(repr(name) for name, other in CORRECTIONS.items() if other.sequence_ratio is not None)
        raise ValueError(f"sequence_ratio: mode={mode!r} has no use for it; leave it out or choose one of {takers}")
    if given.get("clip_min") is None and given.get("clip_max") is None:
        raise ValueError(
            f"clip_max: mode={mode!r} has no default bound; pass one (TRL has 3.0, verl 2.0), "
            "or clip_max=np.inf for the plain ratio"
        )
    clip_min = number("clip_min", given.get("clip_min", 0.0), least=0.0)
    clip_max = positive_or_inf("clip_max", given.get("clip_max", inf))
    if clip_min > clip_max:
        raise ValueError(f"clip_min: {clip_min:g} exceeds clip_max={clip_max:g}; swap them")
    sequence_ratio = None if row.sequence_ratio is None else given.get("sequence_ratio", row.sequence_ratio)
    if sequence_ratio is not None:
        one_of("sequence_ratio", sequence_ratio, SEQUENCE_RATIOS)
    return {
        "mode": mode,
        "clip_min": clip_min,
        "clip_max": clip_max,
        "has_min": given.get("clip_min") is not None,
        "sequence_ratio": sequence_ratio,
        "batch_normalize": one_of("batch_normalize", given.get("batch_normalize", "none"), BATCH_NORMALIZE),
    }


def positive_or_inf(name: str, value: Any) -> float:
    """``value`` as a float above 0, infinity included."""
    if isinstance(value, (float, np.floating)) and value == inf:
        return inf
    return number(name, value, above=0.0)


def _rejections(reject: Any, threshold: Any) -> dict[str, tuple[float, float]]:
    """Name of each rejection, and the bounds of its statistic."""
    if reject is None:
        if threshold is not None:
            raise ValueError("reject_threshold: there is nothing to reject by; pass reject, or leave it out")
        return {}
    names = [part.strip() for part in reject.split(",")] if isinstance(reject, str) else list(reject)
    names = list(dict.fromkeys(one_of("reject", name, REJECTIONS) for name in names))
    if not names:
        raise ValueError(f"reject: no name in it; pass one or several of {', '.join(REJECTIONS)}, or leave it out")
    if threshold is None:
        raise ValueError(
            f"reject_threshold: reject={names} needs one; pass a threshold for all, or a list with one for each"
        )
    if isinstance(threshold, str):
        thresholds: list[Any] = [part.strip() for part in threshold.split(",") if part.strip()]
    else:
        thresholds = list(threshold) if np.ndim(threshold) or isinstance(threshold, Sequence) else [threshold]
    if len(thresholds) not in (1, len(names)):
        raise ValueError(
            f"reject_threshold: expected one entry per name in reject ({len(names)}) or one for all, got "
            f"{len(thresholds)}; a pair of ratios is one entry, as in [[0.5, 2.0]]"
        )
    if len(thresholds) == 1:
        thresholds *= len(names)
    return {
        name: _threshold(f"reject_threshold[{k}]", name, value)
        for k, (name, value) in enumerate(zip(names, thresholds, strict=True))
    }


def _threshold(where: str, name: str, value: Any) -> tuple[float, float]:
    """The statistic's bounds: those of -x from a pair of ratios, or only one from above."""
    parts: list[Any] = [value]
    if isinstance(value, str):  # verl's own spelling, "0.5_2.0"
        try:
            parts = [float(part) for part in value.split("_", 1)]
        except ValueError:
            raise ValueError(f"{where}: {value!r} is no threshold; pass a number, or a pair as [0.5, 2.0]") from None
    elif np.ndim(value):
        parts = list(value)
    two_sided = REJECTIONS[name].two_sided
    if len(parts) not in ((1, 2) if two_sided else (1,)):
        wanted = "a ratio or a pair of ratios" if two_sided else "one upper bound"
        raise ValueError(f"{where}: {name!r} takes {wanted}, got {len(parts)} numbers; pass that")
    numbers = [number(where, part, above=0.0) for part in parts]
    if not two_sided:
        return -inf, numbers[0]
    low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
    if low > high:
        way = "swap them" if len(numbers) == 2 else f"pass {low:g}, which keeps ratios from {high:g} up to it"
        raise ValueError(f"{where}: the lower ratio {low:g} exceeds the upper {high:g}; {way}")
    return log(low), log(high)
