"""Process advantages: a reward per step, normalised in a pool of steps, credited to tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _backends
from . import _validate as check
from ._contract import LARGEST, Double, Int, PoolPlan
from .advantages import check_ddof, check_eps, finite_rewards, rewards_array, standardize_rows, weighted_sum
from .conventions import advantage_options
from .groups import Groups, crossed, label_groups, make_groups, members, trajectory_groups
from .tables import CREDITS, POOLS, STEP_FORMS, TAILS


def process_advantages(
    step_rewards: npt.ArrayLike,
    step_ends: npt.ArrayLike,
    step_offsets: npt.ArrayLike,
    token_offsets: npt.ArrayLike,
    *,
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    trajectory_ids: Any = None,
    step_groups: Any = None,
    normalize: str | None = None,
    step_form: str | None = None,
    prefix_value_start: float | None = None,
    credit: str | None = None,
    gamma: float | None = None,
    temperature: float | None = None,
    tail: str | None = None,
    convention: str | None = None,
    ddof: int | None = None,
    eps: float | None = None,
    outcome_rewards: npt.ArrayLike | None = None,
    outcome_weight: float | None = None,
    level: str = "token",
    out: npt.NDArray[Any] | None = None,
    backend: str | None = None,
) -> npt.NDArray[Any]:
    """Every token gets the normalised rewards of its own and the later steps.

        A[i, t] = sum over the steps j of i with end_j >= t of (R_j - mean(R)) / (std(R) + eps)

    with mean and std over all steps of all completions of the group. In general: ``step_form``,
    then the weights of ``credit="min"``, then each pool of steps is normalised, then ``credit``,
    ``tail``, and the outcome advantage on top.

    Parameters
    ----------
    step_rewards : (n_steps,) any real dtype
        NaN: an unscored step. It is in no pool, and its tokens look to the next scored step.
    step_ends : (n_steps,) integers
        Index *within the completion* of the step's last token, strictly increasing.
    step_offsets, token_offsets : (n_completions + 1,) integers
        Steps and tokens of completion i are those from ``offsets[i]`` up to ``offsets[i + 1]``.
    group_ids, group_offsets : as in :func:`grpo_fast.group_advantages`
        Needed by the pools "group" and "step_index", by ``step_groups`` and ``outcome_rewards``.
    trajectory_ids : (n_completions,) of any type
        Rows of one trajectory, in time order: its steps are one sequence. Absent: each row its own.
    step_groups : (n_steps,) of any type, or several such columns
        A pool is the steps with the same id in the same group; in place of ``normalize``.
    normalize : "group" (default), "completion", "batch", "step_index" or "none"
        The pool: all steps of the group, of the completion (of its whole trajectory, where there
        are trajectories), of the batch; the n-th steps of the group's trajectories, unscored ones
        counted; or the values as they are. A pool of one step, or of equal steps, gives exactly 0.
    step_form : "increment" (default), "cumulative_sum" or "prefix_value"
        The step's reward is R; the sum of R so far; or what R, the value of the prefix that ends
        there, adds to the value before, which is ``prefix_value_start`` (default 0) at first.
    credit : "to_go" (default), "step" or "min"
        Own and later steps, the later ones times ``gamma`` (default 1) per scored step; the own
        step only; or to_go after R_j has become R_j softmax(-R / temperature)_j over the scored
        steps of the trajectory (``temperature`` 0.1 by default).
    tail : "zero" (default) or "last"
        Tokens after the last scored step of the *trajectory*: 0, or what that step's tokens get.
        Tokens between the rows of a trajectory look to its next step. No scored step: 0.
    convention : "trl", "verl", ..., None
        Sets ``ddof`` and ``eps`` as that framework's outcome advantages have them; the rest is its paper's, as no
        framework has process advantages.
    ddof, eps : 0 or 1, default 0, and a number >= 0, default 1e-8
        Of every std, as in :func:`grpo_fast.group_advantages`.
    outcome_rewards : (n_completions,) or (n_completions, n_rewards)
        Their group-relative advantages (mean and std of the group, same ``ddof`` and ``eps``),
        times ``outcome_weight`` (default 1), are added to every token.
    level : "token" or "step"
        One number per token, or per step: what its tokens get. The loss takes either and adds
        completion-level advantages itself, so "step" refuses ``outcome_rewards``. Tokens after the
        last step of a *row* have no number then: the loss takes 0, which is not what
        ``tail="last"`` and trajectories of several rows say.
    out : writable, contiguous, native array of the result's shape, float32, float64 or the result's dtype
        Filled and returned.
    backend : "cython", "numba" or "numpy"; None is the one in force

    Returns
    -------
    (token_offsets[-1],), slots before ``token_offsets[0]`` being 0, or (n_steps,)
        Of the step rewards' float dtype (float64 for integers and bools), or ``out``.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and the first bad index: offsets or ends that do not fit, infinite
        rewards, groups that are needed and missing, options that do not apply.

    Notes
    -----
    What the default does to a policy that chooses its number of steps: a token's baseline is the
    number of remaining steps times the mean, and so depends on the trajectory's own number of
    steps. That is a *different objective* from the expected return: where all steps earn the same,
    taking more or fewer of them makes no difference at all, whatever they earn. It resists stuffing
    with steps, but it can reverse the sign of an outcome that is one of the step rewards. With
    ``normalize="none"`` the sums are the returns themselves.

    Each pool is summed exactly and each trajectory by itself, so neither the order of completions
    nor what their neighbours hold changes a bit.

    References
    ----------
    Shao et al. 2024, arXiv:2402.03300, section 4.1.3; prefix values: Kazemnejad et al. 2024,
    arXiv:2410.01679 (VinePPO: ``step_form="prefix_value", normalize="none", credit="step"``);
    min: Cheng et al. 2025, arXiv:2504.15275 (PURE).

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.process_advantages(
    ...     [1, 0, 1, 0, 0, 1], [1, 3, 2, 0, 1, 2], [0, 2, 3, 6], [0, 4, 7, 12], group_offsets=[0, 3], eps=0.0
    ... )
    array([ 0.,  0., -1., -1.,  1.,  1.,  1., -1.,  0.,  1.,  0.,  0.])
    """
    kernels = _backends.get(backend)
    theirs = advantage_options(convention, None)
    options = _options(
        normalize,
        step_groups is not None,
        step_form,
        prefix_value_start,
        credit,
        gamma,
        temperature,
        tail,
        theirs.get("ddof") if ddof is None else ddof,
        theirs.get("eps") if eps is None else eps,
    )
    check.one_of("level", level, ("token", "step"))
    weight = _outcome_weight(outcome_rewards, outcome_weight, level)

    tokens = check.offsets("token_offsets", token_offsets)
    n = len(tokens) - 1
    rewards = check.real("step_rewards", step_rewards)
    dtype = rewards.dtype.newbyteorder("=")
    steps = _steps(rewards, step_ends, step_offsets, np.diff(tokens))
    size = int(tokens[-1]) if level == "token" else len(rewards)
    if out is None:
        try:
            out = np.empty(size, dtype)
        except (MemoryError, ValueError):
            raise ValueError(
                f"token_offsets: they end at {size}, more tokens than fit into memory; check them"
            ) from None
    else:
        _check_out(out, size, dtype)
        inputs: dict[str, Any] = {"step_rewards": rewards, "step_ends": step_ends, "step_offsets": step_offsets}
        inputs |= {"token_offsets": token_offsets, "outcome_rewards": outcome_rewards}
        for name, array in inputs.items():
            if array is not None and np.may_share_memory(out, check.any_array(name, array)):
                raise ValueError(
                    f"out: it overlaps {name}, which would be overwritten while it is read; pass its own memory"
                )

    groups = _groups(n, group_ids, group_offsets, options.pool, outcome_rewards is not None)
    trajectories = Groups(np.arange(n), n)  # each row its own
    if trajectory_ids is not None:
        trajectories = label_groups("trajectory_ids", trajectory_ids, n, "completion")
        if groups is not None:
            trajectory_groups(trajectories, groups)  # refuses a trajectory in two groups

    timeline = _timeline(steps, trajectories)
    values, magnitude = _formed(steps.rewards[timeline.scored], timeline.bounds, options)
    if options.pool != "none":
        labels = None if step_groups is None else label_groups("step_groups", step_groups, len(rewards), "step")
        pools = _pools(options.pool, steps, timeline, trajectories, groups, labels)
        plan = PoolPlan(ddof=options.ddof, eps=options.eps, ulp=check.ulp(rewards.dtype))
        if magnitude is not None:
            values = _rounding_removed(values, magnitude, pools, plan.ulp)
        normalized = np.empty(len(values))
        kernels.standardize(values, pools.order, pools.offsets, plan, normalized)
        values = normalized
    if options.credit != "step":
        values = _running_sums(values, timeline.bounds, options.gamma, reverse=True)
    of_step, of_row_end = _spread(values, timeline, options.tail)

    if level == "step":
        of_all_steps = np.zeros(len(rewards))
        of_all_steps[steps.first : steps.first + len(of_step)] = of_step
        return check.narrow(of_all_steps, out.dtype, out)
    outcome = None
    if outcome_rewards is not None and groups is not None:
        plan = PoolPlan(ddof=options.ddof, eps=options.eps)
        outcome = weight * _outcome(kernels, outcome_rewards, groups, trajectories, plan)
    target = out if out.dtype.itemsize >= 4 else np.empty(size)  # rounded once: float64 first, then 16 bits
    target[: tokens[0]] = 0
    with_ends = _with_row_ends(of_step, steps, of_row_end, np.diff(tokens))
    kernels.expand_steps(*with_ends, tokens[:-1], tokens[1:], outcome, target)
    return out if target is out else check.narrow(target, out.dtype, out)


class _Options(NamedTuple):
    """Resolved and checked."""

    pool: str  # a row of POOLS, or "step_groups"
    form: str
    start: float
    credit: str
    gamma: float
    temperature: float
    tail: str
    ddof: int
    eps: float


def _options(
    normalize: str | None,
    step_groups: bool,
    step_form: str | None,
    prefix_value_start: float | None,
    credit: str | None,
    gamma: float | None,
    temperature: float | None,
    tail: str | None,
    ddof: int | None,
    eps: float | None,
) -> _Options:
    if step_groups and normalize is not None:
        raise ValueError(f"step_groups: normalize={normalize!r} names other pools; pass one of the two")
    form = check.one_of("step_form", "increment" if step_form is None else step_form, STEP_FORMS)
    if prefix_value_start is not None and form != "prefix_value":
        raise ValueError(
            f"prefix_value_start: step_form={form!r} has no use for it; pass step_form='prefix_value' or leave it out"
        )
    credit = check.one_of("credit", "to_go" if credit is None else credit, CREDITS)
    if gamma is not None and credit == "step":
        raise ValueError("gamma: credit='step' has no later steps to discount; pass credit='to_go' or leave it out")
    if temperature is not None and credit != "min":
        raise ValueError(f"temperature: credit={credit!r} has no use for it; pass credit='min' or leave it out")
    discount = 1.0 if gamma is None else check.number("gamma", gamma, least=0.0)
    if discount > 1:
        raise ValueError(f"gamma: expected a discount from 0 to 1, got {gamma!r}; pass one such as 0.99")
    pool = check.one_of("normalize", "group" if normalize is None else normalize, POOLS)
    return _Options(
        pool="step_groups" if step_groups else pool,
        form=form,
        start=0.0 if prefix_value_start is None else check.number("prefix_value_start", prefix_value_start),
        credit=credit,
        gamma=discount,
        temperature=0.1 if temperature is None else check.number("temperature", temperature, above=0.0),
        tail=check.one_of("tail", "zero" if tail is None else tail, TAILS),
        ddof=check_ddof(ddof),
        eps=check_eps(eps),
    )


def _outcome_weight(outcome_rewards: npt.ArrayLike | None, outcome_weight: float | None, level: str) -> float:
    if outcome_rewards is None:
        if outcome_weight is not None:
            raise ValueError("outcome_weight: there are no outcome_rewards; pass them or leave it out")
        return 0.0
    if level == "step":
        raise ValueError(
            "outcome_rewards: level='step' returns steps only; pass level='token', "
            "or give the loss group_advantages(...) with these as step_advantages"
        )
    return 1.0 if outcome_weight is None else check.number("outcome_weight", outcome_weight)


def _groups(n: int, group_ids: Any, group_offsets: npt.ArrayLike | None, pool: str, outcome: bool) -> Groups | None:
    if group_ids is not None or group_offsets is not None:
        return make_groups(n, group_ids, group_offsets)
    if pool in ("group", "step_index"):
        raise ValueError(
            f"group_ids: normalize={pool!r} compares the steps of a group; pass group_ids or group_offsets, "
            "or normalize='completion', 'batch' or 'none'"
        )
    if pool == "step_groups":
        raise ValueError(
            "group_ids: step_groups are pools inside a group; pass group_ids or group_offsets, "
            "such as group_offsets=[0, n_completions] for one group"
        )
    if outcome:
        raise ValueError("group_ids: outcome_rewards are compared within a group; pass group_ids or group_offsets")
    return None


# ---- steps and their order ---------------------------------------------------------------------------


class _Steps(NamedTuple):
    """The steps that belong to completions."""

    rewards: Double  # NaN where unscored
    ends: Int
    offsets: Int  # from 0
    owner: Int
    first: int  # where they start in the arrays as given


def _steps(rewards: npt.NDArray[Any], step_ends: npt.ArrayLike, step_offsets: npt.ArrayLike, lengths: Int) -> _Steps:
    offsets = check.offsets("step_offsets", step_offsets, len(rewards), "step_rewards")
    check.length("step_offsets", offsets, len(lengths) + 1, "completion, plus one")
    ends = check.integers("step_ends", step_ends)
    check.length("step_ends", ends, len(rewards), "entry of step_rewards")
    check.step_ends(ends, offsets, lengths)
    first, last = int(offsets[0]), int(offsets[-1])
    values = np.ascontiguousarray(rewards[first:last], np.float64)
    with np.errstate(invalid="ignore"):
        wrong = np.abs(values) > LARGEST
    if wrong.any():
        at = int(np.argmax(wrong))
        how = "infinite" if np.isinf(values[at]) else "too large to compute with"
        raise ValueError(
            f"step_rewards: step_rewards[{first + at}]={values[at]} is {how}; "
            "clip it, or set it to NaN to leave the step unscored"
        )
    owner = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    return _Steps(values, ends[first:last], offsets - first, owner, first)


class _Timeline(NamedTuple):
    """Steps and the ends of rows, as events in the order of their trajectories."""

    place_of_step: Int  # (n_steps,)
    place_of_row_end: Int  # (n_completions,)
    next_scored: Int  # (n_events,) index in ``scored`` of the first scored step from here on, of any trajectory
    trajectory: Int  # (n_events,)
    scored: Int  # the scored steps
    bounds: Int  # (n_trajectories + 1,) where each trajectory lies in ``scored``
    number: Int  # of each scored step within its trajectory, unscored steps counted


def _timeline(steps: _Steps, trajectories: Groups) -> _Timeline:
    n_steps, n = len(steps.rewards), len(steps.offsets) - 1
    row = np.repeat(np.arange(n), np.diff(steps.offsets) + 1)
    order, edges = members(trajectories.codes[row], trajectories.n_groups)
    place = np.empty(n_steps + n, np.int64)
    place[order] = np.arange(n_steps + n)
    place_of_step = place[np.arange(n_steps) + steps.owner]

    step_at = np.full(n_steps + n, -1)
    step_at[place_of_step] = np.arange(n_steps)
    is_scored = np.zeros(n_steps + n, np.bool_)
    is_scored[place_of_step] = ~np.isnan(steps.rewards)
    scored_before = np.concatenate([[0], np.cumsum(is_scored)])
    steps_before = np.concatenate([[0], np.cumsum(step_at >= 0)])
    trajectory = np.repeat(np.arange(trajectories.n_groups), np.diff(edges))
    number = steps_before[:-1] - steps_before[edges[:-1]][trajectory]
    return _Timeline(
        place_of_step,
        place[steps.offsets[1:] + np.arange(n)],
        scored_before[:-1],
        trajectory,
        step_at[is_scored],
        scored_before[edges],
        number[is_scored],
    )


def _spread(values: Double, timeline: _Timeline, tail: str) -> tuple[Double, Double]:
    """From the scored steps to every step, and to the tokens after the last step of every row."""
    start, stop = timeline.bounds[timeline.trajectory], timeline.bounds[timeline.trajectory + 1]
    events = np.zeros(len(stop))
    ahead = timeline.next_scored < stop
    events[ahead] = values[timeline.next_scored[ahead]]
    if tail == "last":
        behind = ~ahead & (start < stop)
        events[behind] = values[stop[behind] - 1]
    return events[timeline.place_of_step], events[timeline.place_of_row_end]


def _with_row_ends(of_step: Double, steps: _Steps, of_row_end: Double, lengths: Int) -> tuple[Double, Int, Int]:
    """(values, offsets, ends) with one more step for the last tokens of a row, where they get anything but 0."""
    has_steps = steps.offsets[1:] > steps.offsets[:-1]
    last_end = np.full(len(lengths), -1)
    last_end[has_steps] = steps.ends[steps.offsets[1:][has_steps] - 1]
    added = (of_row_end != 0) & (last_end < lengths - 1)
    if not added.any():
        return of_step, steps.offsets, steps.ends
    at = steps.offsets[1:][added]
    offsets = steps.offsets.copy()
    offsets[1:] += np.cumsum(added)
    return np.insert(of_step, at, of_row_end[added]), offsets, np.insert(steps.ends, at, lengths[added] - 1)


# ---- their values ------------------------------------------------------------------------------------


def _formed(rewards: Double, bounds: Int, options: _Options) -> tuple[Double, Double | None]:
    """What is normalised: R by ``step_form``, then by the weights of ``credit="min"``.

    Of differences also the larger magnitude of the two numbers that each is the difference of.
    """
    magnitude = None
    if options.form == "cumulative_sum":
        rewards = _running_sums(rewards, bounds, 1.0, reverse=False)
    elif options.form == "prefix_value":
        before = np.empty_like(rewards)
        before[1:] = rewards[:-1]
        before[bounds[:-1][bounds[:-1] < bounds[1:]]] = options.start
        magnitude = np.maximum(np.abs(rewards), np.abs(before))
        rewards = rewards - before
    return _softmin(rewards, bounds, options.temperature) if options.credit == "min" else rewards, magnitude


def _rounding_removed(values: Double, magnitude: Double, pools: Groups, ulp: float) -> Double:
    """Pools that are equal but for the rounding of what they are differences of, made equal.

    The rule of :class:`PoolPlan`, with the magnitude that the rounding had: 0.9 - 0.8 and 0.2 - 0.1
    in float32 are many ULP of 0.1 apart.
    """
    starts = pools.offsets[:-1][np.diff(pools.offsets) > 0]
    if len(starts) == 0:
        return values
    sizes = np.diff(starts, append=len(values))
    ordered = values[pools.order]
    least, most = np.minimum.reduceat(ordered, starts), np.maximum.reduceat(ordered, starts)
    _, exponent = np.frexp(np.maximum.reduceat(magnitude[pools.order], starts))
    equal = most - least <= 4 * np.ldexp(ulp, exponent - 1)
    result = np.empty_like(values)
    result[pools.order] = np.where(np.repeat(equal, sizes), np.repeat(least, sizes), ordered)
    return result


def _softmin(values: Double, bounds: Int, temperature: float) -> Double:
    """R_j softmax(-R / temperature)_j within each trajectory."""
    if len(values) == 0:
        return values
    nonempty = np.flatnonzero(np.diff(bounds))
    sizes = np.diff(bounds)[nonempty]
    least = np.repeat(np.minimum.reduceat(values, bounds[nonempty]), sizes)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((least - values) / temperature)
    of = np.repeat(np.arange(len(sizes)), sizes)
    return values * (weights / np.bincount(of, weights)[of])


def _running_sums(values: Double, bounds: Int, gamma: float, *, reverse: bool) -> Double:
    """total_k = value_k + gamma total_(k - 1) within each trajectory, from its other end in ``reverse``.

    One position of all trajectories at a time: nothing but its own steps enters a sum.
    """
    lengths = np.diff(bounds)
    longest_first = np.argsort(-lengths, kind="stable")
    start = (bounds[1:] - 1 if reverse else bounds[:-1])[longest_first]
    left = np.searchsorted(-lengths[longest_first], -np.arange(lengths.max(initial=0)))  # trajectories longer than k
    result = np.empty_like(values)
    total = np.zeros(len(start))
    for k, count in enumerate(left):
        at = start[:count] - k if reverse else start[:count] + k
        total = values[at] + gamma * total[:count]
        result[at] = total
    return result


def _pools(
    pool: str, steps: _Steps, timeline: _Timeline, trajectories: Groups, groups: Groups | None, labels: Groups | None
) -> Groups:
    """The pool of every scored step."""
    if pool == "batch":
        return Groups(np.zeros(len(timeline.scored), np.int64), 1)
    row = steps.owner[timeline.scored]
    if pool == "completion" or groups is None:
        return Groups(trajectories.codes[row], trajectories.n_groups)
    own = Groups(groups.codes[row], groups.n_groups)
    if pool == "step_index":
        return crossed(own, Groups(timeline.number, int(timeline.number.max(initial=0)) + 1))
    if labels is not None:
        return crossed(own, Groups(labels.codes[steps.first + timeline.scored], labels.n_groups))
    return own


def _outcome(
    kernels: Any, outcome_rewards: npt.ArrayLike, groups: Groups, trajectories: Groups, plan: PoolPlan
) -> Double:
    """The advantage of every completion."""
    name = "outcome_rewards"
    array = rewards_array(name, outcome_rewards)
    check.length(name, array, len(groups.codes), "completion")
    way = "drop that row, or add group_advantages(..., nan_policy='exclude') yourself"
    values = finite_rewards(name, array, way)
    if values.ndim == 2:
        values = weighted_sum(name, values, None)
    plan = plan._replace(ulp=check.ulp(array.dtype))
    return standardize_rows(kernels, name, values, groups, trajectories, None, plan)


def _check_out(out: Any, size: int, dtype: np.dtype[Any]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: expected a NumPy array, got {type(out).__name__}; pass np.empty({size})")
    allowed = dict.fromkeys(("float32", "float64", dtype.name))
    wrong = (
        f"shape {out.shape}"
        if out.shape != (size,)
        else f"dtype {out.dtype}"
        if out.dtype.name not in allowed or not out.dtype.isnative
        else "a read-only array"
        if not out.flags.writeable
        else "an array with strides"
        if not (out.flags.c_contiguous and out.flags.aligned)
        else None
    )
    if wrong is not None:
        raise ValueError(
            f"out: expected a writable contiguous array of shape ({size},) and dtype {' or '.join(allowed)}, "
            f"got {wrong}; leave it out to get a new one"
        )
