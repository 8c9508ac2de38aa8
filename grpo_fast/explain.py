"""What a convention sets, in words and numbers, and where two of them differ.

Settings come from the rows of :mod:`grpo_fast.conventions`, numbers from calling the library with that
convention on a small fixed batch: nothing here knows what any framework does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose, isnan, log, nan
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import conventions
from .advantages import group_advantages
from .conventions import Convention
from .corrections import importance_weights
from .losses import grpo_loss
from .methods import Resolved, resolve
from .reward_kl import kl_in_reward
from .tables import METHODS

_T = TypeVar("_T")


class Row(NamedTuple):
    """One line: a setting, or a number of the example."""

    section: str
    name: str
    words: str
    a: Any
    b: Any = None
    differs: bool = False


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; print it, or look through ``rows`` and ``differences``."""

    a: Convention
    b: Convention | None
    rows: tuple[Row, ...]

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows whose two sides are not the same; none where only one convention was asked for."""
        return tuple(row for row in self.rows if row.differs)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(
    a: str | Convention,
    b: str | Convention | None = None,
    *,
    loss_type: str | None = None,
    backend: str | None = None,
) -> Explanation:
    """What a convention sets, in words and in numbers of a small example, and where a second one differs.

    Parameters
    ----------
    a, b : names of conventions, such as "trl" or "trl==1.16.0"
        Without ``b`` the explanation has one column.
    loss_type : a method both have; by default each framework's own default
    backend : of the calls that compute the numbers

    Returns
    -------
    Explanation
        ``str`` of it is a plain table, ``rows`` its lines as ``(section, name, words, a, b, differs)``,
        ``differences`` those that differ. A number that a convention refuses to give is the sentence it refuses with.

    Raises
    ------
    ValueError, TypeError
        A convention the library does not know; a ``loss_type`` one of the two does not have.

    Notes
    -----
    The advantages are those of the groups [1, 0, 0, 0], [1, 1, 1, 1], [1] and [1, NaN, 0]. The loss is that of a batch
    with ragged rows, an empty one, a masked token, ratios on either side of every usual bound and log-probabilities
    far from the reference's; beside it stand the derivatives with respect to single log-probabilities, times the number
    of tokens. Arguments that the batch brings (old and reference log-probabilities) mean what the notes of the
    convention say they mean.

    Examples
    --------
    >>> from grpo_fast.explain import explain
    >>> {row.name: (row.a, row.b) for row in explain("trl", "verl").differences if row.section == "advantages"}["eps"]
    (0.0001, 1e-06)
    >>> explain("trl", "trl").differences
    ()
    """
    rows_of = [x if isinstance(x, Convention) else conventions.convention(x) for x in (a, b) if x is not None]
    for row in rows_of:
        if loss_type is not None and loss_type not in row.methods:
            raise ValueError(
                f"loss_type: {row.name} {row.version} has no {loss_type!r}; it has "
                f"{', '.join(map(repr, row.methods))}: choose one of them, or leave loss_type out"
            )
    sides = [_side(row, loss_type, backend) for row in rows_of]
    found = []
    for key, (words, left) in sides[0].items():
        right = sides[1][key][1] if len(sides) == 2 else None
        found.append(Row(*key, words, left, right, len(sides) == 2 and not _same(left, right)))
    return Explanation(rows_of[0], rows_of[1] if len(rows_of) == 2 else None, tuple(found))


Lines = dict[tuple[str, str], tuple[str, Any]]  # (section, name): (words, what this convention has)


def _side(row: Convention, loss_type: str | None, backend: str | None) -> Lines:
    """One column."""
    return {
        **_section("framework", {"convention": ("name and version", f"{row.name}=={row.version}")}),
        **_section("framework", {"checked": ("how its row was checked", row.checked)}),
        **_section("advantages", _advantage_settings(row)),
        **_section("advantages of an example", _advantage_numbers(row, backend)),
        **_section("loss", _loss_settings(row, loss_type)),
        **_loss_numbers(row, loss_type, backend),
        **_section("importance weights", _correction_settings(row)),
        **_section("importance weights of an example", _correction_numbers(row, backend)),
        **_section("KL in the reward", _reward_kl_settings(row)),
        **_section("KL in the reward of an example", _reward_kl_numbers(row, backend)),
    }


def _section(section: str, lines: Mapping[str, tuple[str, Any]]) -> Lines:
    return {(section, name): line for name, line in lines.items()}


# --- Settings: what the rows say, with the library's defaults where they say nothing

_ADVANTAGES = {
    "baseline": ("what is subtracted from a reward", "mean"),
    "scale": ("what the rest is divided by", "group"),
    "ddof": ("degrees of freedom taken off the deviation", 0),
    "eps": ("added to the deviation", 1e-8),
    "singleton": ("a group of one", "zero"),
    "nan_policy": ("a reward that is missing", "error"),
    "multi_objective_aggregation": ("several rewards", "sum_then_normalize"),
}
_UNUSED = {"none": ("ddof", "eps")}  # settings without a meaning where nothing is divided


def _advantage_settings(row: Convention) -> dict[str, tuple[str, Any]]:
    options = {name: row.advantages.get(name, default) for name, (_, default) in _ADVANTAGES.items()}
    for name in _UNUSED.get(options["scale"], ()):
        options[name] = None
    lines = {name: (_ADVANTAGES[name][0], value) for name, value in options.items()}
    lines["estimators"] = ("estimators it has", ", ".join(row.estimators) or None)
    return lines


_LOSS = {
    "importance_sampling_level": "one ratio per",
    "loss_agg_mode": "how token losses become one number",
    "empty_rows": "completions without a counted token, in means over sequences",
    "epsilon": "lower clip",
    "epsilon_high": "upper clip",
    "delta": "bound on the ratio itself",
    "dual_clip": "bound on the loss where A < 0",
    "log_ratio_clamp": "log-ratios of tokens are held in +-",
    "log_ratio_cap": "the log-ratio of a sequence is held below",
    "cispo_bound": "what epsilon means for cispo",
    "sapo_temperature_pos": "temperature where A > 0",
    "sapo_temperature_neg": "temperature elsewhere",
    "vespo_k_pos": "k where A >= 0",
    "vespo_lambda_pos": "lambda where A >= 0",
    "vespo_k_neg": "k elsewhere",
    "vespo_lambda_neg": "lambda elsewhere",
    "dro_beta": "weight of the squared log-ratio",
    "clip_cov_ratio": "share of tokens taken",
    "clip_cov_lb": "least covariance",
    "clip_cov_ub": "largest covariance",
    "kl_cov_ratio": "share of tokens taken",
    "ppo_kl_coef": "weight of |log-ratio| on them",
    "beta": "weight of the KL term in the loss",
    "kl_estimator": "its estimator",
    "kl_ratio_factor": "multiplied by the importance ratio",
    "kl_clamp_in": "ref_logp - logp is held in +-",
    "kl_clamp_out": "the estimate is held in +-",
    "kl_agg_mode": "aggregated on its own",
}
_DEFAULTS: dict[str, Any] = {
    "epsilon": 0.2, "beta": 0.04, "kl_estimator": "k3", "kl_ratio_factor": "none", "empty_rows": "count",
}  # fmt: skip


def _loss_settings(row: Convention, loss_type: str | None) -> dict[str, tuple[str, Any]]:
    chosen = loss_type or row.loss_type
    options = {**_DEFAULTS, "importance_sampling_level": METHODS[chosen].levels[0], **row.loss_options(chosen)}
    options.setdefault("epsilon_high", options["epsilon"])
    resolved = _resolved(row, loss_type)
    options["loss_agg_mode"] = (
        METHODS[chosen].aggregation if isinstance(resolved, str) else resolved.weighing.aggregation
    )
    if options.get("kl_agg_mode") == options["loss_agg_mode"]:
        options["kl_agg_mode"] = None  # with the rest, then
    return {
        "loss_type": ("method" if loss_type else "method by default", chosen),
        "methods": ("methods it has", ", ".join(row.methods)),
        **{name: (words, options.get(name)) for name, words in _LOSS.items()},
    }


def _resolved(row: Convention, loss_type: str | None) -> Resolved | str:
    """What the library makes of the convention, or why it needs an option that the convention has no value for."""
    float64 = np.dtype(np.float64)
    return _try(lambda: resolve(loss_type, {}, convention=row.name, has_reference=True, dtype=float64, width=_LENGTH))


_CORRECTIONS = {
    "mode": "what is truncated or masked",
    "clip_min": "smallest weight",
    "clip_max": "largest weight",
    "sequence_ratio": "how a sequence's weight is made",
    "log_ratio_clamp": "log-ratios are held in +-",
    "threshold": "largest mean drift where A < 0",
}


def _correction_settings(row: Convention) -> dict[str, tuple[str, Any]]:
    return {name: (words, row.corrections.get(name)) for name, words in _CORRECTIONS.items()}


# --- Numbers: the library, called

_GROUPS = {
    "a": [1.0, 0.0, 0.0, 0.0],
    "b": [1.0, 1.0, 1.0, 1.0],
    "c": [1.0],
    "d": [1.0, nan, 0.0],
}


def _try(compute: Callable[[], _T]) -> _T | str:
    """The number, or the first clause of why there is none."""
    try:
        return compute()
    except ValueError as error:
        return f"refused: {str(error).split(';')[0]}"


def _advantage_numbers(row: Convention, backend: str | None) -> dict[str, tuple[str, Any]]:
    def of(group: str, which: int) -> Any:
        rewards = _GROUPS[group]
        given = group_advantages(rewards, group_ids=[group] * len(rewards), convention=row.name, backend=backend)
        return float(given[which])

    return {
        "winner": ("the 1 in a group of rewards 1, 0, 0, 0", _try(lambda: of("a", 0))),
        "loser": ("a 0 in that group", _try(lambda: of("a", 1))),
        "all equal": ("a group of rewards 1, 1, 1, 1", _try(lambda: of("b", 0))),
        "alone": ("a group of one reward, 1", _try(lambda: of("c", 0))),
        "beside a missing one": ("the 1 in a group of rewards 1, NaN, 0", _try(lambda: of("d", 0))),
        "missing": ("the NaN in that group", _try(lambda: of("d", 1))),
    }


class _Token(NamedTuple):
    """A token of the example: its log-ratios to the old policy and to the reference."""

    name: str
    words: str
    log_ratio: float
    reference: float = 0.0  # ref_logp - logp
    counts: bool = True


#: Completions: their advantage, and their tokens. The log-ratios stand clear of the usual bounds.
_BATCH: tuple[tuple[float, tuple[_Token, ...]], ...] = (
    (1.0, (
        _Token("inside", "A = 1, ratio 1", 0.0),
        _Token("masked", "a masked token", 7.0, 7.0, counts=False),
        _Token("ratio 1.15", "A = 1, ratio 1.15", log(1.15)),
        _Token("ratio 1.25", "A = 1, ratio 1.25", log(1.25)),
        _Token("ratio 1.276", "A = 1, ratio 1.276", log(1.276)),
        _Token("ratio 1.5", "A = 1, ratio 1.5", log(1.5)),
        _Token("ratio 5", "A = 1, ratio 5", log(5.0)),
        _Token("ratio 0.5", "A = 1, ratio 0.5", log(0.5)),
    )),
    (-1.0, (
        _Token("ratio 0.95, A < 0", "A = -1, ratio 0.95", log(0.95)),
        _Token("ratio 0.85, A < 0", "A = -1, ratio 0.85", log(0.85)),
        _Token("ratio 0.5, A < 0", "A = -1, ratio 0.5", log(0.5)),
        _Token("ratio 10, A < 0", "A = -1, ratio 10", log(10.0)),
    )),
    (1.0, (_Token("vanishing ratio", "A = 1, log-ratio -22, alone in its completion", -22.0),)),
    (-0.5, (_Token("extreme ratio", "A = -0.5, log-ratio 22, alone in its completion", 22.0),)),
    (-0.5, (_Token("large ratio", "A = -0.5, log-ratio 12, alone in its completion", 12.0),)),
    (1.0, ()),
    (0.25, (
        _Token("reference 0.5 above", "A = 0.25, ratio 1.1, ref_logp 0.5 above logp", log(1.1), 0.5),
        _Token("reference 2 below", "A = 0.25, ratio 1.1, ref_logp 2 below logp", log(1.1), -2.0),
        _Token("reference 4 above", "A = 0.25, ratio 1.1, ref_logp 4 above logp", log(1.1), 4.0),
        _Token("reference 15 below", "A = 0.25, ratio 1.1, ref_logp 15 below logp", log(1.1), -15.0),
        _Token("reference 30 below", "A = 0.25, ratio 1.1, ref_logp 30 below logp", log(1.1), -30.0),
    )),
)  # fmt: skip
_TOKENS = [token for _, tokens in _BATCH for token in tokens]
_LOGP = -1.0 - np.arange(len(_TOKENS)) / 16
_LENGTH = 8  # the constant of methods that divide by one


def _loss_numbers(row: Convention, loss_type: str | None, backend: str | None) -> Lines:
    old = _LOGP - [token.log_ratio for token in _TOKENS]
    reference = _LOGP + [token.reference for token in _TOKENS]
    counts = np.array([token.counts for token in _TOKENS])
    options: dict[str, Any] = {"convention": row.name, "backend": backend, "loss_type": loss_type, "mask": counts}
    resolved = _resolved(row, loss_type)
    if not isinstance(resolved, str) and resolved.weighing.aggregation == "seq-mean-token-sum-norm":
        options["max_completion_length"] = _LENGTH
    offsets = np.cumsum([0, *(len(tokens) for _, tokens in _BATCH)])

    def call(beta: float | None) -> tuple[float, list[float]]:
        got = grpo_loss(_LOGP, old, reference, [a for a, _ in _BATCH], offsets, beta=beta, **options)
        assert got.grad is not None  # asked for by default
        return got.loss, (counts.sum() * got.grad).tolist()

    words = {
        "loss": "the loss of the example",
        "policy loss": "without its KL term",
        **{token.name: f"N dL/dlogp: {token.words}" for token in _TOKENS},
    }
    alone = {
        token.name: f"the same of the KL term alone, beta 1: {token.words}" for token in _TOKENS if token.reference
    }
    if isinstance(resolved, str):
        numbers: dict[str, Any] = dict.fromkeys(words, resolved)
        of_kl: dict[str, Any] = dict.fromkeys(alone, resolved)
    else:
        names = [token.name for token in _TOKENS]
        (loss, slopes), (policy, without), (_, with_kl) = call(None), call(0.0), call(1.0)
        numbers = {"loss": loss, "policy loss": policy, **dict(zip(names, slopes, strict=True))}
        of_kl = {name: one - zero for name, zero, one in zip(names, without, with_kl, strict=True)}
    return {
        **_section("loss of an example", {name: (text, numbers[name]) for name, text in words.items()}),
        **_section("KL of the example", {name: (text, of_kl[name]) for name, text in alone.items()}),
    }


#: Ratios old / sampling of the tokens of completions.
_DRIFT: dict[str, tuple[float, ...]] = {
    "ratio 0.01": (0.01,),
    "ratio 0.3": (0.3,),
    "ratio 0.7": (0.7,),
    "ratio 1.6": (1.6,),
    "ratio 2.5": (2.5,),
    "ratio 4": (4.0,),
    "ratio 8": (8.0,),
    "ratio e^12": (float(np.exp(12.0)),),
    "ratio 2.5 before 0.5": (2.5, 0.5),
    "ratio 1.8 before 1.9": (1.8, 1.9),
}


def _correction_numbers(row: Convention, backend: str | None) -> dict[str, tuple[str, Any]]:
    """The weight of the first token of each completion."""
    words = "weight of the completion's first token"
    if not row.corrections.get("mode"):
        return {name: (words, None) for name in _DRIFT}
    offsets = np.cumsum([0, *map(len, _DRIFT.values())])
    sampling = np.full(offsets[-1], -1.0)
    old = sampling + [log(ratio) for ratios in _DRIFT.values() for ratio in ratios]
    weights, keep, _ = importance_weights(old, sampling, offsets, convention=row.name, backend=backend)
    kept = np.ones(len(old), bool) if keep is None else keep
    both = [np.asarray(x) for x in (weights, kept)]
    first = [x[offsets[:-1]] if len(x) == offsets[-1] else x for x in both]
    return {name: (words, float(weight) if stays else 0.0) for name, weight, stays in zip(_DRIFT, *first, strict=True)}


_REWARD_KL = {
    "beta": "weight of the KL taken off the reward",
    "kl_estimator": "its estimator",
    "kl_clamp_in": "ref_logp - old_logp is held in +-",
    "kl_clamp_out": "the estimate is held in +-",
}


def _reward_kl_settings(row: Convention) -> dict[str, tuple[str, Any]]:
    options = row.reward_kl_options()
    return {name: (words, options.get(name)) for name, words in _REWARD_KL.items()}


def _reward_kl_numbers(row: Convention, backend: str | None) -> dict[str, tuple[str, Any]]:
    """The reward 1 of completions of one token."""
    tokens = [token for token in _TOKENS if token.reference and token.counts]
    words = {
        token.name: f"a reward of 1, ref_logp {token.name.removeprefix('reference ')} old_logp" for token in tokens
    }
    if not row.reward_kl:
        return {name: (text, None) for name, text in words.items()}
    old = np.full(len(tokens), -1.0)
    found, _ = kl_in_reward(
        np.ones(len(tokens)), old, old + [token.reference for token in tokens], np.arange(len(tokens) + 1),
        convention=row.name, backend=backend,
    )  # fmt: skip
    return {name: (text, value) for (name, text), value in zip(words.items(), found.tolist(), strict=True)}


# --- Text


def _same(a: Any, b: Any) -> bool:
    """Equal; numbers but for the rounding of a sum and a difference."""
    if isinstance(a, float) and isinstance(b, float):
        return (isnan(a) and isnan(b)) or isclose(a, b, rel_tol=1e-12, abs_tol=1e-14)
    return bool(a == b)


def _shown(a: Any, b: Any) -> tuple[str, str]:
    """Both as text, with as many digits as it takes to see that they differ."""
    for digits in (7, 9, 12, 17):
        left, right = (_text(value, digits) for value in (a, b))
        if left != right or _same(a, b):
            break
    return left, right


def _text(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value + 0.0:.{digits}g}"
    return str(value)


_WIDTH = 44


def _lines(explanation: Explanation) -> Iterator[str]:
    two = explanation.b is not None
    yield f"{explanation.a}"
    if explanation.b is not None:
        yield f"{explanation.b}"
    cells = [(row, *_shown(row.a, row.b)) for row in explanation.rows]
    width = max(len(row.name) for row in explanation.rows)
    left_width = max(min(len(left), _WIDTH) for _, left, _ in cells)
    right_width = max(min(len(right), _WIDTH) for _, _, right in cells) if two else 0
    section = ""
    for row, left, right in cells:
        if row.a is None and row.b is None:
            continue
        if row.section != section:
            section = row.section
            yield ""
            yield section.upper()
        mark = "*" if row.differs else " "
        line = f"{mark} {row.name:<{width}}  {_cut(left):<{left_width}}"
        if two:
            line += f"  {_cut(right):<{right_width}}"
        yield f"{line}  {row.words}".rstrip()
    for whose in (explanation.a, explanation.b):
        if whose is not None and whose.notes:
            yield ""
            yield f"NOTES ON {whose.name}"
            yield from (f"- {note}" for note in whose.notes)
    if two:
        yield ""
        n = len(explanation.differences)
        yield f"{n} of {len(explanation.rows)} lines differ (*)" if n else "no line differs"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
