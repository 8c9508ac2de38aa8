"""Which groups teach anything: dynamic sampling on the rewards themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends
from . import _validate as check
from ._contract import SCALE_NONE, SINGLETON_ZERO, PoolPlan
from .advantages import finite_rewards, rewards_array, standardize_rows
from .groups import Groups, label_groups, make_groups, trajectory_groups
from .tables import NAN_POLICIES


def informative_groups(
    rewards: npt.ArrayLike,
    *,
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    trajectory_ids: Any = None,
    trajectory_reward: str | None = None,
    nan_policy: str | None = None,
    min_size: int = 2,
    backend: str | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether the rewards of a completion's group differ, so that their advantages are not all 0.

        keep_i = the scored rewards of i's group are not all equal, in any component

    Parameters
    ----------
    rewards : (n_completions,), (n_completions, n_rewards) with groups, or (P, G) without
        Any real dtype: the raw task reward or any other metric (accuracy, the shaped score: another
        question, another answer). A group is kept where any component varies, also where they cancel in the sum.
    group_ids, group_offsets, trajectory_ids, trajectory_reward
        As in :func:`grpo_fast.group_advantages`; a trajectory counts once.
    nan_policy : "error" (default) or "exclude"
        Rewards that are NaN are an error, or have no say; a completion without one goes with its group.
    min_size : integer >= 2
        Groups with fewer scored trajectories are dropped too.
    backend : "cython", "numba" or "numpy"; None is the one in force

    Returns
    -------
    bool, (n_completions,), or (P, G) for such rewards
        The same for all completions of a group.

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.group_advantages`.

    Notes
    -----
    Equal is what is equal for :func:`grpo_fast.group_advantages`, whose mean-centred advantages are
    exactly 0 in the groups that are dropped: a range of at most 4 units in the last place. There is no
    tolerance beyond that, and no standard deviation that rounding could lift above 0.
    Filter on the reward before shaping: a length penalty makes every group vary.

    References
    ----------
    Yu et al. 2025 (DAPO, dynamic sampling), arXiv:2503.14476 section 3.2; verl 0.9.1 ``filter_groups``
    (keeps groups of one).

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.informative_groups([1, 0, 1, 1], group_ids=["a", "b", "a", "b"])
    array([False,  True, False,  True])
    >>> gf.informative_groups([[0.5, 0.5, 0.5], [0.0, 1.0, 0.0]])
    array([[False, False, False],
           [ True,  True,  True]])
    """
    kernels = _backends.get(backend)
    array = rewards_array("rewards", rewards)
    grid = array.ndim == 2 and group_ids is None and group_offsets is None
    if grid:
        if trajectory_ids is not None:
            raise ValueError(
                "trajectory_ids: (P, G) rewards are one per trajectory already; pass flat rewards with group_ids"
            )
        group_offsets = np.arange(array.shape[0] + 1) * array.shape[1]
    policy = check.one_of("nan_policy", "error" if nan_policy is None else nan_policy, NAN_POLICIES)
    least = check.integer("min_size", min_size, least=2, most=check.MOST_TOKENS)
    way = None if policy == "exclude" else "drop that row, or pass nan_policy='exclude'"
    values = finite_rewards("rewards", array, way)
    columns = values.reshape(-1, 1) if grid or array.ndim == 1 else values
    if columns.shape[1] == 0:
        raise ValueError(f"rewards: expected at least one per completion, got shape {array.shape}; add a column")
    groups = make_groups(len(columns), group_ids, group_offsets)
    trajectories = (
        None if trajectory_ids is None else label_groups("trajectory_ids", trajectory_ids, len(columns), "completion")
    )
    # Centred and not scaled, in float64: 0 exactly where the kernels call the group equal.
    plan = PoolPlan(scale=SCALE_NONE, singleton=SINGLETON_ZERO, ulp=check.ulp(array.dtype))
    varies = np.zeros(len(columns), bool)
    for column in columns.T:
        column = np.ascontiguousarray(column)
        varies |= standardize_rows(kernels, "rewards", column, groups, trajectories, trajectory_reward, plan) != 0
    scored = np.logical_not(np.isnan(columns).all(axis=1))
    alive = np.bincount(groups.codes[varies], minlength=groups.n_groups) > 0
    alive &= _sizes(scored, groups, trajectories) >= least
    keep: npt.NDArray[np.bool_] = alive[groups.codes].reshape(array.shape if grid else array.shape[:1])
    return keep


def _sizes(scored: npt.NDArray[np.bool_], groups: Groups, trajectories: Groups | None) -> npt.NDArray[np.int64]:
    """Scored trajectories of each group."""
    if trajectories is not None:
        some = np.zeros(trajectories.n_groups, bool)
        some[trajectories.codes[scored]] = True
        scored, groups = some, trajectory_groups(trajectories, groups)
    return np.bincount(groups.codes[scored], minlength=groups.n_groups)
