"""From names and options to a :class:`~grpo_fast.correction_tables.Choice`: preset, convention, bounds, thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any

import numpy as np

from ._validate import number, one_of
from .conventions import correction_options, look_up
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
        chosen = _preset(preset, explicit)
        base = {name: base[name] for name in ("log_ratio_clamp", "unscored") if name in base} | chosen
    given = {**base, **explicit}
    mode = given.get("mode")
    if mode is None and not given.get("reject") and preset is None:
        raise ValueError(
            "mode: neither a weight nor a rejection was asked for; pass mode, reject or preset" + _own(convention)
        )
    return Choice(
        log_ratio_clamp=positive_or_inf("log_ratio_clamp", given.get("log_ratio_clamp", inf)),
        unscored=one_of("unscored", given.get("unscored", "one"), UNSCORED),
        reject=_rejections(given.get("reject"), given.get("reject_threshold")),
        **_mode(mode, given, explicit),
    )


def _own(convention: str | None) -> str:
    """Where a convention has no correction of its own: the presets that are its framework's."""
    row = look_up(convention)
    if row is None:
        return ""
    names = [
        f"preset={name!r}"
        for name, preset in PRESETS.items()
        if preset.source.lower().startswith(f"{row.name} ") and preset.options.get("mode") and not preset.bypass
    ]
    own = f": its framework's are {', '.join(names)}" if names else ""
    return f" (convention={convention!r} sets none by itself{own})"


def _preset(preset: str, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a preset, which may be added to and tuned, but not turned into another."""
    if isinstance(preset, str) and preset in CORRECTIONS and preset not in PRESETS:
        raise ValueError(f"preset: {preset!r} is a mode; did you mean mode={preset!r}?")
    chosen = PRESETS[one_of("preset", preset, PRESETS)].options
    for name, read in (("mode", str), ("reject", _names)):
        if name in chosen and name in explicit and read(explicit[name]) != read(chosen[name]):
            raise ValueError(
                f"{name}: preset={preset!r} is {name}={chosen[name]!r}, got {explicit[name]!r}; "
                "leave one of the two out"
            )
    return chosen


def _mode(mode: str | None, given: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    if mode is None:
        for name in _OF_MODE:
            if name in explicit:
                raise ValueError(f"{name}: without a mode there are no weights; pass mode, or leave {name} out")
        return {}
    if isinstance(mode, str) and mode in PRESETS and mode not in CORRECTIONS:
        raise ValueError(f"mode: {mode!r} is a preset; did you mean preset={mode!r}?")
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
    names = list(dict.fromkeys(_names(reject)))
    if not names:
        raise ValueError(f"reject: no name in it; pass one or several of {', '.join(REJECTIONS)}, or leave it out")
    if threshold is None:
        raise ValueError(
            f"reject_threshold: reject={names} needs one; pass a threshold for all, or a list with one for each"
        )
    thresholds = _thresholds(names, threshold)
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


def _names(reject: Any) -> list[str]:
    if isinstance(reject, str):
        names: list[Any] = [part.strip() for part in reject.split(",")]
    else:
        try:
            names = list(reject)
        except TypeError:
            raise TypeError(
                f"reject: expected a name or a list of names, got {reject!r}; pass one or several of "
                f"{', '.join(map(repr, REJECTIONS))}"
            ) from None
    return [one_of("reject", name, REJECTIONS) for name in names]


def _thresholds(names: Sequence[str], threshold: Any) -> list[Any]:
    """The entries of a threshold; the two numbers of a pair are one entry where there is one name."""
    if isinstance(threshold, str):
        return [part.strip() for part in threshold.split(",") if part.strip()]
    entries = _entries(threshold)
    if entries is None:
        return [threshold]
    two_sided = all(REJECTIONS[name].two_sided for name in names)
    if len(entries) == 2 and len(names) <= 2 and two_sided and not any(map(_is_several, entries)):
        if len(names) == 1:
            return [entries]
        one, two = (number("reject_threshold", entry, above=0.0) for entry in entries)
        raise ValueError(
            f"reject_threshold: ({one:g}, {two:g}) for {names} may be one pair or two single ratios; pass "
            f"[({one:g}, {two:g})] for that pair for both, or [({one:g},), ({two:g},)] for a ratio each"
        )
    return entries


def _is_several(value: Any) -> bool:
    """Whether it is a pair, if only a spelled one, rather than a number."""
    return isinstance(value, str) or _entries(value) is not None


def _entries(value: Any) -> list[Any] | None:
    """The entries of a list, which may be ragged; None for a single number or string."""
    if isinstance(value, str):
        return None
    return list(value) if isinstance(value, Sequence) or np.ndim(value) else None


def _threshold(where: str, name: str, value: Any) -> tuple[float, float]:
    """The statistic's bounds: those of -x from a pair of ratios, or only one from above."""
    parts: list[Any]
    if isinstance(value, str):  # verl's own spelling, "0.5_2.0"
        try:
            parts = [float(part) for part in value.split("_")]
        except ValueError:
            raise ValueError(f"{where}: {value!r} is no threshold; pass a number, or a pair as [0.5, 2.0]") from None
    else:
        parts = [value] if (entries := _entries(value)) is None else entries
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
