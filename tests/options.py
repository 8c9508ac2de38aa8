"""Options of the losses, read off the tables: what every method can be combined with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from batches import Batch

from grpo_fast import tables

try:
    from hypothesis import strategies as st
except ImportError:
    st = None  # type: ignore[assignment]

#: Settings of each surrogate whose bounds lie inside what log-ratios of spread 0.3 reach.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "clip": [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.28},
        {"delta": 1.3},
        {"epsilon_high": 0.4, "delta": 1.1},
        {"dual_clip": 1.15},
        {"epsilon": 0.3, "dual_clip": 1.5},
    ],
    "cispo": [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.3},
        {"cispo_bound": "cap", "epsilon_high": 1.2},
        {"cispo_bound": "absolute", "epsilon": 0.8, "epsilon_high": 1.2},
    ],
    "sapo": [{}, {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}],
}
KL_CLAMPS: list[dict[str, Any]] = [{}, {"kl_clamp_in": 0.3, "kl_clamp_out": 0.02}, {"kl_clamp_in": 0.2}]
ADVANTAGES = ("completion", "step", "token", "completion+step")
WEIGHTS = ("none", "token", "completion")


def variants(surrogate: str) -> list[dict[str, Any]]:
    """Settings of a surrogate; with a clamped log-ratio where it has one."""
    rows = VARIANTS.get(surrogate, [{}])
    return [*rows, {"log_ratio_clamp": 0.25}] if tables.SURROGATES[surrogate].ratio else rows


def penalties() -> list[dict[str, Any]]:
    """No reference, and every KL estimator with every clamp and ratio factor."""
    estimators = [name + plus for name in tables.KL_ESTIMATORS for plus in ("", "+")]
    return [
        {"ref": False},
        *(
            {"beta": 0.3, "kl_estimator": estimator, "kl_ratio_factor": factor, **clamps}
            for estimator, factor, clamps in itertools.product(estimators, tables.KL_RATIO_FACTORS, KL_CLAMPS)
        ),
    ]


def aggregations(method: str) -> list[dict[str, Any]]:
    """The method's own aggregation and every other one, with and without denominators given."""
    numbers = {
        "num_items_in_batch": 23.0, "num_processes": 2.0, "num_sequences": 7.0, "num_groups": 3.0,
        "max_completion_length": 11.0, "loss_scale_factor": 9.0,
    }  # fmt: skip
    rows = []
    for mode in (None, *tables.AGGREGATIONS):
        row = tables.METHODS[method]
        name = row.aggregation if mode is None else mode
        takes = tables.AGGREGATIONS[name].denominators
        if mode is None and row.denominators is not None:
            takes = row.denominators
        length = [option for option in takes if option in ("max_completion_length", "loss_scale_factor")][:1]
        given = [option for option in takes if option not in ("max_completion_length", "loss_scale_factor")]
        base = {"loss_agg_mode": mode, **{option: numbers[option] for option in length}}
        rows.append(base)
        if given:
            rows.append({**base, **{option: numbers[option] for option in given}})
    return rows


def combinations(method: str, level: str, each: int = 1) -> Iterator[dict[str, Any]]:
    """Every setting of the surrogate with every penalty, ``each`` times with other aggregations,
    masks, advantages, weights and old policies, which take turns until all their combinations were."""
    rest = list(itertools.product(aggregations(method), (True, False), ADVANTAGES, WEIGHTS, (True, True, False)))
    random.Random(f"{method} {level}").shuffle(rest)
    turn = itertools.cycle(rest)
    for setting, penalty in itertools.product(variants(tables.METHODS[method].surrogate), penalties()):
        for _ in range(each):
            aggregation, use_mask, advantage, weight, old = next(turn)
            yield {
                "loss_type": method, "importance_sampling_level": level, **setting, **penalty, **aggregation,
                "use_mask": use_mask, "advantage": advantage, "weight": weight, "old": old,
            }  # fmt: skip


def whole_batch(batch: Batch, options: dict[str, Any]) -> dict[str, Any] | None:
    """The denominators that make the parts of a batch add up; None where the method takes none."""
    method = tables.METHODS[options["loss_type"]]
    mode = options.get("loss_agg_mode") or method.aggregation
    takes = tables.AGGREGATIONS[mode].denominators
    if options.get("loss_agg_mode") is None and method.denominators is not None:
        takes = method.denominators
    counts = batch.counts() if options.get("use_mask", True) else batch.lengths
    known = {
        "num_items_in_batch": float(counts.sum()),
        "num_sequences": float(batch.rows),
        "num_groups": float(len(np.unique(batch.group_ids))),
    }
    if mode != "token-sum" and not set(takes) & set(known):
        return None
    return {name: known[name] for name in takes if name in known}


def kinks(options: dict[str, Any]) -> dict[str, list[float]]:
    """Where these options change their branch, as :func:`batches.away_from_kinks` takes it."""
    surrogate = tables.SURROGATES[tables.METHODS[options["loss_type"]].surrogate]
    bounds = surrogate.bounds(**{k: options[k] for k in surrogate.options if options.get(k) is not None})
    log_ratio, kl = [], [0.0]
    if options.get("log_ratio_clamp") is not None:
        log_ratio = [-options["log_ratio_clamp"], options["log_ratio_clamp"]]
    if options.get("kl_clamp_in") is not None:
        kl += [-options["kl_clamp_in"], options["kl_clamp_in"]]
    if options.get("kl_clamp_out") is not None:
        kl += _where_kl_is(options["kl_clamp_out"], options.get("kl_estimator", "k3").removesuffix("+"))
    return {"ratio": list(bounds.params), "log_ratio": log_ratio, "kl": kl}


def _where_kl_is(value: float, estimator: str) -> list[float]:
    if estimator in ("k1", "abs"):
        return [-value, value]
    if estimator == "k2":
        return [-float(np.sqrt(2 * value)), float(np.sqrt(2 * value))]
    roots = []
    for low, high in ((-value - 2.0, 0.0), (0.0, value + 2.0)):
        for _ in range(200):
            middle = (low + high) / 2
            above = np.expm1(middle) - middle > value
            if above == (middle < 0):
                low = middle
            else:
                high = middle
        roots.append(low)
    return roots


if st is not None:

    @st.composite
    def options(
        draw: Any, *, advantages: tuple[str, ...] = ADVANTAGES, levels: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """Any allowed combination, drawn row by row from the tables."""
        method = draw(st.sampled_from(sorted(tables.METHODS)), "loss_type")
        allowed = [level for level in tables.METHODS[method].levels if levels is None or level in levels]
        if not allowed:
            method, allowed = "grpo", list(levels or ())
        return {
            "loss_type": method,
            "importance_sampling_level": draw(st.sampled_from(allowed), "level"),
            **draw(st.sampled_from(variants(tables.METHODS[method].surrogate)), "surrogate"),
            **draw(st.sampled_from(penalties()), "penalty"),
            **draw(st.sampled_from(aggregations(method)), "aggregation"),
            "use_mask": draw(st.booleans(), "mask"),
            "advantage": draw(st.sampled_from(advantages), "advantage"),
            "weight": draw(st.sampled_from(WEIGHTS), "weight"),
            "old": draw(st.booleans(), "old"),
        }
