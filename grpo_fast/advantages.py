"""Outcome advantages: one reward per completion against the others of its group."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends
from . import _validate as check
from ._contract import LARGEST, SINGLETON_ZERO, Double, Int, PoolPlan
from .groups import Groups, label_groups, make_groups, members, trajectory_groups
from .tables import BASELINES, NAN_POLICIES, SCALES, SINGLETONS, TRAJECTORY_REWARDS


def compute_grpo_advantages(rewards: npt.ArrayLike, eps: float = 1e-8) -> npt.NDArray[Any]:
    """Rewards less their group's mean, over its standard deviation: the textbook function.

        A[p, g] = (r[p, g] - mean(r[p])) / (std(r[p]) + eps)

    Parameters
    ----------
    rewards : (P, G) real numbers
        A row is a group: G completions of one prompt.
    eps : number >= 0
        Added to the population standard deviation (ddof 0).

    Returns
    -------
    (P, G) of the rewards' float dtype, float64 for integers and bools
        A row of equal rewards, or of one, is exactly 0.

    Raises
    ------
    ValueError, TypeError
        Not two dimensions, not real numbers, or a NaN or infinity, which is named.

    References
    ----------
    Shao et al. 2024, arXiv:2402.03300, section 4.1.2.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.compute_grpo_advantages([[1, 0, 1, 0], [2, 2, 2, 2]], eps=0.0)
    array([[ 1., -1.,  1., -1.],
           [ 0.,  0.,  0.,  0.]])
    """
    array = check.real("rewards", rewards, ndim=2)
    return group_advantages(array, eps=eps)


def group_advantages(
    rewards: npt.ArrayLike,
    *,
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
) -> npt.NDArray[Any]:
    """Rewards less a baseline, over a scale, both from the group a completion belongs to.

        A_i = (r_i - b_i) / s_i

    Parameters
    ----------
    rewards : (n_completions,), (n_completions, n_rewards) with groups, or (P, G) without
        Any real dtype. (P, G) is P groups of G. Several rewards are summed with
        ``reward_weights`` first, then normalised.
    group_ids : (n_completions,) of any type and order, or several such columns
        See :func:`grpo_fast.groups.make_groups`.
    group_offsets : (n_groups + 1,) integers, in place of ids where groups are contiguous
    trajectory_ids : (n_completions,), as ``group_ids``
        Rows of one trajectory, in time order. It counts once in all statistics, with one reward,
        and its advantage goes to all its rows.
    trajectory_reward : "last" (default), "sum" or "error"
        The reward of a trajectory whose rows differ: that of its last row, their sum, or a
        ValueError. Rows whose reward is NaN and excluded have no say.
    baseline : "mean" (default), "leave_one_out" (mean of the others) or "none" (0)
    scale : "group" (default; std of the group + eps), "batch" (std of all rewards + eps) or "none" (1)
        A std of 0 does not divide.
    ddof, eps : 0 or 1, default 0, and a number >= 0, default 1e-8
        The std divides by m - ddof; eps is added to the std. Without a scale they are not used.
    singleton : "zero" (default), "raw" or "error"
        A group with one reward: 0, the reward itself (over 1 + eps when scaled), or a ValueError.
        Without a baseline it is like any other group, unless it is an error.
    nan_policy : "error" (default) or "exclude"
        A row whose reward is NaN gets 0 and stays out of the statistics. Of several rewards, those
        that are NaN add nothing; a row is excluded where all are.
    reward_weights : (n_rewards,), default 1 each
    backend : "cython", "numba" or "numpy"; None is the one in force

    Returns
    -------
    (n_completions,), or (P, G) for such rewards, of the rewards' float dtype
        float64 for integers and bools; what would overflow a narrow dtype is its largest number.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and the first bad row: a NaN (unless excluded) or an infinity, groups
        that do not fit, a trajectory in two groups, unknown names.

    Notes
    -----
    Statistics are in float64, in two passes with exact sums, so the order of rows cannot change a
    bit. With a baseline, equal rewards give exactly 0. Equal means a range of at most 4 units in
    the last place at the largest magnitude, of float64 for such rewards, else of float32: two
    workers that compute the same score may differ by one, and that over eps would be an advantage
    of 0.6. 16-bit rewards are equal only where they are the same number.

    References
    ----------
    Shao et al. 2024, arXiv:2402.03300, section 4.1.2; leave-one-out: Ahmadian et al. 2024,
    arXiv:2402.14740; no scale: Liu et al. 2025, arXiv:2503.20783; batch scale: arXiv:2508.08221.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.group_advantages([1.0, 0.0, 0.0, 4.0], group_ids=["a", "b", "a", "b"], scale="none")
    array([ 0.5, -2. , -0.5,  2. ])
    >>> gf.group_advantages([[1, 0, 0]], baseline="leave_one_out", scale="none")
    array([[ 1. , -0.5, -0.5]])
    """
    kernels = _backends.get(backend)
    array = rewards_array("rewards", rewards)
    grid = array.ndim == 2 and group_ids is None and group_offsets is None
    if grid:
        if trajectory_ids is not None:
            raise ValueError(
                "trajectory_ids: (P, G) rewards are one per trajectory already; pass flat rewards with group_ids"
            )
        n_groups, size = array.shape
        groups = Groups(np.repeat(np.arange(n_groups), size), n_groups)
    else:
        if group_ids is None and group_offsets is None:
            raise ValueError(
                "group_ids: neither group_ids nor group_offsets tells the groups of flat rewards; "
                "pass one of the two, or rewards of shape (P, G)"
            )
        groups = make_groups(len(array), group_ids, group_offsets)
    nan_policy = check.one_of("nan_policy", "error" if nan_policy is None else nan_policy, NAN_POLICIES)
    way = "drop that row, or pass nan_policy='exclude'"
    values = finite_rewards("rewards", array, None if nan_policy == "exclude" else way)
    if reward_weights is not None and (grid or array.ndim == 1):
        raise ValueError(
            f"reward_weights: shape {array.shape} is one reward per completion; leave them out, or pass rewards of "
            "shape (n_completions, n_rewards) with group_ids or group_offsets"
        )
    if not grid and array.ndim == 2:
        values = weighted_sum("rewards", values, reward_weights)
    plan, no_singletons = _plan(baseline, scale, ddof, eps, singleton, check.ulp(array.dtype))
    advantages = standardize_rows(
        kernels,
        "rewards",
        values.reshape(-1),
        groups,
        None if trajectory_ids is None else label_groups("trajectory_ids", trajectory_ids, len(array), "completion"),
        trajectory_reward,
        plan,
        no_singletons=no_singletons,
    )
    return check.narrow(advantages.reshape(values.shape), array.dtype.newbyteorder("="))


def rewards_array(name: str, rewards: npt.ArrayLike) -> npt.NDArray[Any]:
    """(n,) or (n, k) real numbers."""
    array = check.any_array(name, rewards)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"{name}: expected shape (n_completions,), (n_completions, n_rewards) or (P, G), got {array.shape}; "
            "reshape it"
        )
    return check.real(name, array, ndim=array.ndim)


def finite_rewards(name: str, array: npt.NDArray[Any], nan_way_out: str | None) -> Double:
    """As float64, without infinities and, where there is a way out to name, without NaN."""
    values = np.ascontiguousarray(array, np.float64)
    wrong = np.isinf(values) if nan_way_out is None else ~np.isfinite(values)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        entry = f"{name}[{', '.join(map(str, at))}]"
        if np.isnan(values[at]):
            raise ValueError(f"{name}: {entry} is NaN; {nan_way_out}")
        raise ValueError(f"{name}: {entry}={values[at]} is infinite; clip it or drop that row")
    with np.errstate(invalid="ignore"):
        large = np.abs(values) > LARGEST
    if large.any():
        at = tuple(np.argwhere(large)[0].tolist())
        entry = f"{name}[{', '.join(map(str, at))}]={values[at]}"
        raise ValueError(f"{name}: {entry} is too large to compute with; scale it below {LARGEST:g}")
    return values


def weighted_sum(name: str, values: Double, weights: npt.ArrayLike | None) -> Double:
    """One reward per row; terms that are NaN add nothing, a row of nothing else is NaN."""
    n_rewards = values.shape[1]
    if n_rewards == 0:
        raise ValueError(f"{name}: expected at least one reward per completion, got shape {values.shape}; add a column")
    factors = np.ones(n_rewards) if weights is None else check.real("reward_weights", weights).astype(np.float64)
    check.length("reward_weights", factors, n_rewards, f"column of {name}")
    check.finite("reward_weights", factors, "weight")
    missing = np.isnan(values)
    total = np.zeros(len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        for k, factor in enumerate(factors):  # not @: a matrix product may round differently from row to row
            total += np.where(missing[:, k], 0.0, values[:, k] * factor)
    too_large = ~(np.abs(total) <= LARGEST)
    if too_large.any():
        raise ValueError(
            f"{name}: the weighted sum of {name}[{int(np.argmax(too_large))}] is too large to compute with; "
            "scale the weights down"
        )
    total[missing.all(axis=1)] = np.nan
    return total


def _plan(
    baseline: str | None, scale: str | None, ddof: int | None, eps: float | None, singleton: str | None, ulp: float
) -> tuple[PoolPlan, bool]:
    """The plan, without its batch std, and whether a group of one is an error."""
    baseline = check.one_of("baseline", "mean" if baseline is None else baseline, BASELINES)
    scale = check.one_of("scale", "group" if scale is None else scale, SCALES)
    if baseline == "none" and scale == "group":
        raise ValueError(
            "baseline: no source divides rewards that are not centred by their own group's deviation; "
            "pass scale='none' or scale='batch', or baseline='mean'"
        )
    number = SINGLETONS[check.one_of("singleton", "zero" if singleton is None else singleton, SINGLETONS)]
    plan = PoolPlan(
        baseline=BASELINES[baseline].id,
        scale=SCALES[scale].id,
        ddof=check_ddof(ddof),
        eps=check_eps(eps),
        singleton=SINGLETON_ZERO if number is None else number,
        ulp=ulp,
    )
    return plan, number is None


def check_ddof(ddof: int | None) -> int:
    """0 or 1."""
    value = 0 if ddof is None else check.integer("ddof", ddof, least=0)
    if value > 1:
        raise ValueError(f"ddof: expected 0 (population) or 1 (sample), got {value}; pass one of the two")
    return value


def check_eps(eps: float | None) -> float:
    """Not negative."""
    return 1e-8 if eps is None else check.number("eps", eps, least=0.0)


def standardize_rows(
    kernels: Any,
    name: str,
    values: Double,
    groups: Groups,
    trajectories: Groups | None,
    trajectory_reward: str | None,
    plan: PoolPlan,
    *,
    no_singletons: bool = False,
) -> Double:
    """Advantages of rows, those of a trajectory counted once; rows that are NaN are left out."""
    if trajectories is None:
        if trajectory_reward is not None:
            raise ValueError("trajectory_reward: there are no trajectories; pass trajectory_ids or leave it out")
    else:
        values = _per_trajectory(name, values, trajectories, trajectory_reward)
        groups = trajectory_groups(trajectories, groups)
    scored = np.flatnonzero(~np.isnan(values))
    order, offsets = members(groups.codes, groups.n_groups, scored)
    if no_singletons:
        _refuse_singletons(order, offsets, trajectories)
    if plan.scale == SCALES["batch"].id:
        plan = plan._replace(batch_std=kernels.pool_std(values[scored], plan.ddof, plan.ulp))
    advantages = np.zeros(len(values))
    kernels.standardize(values, order, offsets, plan, advantages)
    return advantages if trajectories is None else advantages[trajectories.codes]


def _per_trajectory(name: str, values: Double, trajectories: Groups, how: str | None) -> Double:
    """The reward of each trajectory, NaN where none of its rows has one."""
    how = check.one_of("trajectory_reward", "last" if how is None else how, TRAJECTORY_REWARDS)
    scored = np.flatnonzero(~np.isnan(values))
    codes = trajectories.codes[scored]
    order, offsets = members(trajectories.codes, trajectories.n_groups, scored)
    some = offsets[1:] > offsets[:-1]
    last = np.full(trajectories.n_groups, -1)
    last[some] = order[offsets[1:][some] - 1]
    if how == "error":
        differ = values[scored] != values[last[codes]]
        if differ.any():
            row = int(scored[np.argmax(differ)])
            other = int(last[trajectories.codes[row]])
            raise ValueError(
                f"trajectory_reward: {name}[{row}]={values[row]} and {name}[{other}]={values[other]} belong to one "
                "trajectory; pass trajectory_reward='last' or 'sum'"
            )
    if how == "sum":
        sums = np.bincount(codes, weights=values[scored], minlength=trajectories.n_groups)
        return np.where(some, sums, np.nan)
    return np.where(some, values[last], np.nan)


def _refuse_singletons(order: Int, offsets: Int, trajectories: Groups | None) -> None:
    single = np.diff(offsets) == 1
    if single.any():
        group = int(np.argmax(single))
        row = int(order[offsets[group]])
        if trajectories is not None:
            row = int(trajectories.order[trajectories.offsets[row]])
        raise ValueError(
            f"singleton: group {group} has one reward only, that of row {row}; "
            "drop it, or pass singleton='zero' or 'raw'"
        )
