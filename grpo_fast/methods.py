"""From names and options to a :class:`~grpo_fast._contract.Plan` and an aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from . import _contract as c
from ._validate import number, one_of
from .tables import (
    AGGREGATIONS,
    CISPO_BOUNDS,
    KL_ESTIMATORS,
    KL_RATIO_FACTORS,
    LEVELS,
    METHODS,
    OPTION_BOUNDS,
    SURROGATES,
    Method,
)

BETA_WITH_REFERENCE = 0.04  # DeepSeekMath, arXiv:2402.03300 section 4.2


#: The keywords that choose a loss; :func:`grpo_fast.grpo_loss` explains them.
OPTIONS = frozenset(OPTION_BOUNDS) | {
    "importance_sampling_level", "loss_agg_mode", "cispo_bound", "kl_estimator", "kl_ratio_factor",
}  # fmt: skip


class Resolved(NamedTuple):
    """A loss without arrays: the plan, the aggregation and the denominators that were given."""

    plan: c.Plan
    aggregation: str
    denominators: dict[str, float]


def resolve(
    loss_type: str, options: Mapping[str, Any], *, has_reference: bool, dtype: np.dtype[Any], width: int | None
) -> Resolved:
    """The plan of ``loss_type`` with these options; every option is used or refused.

    ``width`` is that of padded input, which stands in where a constant length is needed.
    """
    method = METHODS[one_of("loss_type", loss_type, METHODS)]
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, (least, above) in OPTION_BOUNDS.items():
        if name in given:
            given[name] = number(name, given[name], least=least, above=above)

    fields: dict[str, Any] = {
        **_surrogate(loss_type, method, given),
        **_level(loss_type, method, given),
        **_kl(given, has_reference),
        **method.plan,
        "exp_bound": c.EXP_BOUND[dtype],
    }
    aggregation, denominators = _aggregation(loss_type, method, given, width)
    if given:
        raise AssertionError(f"options neither used nor refused: {sorted(given)}")
    return Resolved(c.Plan(**fields), aggregation, denominators)


def _take(given: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}


def _surrogate(loss_type: str, method: Method, given: dict[str, Any]) -> dict[str, Any]:
    surrogate = SURROGATES[method.surrogate]
    if "cispo_bound" in given:
        one_of("cispo_bound", given["cispo_bound"], CISPO_BOUNDS)
    bounds = surrogate.bounds(**_take(given, surrogate.options))
    every = dict.fromkeys(name for row in SURROGATES.values() for name in row.options)
    for name in every:
        if name in given:
            takers = [repr(key) for key, row in METHODS.items() if name in SURROGATES[row.surrogate].options]
            raise ValueError(
                f"{name}: loss_type={loss_type!r} has no use for it; leave it out or choose one of {', '.join(takers)}"
            )
    fields: dict[str, Any] = {f"p{k}": value for k, value in enumerate(bounds.params)}
    if bounds.pre is not None:
        fields |= dict(zip(("pre", "pre_lo", "pre_hi"), bounds.pre, strict=True))
    if "log_ratio_clamp" in given:
        if not surrogate.ratio or bounds.pre is not None:
            raise ValueError(f"log_ratio_clamp: loss_type={loss_type!r} has no use for it; leave it out")
        clamp = given.pop("log_ratio_clamp")
        fields.update(pre=c.PRE_CLAMP, pre_lo=-clamp, pre_hi=clamp)
    return {"surrogate": surrogate.id, "clip_lo": bounds.clip_lo, "clip_hi": bounds.clip_hi, **fields}


def _level(loss_type: str, method: Method, given: dict[str, Any]) -> dict[str, Any]:
    name = given.pop("importance_sampling_level", method.levels[0])
    one_of("importance_sampling_level", name, LEVELS)
    if name not in method.levels:
        raise ValueError(
            f"importance_sampling_level: loss_type={loss_type!r} is defined at "
            f"{' or '.join(map(repr, method.levels))}, not at {name!r}; leave it out or choose another loss_type"
        )
    return {"level": LEVELS[name], "rho_level": LEVELS[name]}


def _kl(given: dict[str, Any], has_reference: bool) -> dict[str, Any]:
    options = _take(given, ("kl_estimator", "kl_ratio_factor", "kl_clamp_in", "kl_clamp_out"))
    beta = given.pop("beta", BETA_WITH_REFERENCE if has_reference else 0.0)
    if not has_reference:
        if beta > 0:
            raise ValueError(f"beta: a KL term with beta={beta:g} needs ref_logp; pass it, or beta=0")
        for name in options:
            raise ValueError(f"{name}: there is no ref_logp to compare with; pass it, or leave {name} out")
        return {}
    estimator = one_of(
        "kl_estimator", options.get("kl_estimator", "k3"), [*KL_ESTIMATORS, *(f"{k}+" for k in KL_ESTIMATORS)]
    )
    factor = one_of("kl_ratio_factor", options.get("kl_ratio_factor", "none"), KL_RATIO_FACTORS)
    return {
        "kl": KL_ESTIMATORS[estimator.rstrip("+")].id,
        "kl_straight_through": int(estimator.endswith("+")),
        "kl_clamp_in": options.get("kl_clamp_in", np.inf),
        "kl_clamp_out": options.get("kl_clamp_out", np.inf),
        "beta": beta,
        "rho": KL_RATIO_FACTORS[factor],
    }


def _aggregation(
    loss_type: str, method: Method, given: dict[str, Any], width: int | None
) -> tuple[str, dict[str, float]]:
    explicit = given.pop("loss_agg_mode", None)
    name = one_of("loss_agg_mode", explicit or method.aggregation, AGGREGATIONS)
    own = method.denominators if explicit is None else None
    takes = AGGREGATIONS[name].denominators if own is None else own
    denominators = _take(given, takes)
    what = f"loss_agg_mode={name!r}" if explicit else f"loss_type={loss_type!r}"
    for other in dict.fromkeys(name for row in AGGREGATIONS.values() for name in row.denominators):
        if other in given:
            raise ValueError(
                f"{other}: {what} does not divide by it; leave it out"
                + (f", it takes {', '.join(takes)}" if takes else "")
            )
    if name == "seq-mean-token-sum-norm":
        denominators["length"] = _constant_length(denominators, what, width)
    return name, denominators


def _constant_length(denominators: dict[str, float], what: str, width: int | None) -> float:
    lengths = _take(denominators, ("loss_scale_factor", "max_completion_length"))
    if len(lengths) == 2:
        raise ValueError("loss_scale_factor: it and max_completion_length are the same divisor; pass one of the two")
    if not lengths and width is None:
        raise ValueError(f"max_completion_length: {what} divides by a constant length; pass the generation limit")
    return next(iter(lengths.values()), float(max(width or 0, 1)))
