"""Shaped rewards: terms per completion that are no task reward, and how they enter the advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends
from . import _validate as check
from ._contract import Double, Int
from .advantages import finite_rewards, group_advantages, rewards_array
from .groups import label_groups, make_groups
from .tables import NAN_POLICIES

OVERLONG_FORMS = {
    "floored": "-penalty_factor at most, from the maximum length on",
    "unfloored": "the line goes on beyond the maximum length",
}
COMBINES = {
    "before": "added to the reward, then normalised together",
    "after": "added to the normalised task advantage",
    "per_reward": "every term normalised by itself, then added",
}

#: Tokens that :func:`repetition_penalty` sorts at a time, whole completions: it bounds the memory.
_CHUNK = 1 << 20


def overlong_penalty(
    lengths: npt.ArrayLike,
    *,
    max_completion_len: int,
    soft_punish_cache: int,
    form: str = "floored",
    penalty_factor: float = 1.0,
) -> Double:
    """A penalty for the last tokens before the maximum length, linear in their number.

        penalty = -penalty_factor * max(L - (max_completion_len - soft_punish_cache), 0) / soft_punish_cache

    Parameters
    ----------
    lengths : (n_completions,) or (P, G) integers
        Tokens of each completion.
    max_completion_len : integer >= 1
        From here on the penalty is whole.
    soft_punish_cache : integer, 0 to ``max_completion_len``
        The penalty starts after ``max_completion_len - soft_punish_cache`` tokens. 0: a step, 0 up
        to the maximum and whole beyond it.
    form : "floored" (default) or "unfloored"
        Beyond the maximum length: -penalty_factor (DAPO, TRL), or on along the line (verl).
    penalty_factor : number >= 0, default 1

    Returns
    -------
    float64, shaped like ``lengths``

    Raises
    ------
    ValueError, TypeError
        A negative length, a cache longer than the maximum, no cache in the unfloored form, which
        would divide by it; unknown names.

    Notes
    -----
    In a group of equal task rewards this penalty alone makes the advantages once it is added before
    normalising; see :func:`shape_rewards`.

    References
    ----------
    Yu et al. 2025 (DAPO), arXiv:2503.14476 eq. 13; TRL 1.16.0 ``get_soft_overlong_punishment``
    (floored); verl 0.9.1 ``DAPORewardManager`` (unfloored).

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.overlong_penalty([80, 90, 100, 120], max_completion_len=100, soft_punish_cache=20)
    array([ 0. , -0.5, -1. , -1. ])
    >>> gf.overlong_penalty([80, 90, 100, 120], max_completion_len=100, soft_punish_cache=20, form="unfloored")
    array([ 0. , -0.5, -1. , -2. ])
    """
    tokens = _lengths(lengths)
    form = check.one_of("form", form, OVERLONG_FORMS)
    longest = check.integer("max_completion_len", max_completion_len, least=1, most=check.MOST_TOKENS)
    cache = check.integer("soft_punish_cache", soft_punish_cache, least=0)
    factor = check.number("penalty_factor", penalty_factor, least=0.0)
    if cache > longest:
        raise ValueError(
            f"soft_punish_cache: {cache} tokens do not fit into max_completion_len={longest}, so that every completion "
            "would be punished; pass a shorter one"
        )
    if cache == 0:
        if form == "unfloored":
            raise ValueError(
                "soft_punish_cache: the unfloored line has no slope over 0 tokens; pass at least 1, or form='floored'"
            )
        penalty = np.where(tokens > longest, -1.0, 0.0)
    else:
        penalty = np.minimum(((longest - cache) - tokens) / cache, 0.0)
        if form == "floored":
            penalty = np.maximum(penalty, -1.0)
    return penalty * factor + 0.0  # no -0.0


def cosine_length_reward(
    lengths: npt.ArrayLike,
    correct: npt.ArrayLike,
    *,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    exceed_value: float | None = None,
    nan_policy: str | None = None,
) -> Double:
    """A reward of correctness that falls with the length of right answers and rises with that of wrong ones.

        reward = at_max + (at_zero - at_max) * (1 + cos(pi * min(L / max_len, 1))) / 2

    Right answers run from ``max_value_correct`` at length 0 down to ``min_value_correct`` at
    ``max_len``, wrong ones from ``min_value_wrong`` up to ``max_value_wrong``: a short wrong answer is worst.

    Parameters
    ----------
    lengths : (n_completions,) or (P, G) integers
    correct : as ``lengths``, bool or 0/1
    max_len : integer >= 1
        Longer completions count as this long.
    min_value_wrong, max_value_wrong, min_value_correct, max_value_correct : numbers, min <= max
    exceed_value : number, optional
        The reward of completions of ``max_len`` tokens or more, right or wrong, in place of the cosine (the
        paper's; TRL has none).
    nan_policy : "error" (default) or "exclude"
        A ``correct`` that is NaN (not verifiable) is an error, or gives NaN, which
        :func:`grpo_fast.group_advantages` can exclude.

    Returns
    -------
    float64, shaped like ``lengths``

    Raises
    ------
    ValueError, TypeError
        A negative length, bounds out of order, ``correct`` that is neither 0 nor 1, shapes that disagree.

    References
    ----------
    Yeo et al. 2025, arXiv:2502.03373, appendix C.1; TRL 1.16.0 ``get_cosine_scaled_reward``.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.cosine_length_reward([50, 50, 0, 200], [True, False, False, True], max_len=100)
    array([ 0.75, -0.75, -1.  ,  0.5 ])
    """
    tokens = _lengths(lengths)
    longest = check.integer("max_len", max_len, least=1, most=check.MOST_TOKENS)
    policy = check.one_of("nan_policy", "error" if nan_policy is None else nan_policy, NAN_POLICIES)
    right, unknown = _flags("correct", correct, tokens.shape, allow_nan=policy == "exclude")
    at_zero, at_max = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for which, name_min, low, name_max, high in (
        (right, "min_value_correct", min_value_correct, "max_value_correct", max_value_correct),
        (~right, "min_value_wrong", min_value_wrong, "max_value_wrong", max_value_wrong),
    ):
        low, high = check.number(name_min, low), check.number(name_max, high)
        if low > high:
            raise ValueError(f"{name_min}: {low:g} exceeds {name_max}={high:g}; swap them")
        at_zero[which], at_max[which] = (high, low) if which is right else (low, high)
    cosine = np.cos(np.minimum(tokens / longest, 1.0) * np.pi)
    reward = at_max + 0.5 * (at_zero - at_max) * (1.0 + cosine)
    if exceed_value is not None:
        reward[tokens >= longest] = check.number("exceed_value", exceed_value)
    reward[unknown] = np.nan
    return reward


def stop_properly(
    rewards: npt.ArrayLike, truncated: npt.ArrayLike, *, coef: float, nan_policy: str | None = None
) -> npt.NDArray[Any]:
    """Rewards with those of truncated completions scaled down, or replaced.

        coef >= 0:  r_i = coef * r_i where truncated          coef < 0:  r_i = coef where truncated

    Parameters
    ----------
    rewards : (n_completions,) or (P, G) real numbers
    truncated : as ``rewards``, bool or 0/1
        1 where the completion ended at the length limit and not by itself.
    coef : number <= 1
        From 0 to 1 a factor; below 0 the new reward itself.
    nan_policy : "error" (default) or "exclude"
        Whether a reward may be NaN and stay so. One that is replaced may always be.

    Returns
    -------
    Shaped like ``rewards``, of their float dtype (float64 for integers and bools)

    Raises
    ------
    ValueError, TypeError
        A NaN (unless excluded) or an infinity, named; shapes that disagree; ``coef`` above 1, which
        would reward truncation.

    Notes
    -----
    A factor makes a *negative* reward of a truncated completion better; where rewards can be
    negative, replace.

    References
    ----------
    OpenRLHF ``--stop_properly_penalty_coef`` (both signs) and NeMo-RL ``reward_shaping`` (0 to 1), as read;
    NVIDIA ProRL v2.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.stop_properly([1.0, 1.0, 0.5], [False, True, True], coef=0.25)
    array([1.   , 0.25 , 0.125])
    >>> gf.stop_properly([1.0, 1.0, 0.5], [False, True, True], coef=-0.5)
    array([ 1. , -0.5, -0.5])
    """
    array = rewards_array("rewards", rewards)
    factor = check.number("coef", coef)
    if factor > 1:
        raise ValueError(f"coef: expected a number <= 1, got {factor:g}, which would reward truncation; pass 0 to 1")
    policy = check.one_of("nan_policy", "error" if nan_policy is None else nan_policy, NAN_POLICIES)
    cut, _ = _flags("truncated", truncated, array.shape)
    values = array.astype(np.float64)
    if factor < 0:
        values[cut] = factor
    way = None if policy == "exclude" else "drop that row, or pass nan_policy='exclude'"
    values = finite_rewards("rewards", values, way)
    if factor >= 0:
        values = np.where(cut, values * factor + 0.0, values)
    return check.narrow(values, array.dtype.newbyteorder("="))


def repetition_penalty(
    token_ids: npt.ArrayLike,
    token_offsets: npt.ArrayLike,
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    mask: npt.ArrayLike | None = None,
) -> Double:
    """A penalty for the share of a completion's n-grams of tokens that occurred before.

        penalty = max_penalty * (1 - distinct n-grams / n-grams)

    Parameters
    ----------
    token_ids : (n_tokens,) integers
    token_offsets : (n_completions + 1,) integers
        Tokens of completion i are ``[token_offsets[i], token_offsets[i + 1])``.
    ngram_size : integer >= 1, default 3
    max_penalty : number <= 0, default -1
        What a completion that repeats one n-gram for ever comes close to.
    mask : (n_tokens,) bool or 0/1
        Tokens with 0 (tool output) are left out, as if they were not there.

    Returns
    -------
    (n_completions,) float64
        0 for completions of fewer than ``ngram_size`` tokens.

    Raises
    ------
    ValueError, TypeError
        Offsets that decrease or leave the buffer, a penalty above 0, ids that are not integers.

    Notes
    -----
    N-grams are compared exactly, by numbering and sorting, never by a hash that could collide.

    References
    ----------
    Yeo et al. 2025, arXiv:2502.03373, appendix C.2; TRL 1.16.0 ``get_repetition_penalty_reward``.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.repetition_penalty([1, 2, 3, 4, 5, 5, 5, 5, 5], [0, 4, 9], ngram_size=2)
    array([ 0.  , -0.75])
    """
    ids = check.integers("token_ids", token_ids)
    offsets = check.offsets("token_offsets", token_offsets, len(ids), "token_ids")
    size = check.integer("ngram_size", ngram_size, least=1, most=check.MOST_TOKENS)
    worst = check.number("max_penalty", max_penalty)
    if worst > 0:
        raise ValueError(f"max_penalty: expected a number <= 0, got {worst:g}; pass its negative")
    if mask is not None:
        counted = check.mask("mask", mask, len(ids)) != 0
        offsets = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])[offsets]
        ids = ids[counted]
    total = np.maximum(np.diff(offsets) - size + 1, 0)
    distinct = np.zeros(len(total), np.int64)
    first = 0
    while first < len(total):  # some completions at a time, at least one
        last = max(int(np.searchsorted(offsets, offsets[first] + _CHUNK, side="right")) - 1, first + 1)
        distinct[first:last] = _distinct(ids, offsets[first : last + 1], size)
        first = last
    repeated = np.where(total > 0, 1 - distinct / np.maximum(total, 1), 0.0)
    return repeated * worst + 0.0  # no -0.0


def _distinct(ids: Int, offsets: Int, size: int) -> Int:
    """Different n-grams of each completion."""
    n = len(offsets) - 1
    lengths = np.diff(offsets)
    owner = np.repeat(np.arange(n), lengths)
    codes, bound = _numbered(ids[offsets[0] : offsets[-1]])
    # Codes of twice the width come from two of half of it, those of any other from two that overlap.
    width = 1
    while width < size and len(codes):
        step = min(width, size - width)
        codes, bound = _paired(codes[:-step], bound, codes[step:], bound)
        width += step
    first = np.arange(len(codes))
    inside = first + size <= (offsets[1:] - offsets[0])[owner[: len(codes)]]
    grams, _ = _paired(owner[: len(codes)][inside], n, codes[inside], bound)
    # A gram with its completion in front occurs first once: where sorted neighbours differ.
    order = np.argsort(grams, kind="stable")
    grams = grams[order]
    new = np.ones(len(grams), bool)
    new[1:] = grams[1:] != grams[:-1]
    return np.bincount(owner[: len(codes)][inside][order[new]], minlength=n)


def _numbered(ids: Int) -> tuple[Int, int]:
    """(codes, bound): numbers from 0 below ``bound``, equal where the ids are."""
    if len(ids) == 0:
        return ids, 1
    low, high = int(ids.min()), int(ids.max())
    if high - low < 1 << 31:
        return ids - low, high - low + 1
    known, codes = np.unique(ids, return_inverse=True)
    return codes.astype(np.int64, copy=False), len(known)


def _paired(a: Int, bound_a: int, b: Int, bound_b: int) -> tuple[Int, int]:
    """One number for every pair, numbered anew where their product would leave int64."""
    if bound_a * bound_b >= 1 << 63:
        known, a = np.unique(a, return_inverse=True)
        bound_a = max(len(known), 1)
    if bound_a * bound_b >= 1 << 63:
        known, b = np.unique(b, return_inverse=True)
        bound_b = max(len(known), 1)
    return a * bound_b + b, bound_a * bound_b


def shape_rewards(
    rewards: npt.ArrayLike,
    terms: Any,
    *,
    weights: Any = None,
    combine: str = "before",
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    trajectory_ids: Any = None,
    trajectory_reward: str | None = None,
    baseline: str | None = None,
    scale: str | None = None,
    ddof: int | None = None,
    eps: float | None = None,
    singleton: str | None = None,
    nan_policy: str | None = None,
    reward_weights: npt.ArrayLike | None = None,
    backend: str | None = None,
    **options: Any,
) -> tuple[npt.NDArray[Any], dict[str, float]]:
    """Advantages of task rewards and shaping terms together, and how much of them is shaping.

        before      A = normalise(r + sum_k w_k term_k)
        after       A = normalise(r) + sum_k w_k term_k
        per_reward  A = normalise(r) + sum_k w_k normalise(term_k)

    ``normalise`` is :func:`grpo_fast.group_advantages` with the options given here.

    Parameters
    ----------
    rewards : (n_completions,), (n_completions, n_rewards) with groups, or (P, G) without
        The task's.
    terms : (n_terms, n_completions), a list of such rows, or a mapping of names to them
        One number per completion, as :func:`overlong_penalty` and the like give. (n_terms, P, G)
        for such rewards. A single row is one term.
    weights : (n_terms,), or a mapping of the same names; default 1 each
    combine : "before" (default; what the frameworks do), "after" or "per_reward" (GDPO)
    group_ids, group_offsets, trajectory_ids, trajectory_reward, baseline, scale, ddof, eps, singleton, reward_weights
        As in :func:`grpo_fast.group_advantages`. A term of a trajectory with several rows is
        reduced as its reward is.
    nan_policy : "error" (default) or "exclude"
        A completion whose task reward is NaN gets 0, whatever its terms; a term that is NaN adds nothing.
    backend : "cython", "numba" or "numpy"; None is the one in force
    **options
        The other keywords of :func:`grpo_fast.group_advantages`.

    Returns
    -------
    (advantages, metrics)
        ``advantages`` as :func:`grpo_fast.group_advantages` returns them. Of ``metrics``, with A0 the
        advantages without the terms:

        - ``shaping_share``: sum (A - A0)^2 / (sum A0^2 + sum (A - A0)^2), over trajectories; 0 where the
          terms change nothing, 1 where the task gives no signal;
        - ``groups_decided_by_shaping``: groups in which A0 is 0 everywhere and A is not;
        - ``groups``: their number.

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.group_advantages`; terms or weights that are not finite or do not fit, named.

    Notes
    -----
    In a group of equal task rewards, ``before`` makes of a term of any size, however small, advantages
    of unit variance: the policy learns the term and nothing else there, and the group looks alive to
    a filter. ``after`` keeps its size. Filter on the task reward (:func:`grpo_fast.informative_groups`).
    Rewards of 32 bits or fewer are combined with terms of 32 bits, so that equal means the same as
    without terms.

    References
    ----------
    NVIDIA-NeMo/RL#2431 and #2478; arXiv:2601.05242 (GDPO); arXiv:2503.14476 section 3.4.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> task, bonus = [1, 1, 1, 1], {"format": [0.001, 0, 0, 0]}
    >>> advantages, metrics = gf.shape_rewards(task, bonus, group_offsets=[0, 4])
    >>> advantages.round(3), metrics["shaping_share"], metrics["groups_decided_by_shaping"]
    (array([ 1.732, -0.577, -0.577, -0.577]), 1.0, 1.0)
    >>> gf.shape_rewards(task, bonus, combine="after", group_offsets=[0, 4])[0]
    array([0.001, 0.   , 0.   , 0.   ])
    """
    combine = check.one_of("combine", combine, COMBINES)
    array = rewards_array("rewards", rewards)
    grid = array.ndim == 2 and group_ids is None and group_offsets is None
    shape = array.shape if grid else array.shape[:1]
    policy = check.one_of("nan_policy", "error" if nan_policy is None else nan_policy, NAN_POLICIES)
    table, factors = _terms(terms, weights, shape, policy)
    if grid:
        if reward_weights is not None:
            raise ValueError(
                f"reward_weights: shape {shape} is one reward per completion; leave them out, or pass rewards of "
                "shape (n_completions, n_rewards) with group_ids or group_offsets"
            )
        if trajectory_ids is not None:
            raise ValueError(
                "trajectory_ids: (P, G) rewards are one per trajectory already; pass flat rewards with group_ids"
            )
        group_offsets = np.arange(shape[0] + 1) * shape[1]
    task = array.reshape(-1) if grid else array
    if task.dtype.itemsize < 4:  # 16-bit results would lose small terms; what equal means stays the same
        task = task.astype(np.float32)
    missing = np.isnan(task) if task.ndim == 1 else np.isnan(task).all(axis=1)
    table[:, missing] = np.nan  # such a completion is left out, whatever its terms

    common: dict[str, Any] = dict(
        group_ids=group_ids, group_offsets=group_offsets, trajectory_ids=trajectory_ids,
        trajectory_reward=trajectory_reward, backend=backend,
    )  # fmt: skip
    how = dict(common, baseline=baseline, scale=scale, ddof=ddof, eps=eps, singleton=singleton, **options)

    plain = group_advantages(task, reward_weights=reward_weights, nan_policy=policy, **how).astype(np.float64)
    if combine == "before" and len(table):
        columns = task if task.ndim == 2 else task[:, None]
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
            columns = np.concatenate([columns, table.T.astype(columns.dtype)], axis=1)
        own = np.ones(columns.shape[1] - len(table)) if reward_weights is None else reward_weights
        factors = np.concatenate([check.real("reward_weights", own).astype(np.float64), factors])
        advantages = group_advantages(columns, reward_weights=factors, nan_policy="exclude", **how).astype(np.float64)
    else:
        advantages = plain.copy()
        for row, factor in zip(table, factors.tolist(), strict=True):
            if combine == "per_reward":
                values = group_advantages(row, nan_policy="exclude", **how)
            elif trajectory_ids is not None:
                values = group_advantages(row, baseline="none", scale="none", nan_policy="exclude", **common)
            else:
                values = np.where(np.isnan(row), 0.0, row)
            advantages += factor * values
    metrics = _shares(plain, advantages, group_ids, group_offsets, trajectory_ids, backend)
    return check.narrow(advantages.reshape(shape), array.dtype.newbyteorder("=")), metrics


def _shares(
    plain: Double, advantages: Double, group_ids: Any, group_offsets: Any, trajectory_ids: Any, backend: str | None
) -> dict[str, float]:
    """What of the advantages would not be there without the terms."""
    groups = make_groups(len(plain), group_ids, group_offsets)
    rows = np.arange(len(plain))
    if trajectory_ids is not None:
        trajectories = label_groups("trajectory_ids", trajectory_ids, len(plain), "completion")
        rows = trajectories.order[trajectories.offsets[:-1]]
    size = np.abs(np.concatenate([plain, advantages])).max(initial=0.0) or 1.0  # squares that stay finite
    table = np.stack([plain / size, (advantages - plain) / size], axis=1)[rows] ** 2
    task, shaping = _backends.get(backend).sum_columns(np.ascontiguousarray(table)).tolist()
    alive = [np.bincount(groups.codes[a != 0], minlength=groups.n_groups) > 0 for a in (plain, advantages)]
    return {
        "shaping_share": shaping / (task + shaping) if shaping else 0.0,
        "groups_decided_by_shaping": float(np.count_nonzero(~alive[0] & alive[1])),
        "groups": float(groups.n_groups),
    }


def _terms(terms: Any, weights: Any, shape: tuple[int, ...], policy: str) -> tuple[Double, Double]:
    """(n_terms, n) terms and their weights."""
    named = isinstance(terms, Mapping)
    if named:
        rows = [(f"terms[{name!r}]", row) for name, row in terms.items()]
    else:
        if not isinstance(terms, (list, tuple)) or (len(terms) and np.ndim(terms[0]) < len(shape)):
            array = check.any_array("terms", terms)
            terms = array[None] if array.shape == shape else array
            if terms.ndim == 0:
                raise ValueError(f"terms: expected rows of shape {shape}, got a single number; pass one per completion")
        rows = [(f"terms[{k}]", row) for k, row in enumerate(terms)]
    way = None if policy == "exclude" else "mend it, or pass nan_policy='exclude' for it to add nothing"
    table = np.empty((len(rows), int(np.prod(shape))))
    for k, (name, row) in enumerate(rows):
        array = check.any_array(name, row)
        if array.shape != shape:
            raise ValueError(
                f"{name}: expected shape {shape}, one number per completion, got {array.shape}; terms are "
                "(n_terms, n_completions)"
            )
        table[k] = finite_rewards(name, check.real(name, array, ndim=array.ndim), way).reshape(-1)
    if weights is None:
        return table, np.ones(len(rows))
    if isinstance(weights, Mapping):
        if not named or set(weights) != set(terms):
            raise ValueError(
                f"weights: their names {sorted(map(str, weights))} are not those of the terms; pass one weight per term"
            )
        weights = [weights[name] for name in terms]
    factors = check.real("weights", weights).astype(np.float64)
    check.length("weights", factors, len(rows), "term")
    check.finite("weights", factors, "weight")
    return table, factors


def _lengths(lengths: npt.ArrayLike) -> Int:
    """Whole numbers >= 0 of any shape."""
    array = check.any_array("lengths", lengths)
    if array.ndim == 0:
        raise ValueError("lengths: expected one per completion, got a single number; pass a list of them")
    flat = check.integers("lengths", array.reshape(-1))
    if (flat < 0).any():
        at = int(np.argmax(flat < 0))
        raise ValueError(f"lengths: lengths[{at}]={flat[at]} is negative; pass the number of tokens")
    return flat.reshape(array.shape)


def _flags(
    name: str, values: npt.ArrayLike, shape: tuple[int, ...], *, allow_nan: bool = False
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(which are 1, which are NaN) of bools or 0 and 1."""
    array = check.any_array(name, values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, one entry per completion, got {array.shape}; reshape it")
    array = check.real(name, array, ndim=array.ndim)
    unknown: npt.NDArray[np.bool_] = np.isnan(array)
    wrong = (array != 0) & (array != 1) & ~(unknown if allow_nan else np.zeros_like(unknown))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        entry = f"{name}[{', '.join(map(str, at))}]={array[at]}"
        raise ValueError(f"{name}: expected bool, or 0 and 1, but {entry}; pass flags, not scores")
    return array == 1, unknown
