"""Losses and advantages on padded arrays, left or right padded, without packing them: one import to change.

Token arrays are (..., L) with the completions in the leading dimensions, usually (B, L) or
(prompts, group size, L). The kernels visit each row from its first counted slot to its last and
skip what lies around, whatever it holds.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _backends, process
from . import _validate as check
from . import advantages as adv
from . import estimators as est
from .losses import LossResult, Ranges, evaluate
from .methods import OPTIONS


def grpo_loss(
    logp: npt.ArrayLike,
    old_logp: npt.ArrayLike | None,
    ref_logp: npt.ArrayLike | None,
    advantages: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    loss_type: str | Callable[..., Any] | None = None,
    convention: str | None = None,
    advantage_level: str = "completion",
    token_weight: npt.ArrayLike | None = None,
    weight_level: str = "token",
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    compute_grad: bool = True,
    grad_out: npt.NDArray[Any] | None = None,
    grad_dtype: npt.DTypeLike | None = None,
    n_threads: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> LossResult:
    """:func:`grpo_fast.grpo_loss` on padded arrays; the same numbers as on the packed ones.

    To the last bit, where packing keeps each row from its first counted slot to its last, as
    :meth:`grpo_fast.Rollouts.from_padded` does.

    Parameters
    ----------
    logp, old_logp, ref_logp : (..., L) floats
    advantages : (...), or (..., L) with ``advantage_level="token"``
    mask : (..., L) bool or 0/1; None counts every slot
    group_ids, group_offsets
        Of the completions in order, for ``loss_agg_mode="prompt-mean"``; with three dimensions the
        first one is the prompts unless given.
    token_weight : (..., L), or (...) with ``weight_level="completion"``
    **options
        The other keywords of :func:`grpo_fast.grpo_loss`. Where a constant length is needed and
        none is given it is L.

    Returns
    -------
    LossResult
        ``grad`` is (..., L), 0 wherever the mask is 0; ``per_completion`` is (n_completions,).

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.grpo_loss`; shapes that disagree are named.

    Examples
    --------
    >>> import numpy as np, grpo_fast as gf
    >>> logp = np.log([[0.5, 0.25], [0.5, 1.0]])
    >>> gf.padded.grpo_loss(logp, logp, None, [1.0, -1.0], [[1, 1], [1, 0]]).grad
    array([[-0.25, -0.25],
           [ 0.5 ,  0.  ]])
    """
    array = check.token_matrix("logp", logp)
    shape, rows = array.shape, array.shape[:-1]
    check.one_of("advantage_level", advantage_level, ("completion", "token"))
    check.one_of("weight_level", weight_level, ("token", "completion"))
    flat_mask = None if mask is None else check.mask("mask", _flat("mask", mask, shape), array.size)
    ranges, flat_mask = _ranges(flat_mask, shape)
    if len(rows) == 2 and group_ids is None and group_offsets is None:
        group_offsets = np.arange(rows[0] + 1) * rows[1]
    for name in options:
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            raise TypeError(
                f"padded.grpo_loss: got an unexpected keyword {name!r}; "
                + (f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(sorted(OPTIONS))}")
            )
    result = evaluate(
        ranges,
        array.reshape(-1),
        None if old_logp is None else _flat("old_logp", old_logp, shape),
        None if ref_logp is None else _flat("ref_logp", ref_logp, shape),
        _flat("advantages", advantages, shape if advantage_level == "token" else rows),
        options,
        loss_type=loss_type,
        convention=convention,
        mask=flat_mask,
        token_weight=None
        if token_weight is None
        else _flat("token_weight", token_weight, shape if weight_level == "token" else rows),
        weight_level=weight_level,
        advantage_level=advantage_level,
        group_ids=group_ids,
        group_offsets=group_offsets,
        compute_grad=compute_grad,
        grad_out=None if grad_out is None else _flat_output(grad_out, shape),
        grad_dtype=grad_dtype,
        n_threads=n_threads,
        backend=backend,
    )
    return replace(result, grad=None if result.grad is None else result.grad.reshape(shape))


def grpo(
    rewards: npt.ArrayLike,
    logp: npt.ArrayLike,
    old_logp: npt.ArrayLike | None,
    ref_logp: npt.ArrayLike | None,
    mask: npt.ArrayLike | None = None,
    *,
    baseline: str | None = None,
    scale: str | None = None,
    ddof: int | None = None,
    eps: float | None = None,
    singleton: str | None = None,
    nan_policy: str | None = None,
    backend: str | None = None,
    **loss_options: Any,
) -> tuple[npt.NDArray[Any], LossResult]:
    """Group-relative advantages of (P, G) rewards and the loss of (P, G, L) log-probs, in one call.

    Parameters
    ----------
    rewards : (P, G)
    logp, old_logp, ref_logp, mask : (P, G, L), as in :func:`grpo_loss`
    baseline, scale, ddof, eps, singleton, nan_policy
        As in :func:`grpo_fast.group_advantages`.
    **loss_options
        Keywords of :func:`grpo_loss`.

    Returns
    -------
    (advantages, LossResult)
        ``advantages`` is (P, G).

    Raises
    ------
    ValueError, TypeError
        As the two functions it calls.

    References
    ----------
    Shao et al. 2024, arXiv:2402.03300, section 4.1.2 and eq. 3.

    Examples
    --------
    >>> import numpy as np, grpo_fast as gf
    >>> logp = np.full((1, 2, 3), -1.0)
    >>> advantages, result = gf.padded.grpo([[1, 0]], logp, None, None, eps=0.0)
    >>> advantages, result.loss
    (array([[ 1., -1.]]), 0.0)
    """
    array = check.token_matrix("logp", logp)
    reward_array = check.real("rewards", rewards, ndim=2)
    if array.shape[:-1] != reward_array.shape:
        raise ValueError(
            f"rewards: expected shape {array.shape[:-1]}, the leading dimensions of logp, got {reward_array.shape}; "
            "both are (prompts, group size)"
        )
    advantages = adv.group_advantages(
        reward_array,
        baseline=baseline,
        scale=scale,
        ddof=ddof,
        eps=eps,
        singleton=singleton,
        nan_policy=nan_policy,
        backend=backend,
    )
    return advantages, grpo_loss(array, old_logp, ref_logp, advantages, mask, backend=backend, **loss_options)


def group_advantages(
    rewards: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    *,
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    trajectory_ids: Any = None,
    trajectory_reward: str | None = None,
    estimator: str | None = None,
    convention: str | None = None,
    baseline: str | None = None,
    scale: str | None = None,
    ddof: int | None = None,
    eps: float | None = None,
    singleton: str | None = None,
    nan_policy: str | None = None,
    reward_weights: npt.ArrayLike | None = None,
    multi_objective_aggregation: str | None = None,
    normalize_advantages: str | None = None,
    lengths: npt.ArrayLike | None = None,
    baseline_rewards: npt.ArrayLike | None = None,
    k: int | None = None,
    gpg_alpha: str | None = None,
    token_rewards: npt.ArrayLike | None = None,
    values: npt.ArrayLike | None = None,
    old_logp: npt.ArrayLike | None = None,
    sum_pi_squared: npt.ArrayLike | None = None,
    token_weight: npt.ArrayLike | None = None,
    handle_zero_tail: bool | None = None,
    gamma: float | None = None,
    lam: float | None = None,
    whiten: str | None = None,
    backend: str | None = None,
) -> npt.NDArray[Any]:
    """:func:`grpo_fast.group_advantages` on padded arrays, left or right padded: one value per slot.

    Parameters
    ----------
    rewards : (B,), (B, n_rewards), (P, G) or (P, G, n_rewards)
        Two dimensions are (P, G) unless there are groups and the mask or token arrays are (B, L).
    mask : (B, L) or (P, G, L), bool or 0/1
    token_rewards, values, old_logp, sum_pi_squared, token_weight : of the mask's shape
    group_ids, group_offsets
        Of the completions in order; with (P, G, L) the first dimension is the prompts unless given.
    lengths, baseline_rewards : (B,) or (P, G)
    the others
        As in :func:`grpo_fast.group_advantages`.

    Returns
    -------
    of the mask's or the token arrays' shape, 0 wherever the mask is 0
        Without any of them one value per completion, (B,) or (P, G). Of the rewards' float dtype.

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.group_advantages`; shapes that disagree are named.

    Notes
    -----
    Rewards of masked slots are in no sum. Positions of the optimal token baseline count from each
    row's first counted slot.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.padded.group_advantages([[1, 0]], [[[1, 1, 0], [0, 1, 1]]], scale="none")
    array([[[ 0.5,  0.5,  0. ],
            [ 0. , -0.5, -0.5]]])
    """
    given = {
        "token_rewards": token_rewards,
        "values": values,
        "old_logp": old_logp,
        "sum_pi_squared": sum_pi_squared,
        "token_weight": token_weight,
    }
    of_tokens = {name: check.any_array(name, array) for name, array in given.items() if array is not None}
    shape, tokens = None, None
    if mask is not None or of_tokens:
        first = "mask" if mask is not None else next(iter(of_tokens))
        shape = check.any_array(first, mask if mask is not None else of_tokens[first]).shape
        if len(shape) not in (2, 3):
            raise ValueError(f"{first}: expected shape (B, L) or (P, G, L), got {shape}; reshape it")
        of_tokens = {name: _flat(name, array, shape, first) for name, array in of_tokens.items()}
        flat_mask = None if mask is None else check.mask("mask", _flat("mask", mask, shape), int(np.prod(shape)))
        ranges, flat_mask = _ranges(flat_mask, shape)
        tokens = est.Tokens(ranges.start, ranges.stop, flat_mask, ranges.n_slots, shape[-1])
        rows = shape[:-1]
        if rewards is not None:
            array = check.any_array("rewards", rewards)
            if array.shape[: len(rows)] != rows or array.ndim > len(rows) + 1:
                raise ValueError(
                    f"rewards: expected shape {rows}, the leading dimensions of {first}, perhaps with one column per "
                    f"reward, got {array.shape}; reshape it"
                )
            rewards = array.reshape(-1, *array.shape[len(rows) :])
        if len(rows) == 2 and group_ids is None and group_offsets is None:
            group_offsets = np.arange(rows[0] + 1) * rows[1]
        if baseline_rewards is not None:
            baseline_rewards = _flat("baseline_rewards", baseline_rewards, rows, first)
    options = {
        "baseline": baseline,
        "scale": scale,
        "ddof": ddof,
        "eps": eps,
        "singleton": singleton,
        "nan_policy": nan_policy,
        "normalize_advantages": normalize_advantages,
        "k": k,
        "gpg_alpha": gpg_alpha,
        "handle_zero_tail": handle_zero_tail,
        "gamma": gamma,
        "lam": lam,
        "whiten": whiten,
    }
    arrays = {"lengths": lengths, "baseline_rewards": baseline_rewards}
    names = {name for name, array in arrays.items() if array is not None} | (set(of_tokens) - {"token_rewards"})
    o = est.resolve(estimator, convention, multi_objective_aggregation, options, names)
    result, of_rows = adv.evaluate(
        o,
        rewards,
        tokens,
        of_tokens,
        group_ids=group_ids,
        group_offsets=group_offsets,
        trajectory_ids=trajectory_ids,
        trajectory_reward=trajectory_reward,
        reward_weights=reward_weights,
        lengths=lengths,
        baseline_rewards=baseline_rewards,
        backend=backend,
    )
    if shape is None or tokens is None:
        return result if of_rows is None else result.reshape(of_rows)
    if of_rows is not None:
        result = est.expand(_backends.get(backend), result.astype(np.float64), tokens, result.dtype)
    return result.reshape(shape)


def process_advantages(
    step_rewards: npt.ArrayLike,
    step_ends: npt.ArrayLike,
    mask: npt.ArrayLike,
    *,
    group_ids: Any = None,
    group_offsets: npt.ArrayLike | None = None,
    step_groups: npt.ArrayLike | None = None,
    outcome_rewards: npt.ArrayLike | None = None,
    backend: str | None = None,
    **options: Any,
) -> npt.NDArray[Any]:
    """:func:`grpo_fast.process_advantages` on padded arrays, left or right padded: one value per slot.

    Parameters
    ----------
    step_rewards : (B, S) or (P, G, S)
        NaN: an unscored step, or an absent one.
    step_ends : of the same shape, integers
        The slot, from 0 to L - 1, of the step's last token, strictly increasing; -1: an absent step, in any place.
    mask : (B, L) or (P, G, L), bool or 0/1
    group_ids, group_offsets
        Of the completions in order; with three dimensions the first one is the prompts unless given.
    step_groups : of the shape of step_rewards
    outcome_rewards : (B,), (B, n_rewards), (P, G) or (P, G, n_rewards)
    **options
        The other keywords of :func:`grpo_fast.process_advantages`, but ``out`` and ``level``.

    Returns
    -------
    of the mask's shape, 0 wherever it is 0, of the step rewards' float dtype

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.process_advantages`; shapes that disagree, and a reward without a step.

    Examples
    --------
    >>> import numpy as np, grpo_fast as gf
    >>> gf.padded.process_advantages([[[1, 0], [1, np.nan]]], [[[0, 2], [1, -1]]], [[[1, 1, 1], [1, 1, 0]]],
    ...     normalize="none")
    array([[[1., 0., 0.],
            [1., 1., 0.]]])
    """
    allowed = set(inspect.signature(process.process_advantages).parameters) - {"out", "level"}
    for name in options:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see grpo_fast.process_advantages"
            raise TypeError(f"padded.process_advantages: got an unexpected keyword {name!r}; {hint}")
    rewards = check.any_array("step_rewards", step_rewards)
    if rewards.ndim not in (2, 3):
        raise ValueError(f"step_rewards: expected shape (B, S) or (P, G, S), got {rewards.shape}; reshape it")
    rows, n = rewards.shape[:-1], int(np.prod(rewards.shape[:-1]))
    ends = check.integers("step_ends", _flat("step_ends", step_ends, rewards.shape, "step_rewards"))
    flags = check.any_array("mask", mask)
    if flags.ndim != rewards.ndim or flags.shape[:-1] != rows:
        raise ValueError(f"mask: expected shape {(*rows, 'L')} to go with step_rewards, got {flags.shape}; reshape it")
    width = flags.shape[-1]
    counted = check.mask("mask", flags.reshape(-1), n * width)
    flat = check.real("step_rewards", rewards.reshape(-1))
    wrong = (ends < -1) | (ends >= width) | ((ends == -1) & ~np.isnan(flat.astype(np.float64)))
    if wrong.any():
        at = int(np.argmax(wrong))
        where = ", ".join(map(str, np.unravel_index(at, rewards.shape)))
        raise ValueError(
            f"step_ends: step_ends[{where}]={ends[at]} with step_rewards[{where}]={flat[at]}; a step ends at a slot "
            f"from 0 to {width - 1}, an absent one has -1 and a reward of NaN"
        )
    there = ends >= 0
    offsets = np.concatenate([[0], np.cumsum(there.reshape(n, -1).sum(axis=1))])
    if rewards.ndim == 3 and group_ids is None and group_offsets is None:
        group_offsets = np.arange(rows[0] + 1) * rows[1]
    if step_groups is not None:
        step_groups = _flat("step_groups", step_groups, rewards.shape, "step_rewards")[there]
    if outcome_rewards is not None:
        array = check.any_array("outcome_rewards", outcome_rewards)
        if array.shape[: len(rows)] != rows or array.ndim > len(rows) + 1:
            raise ValueError(f"outcome_rewards: expected shape {rows}, got {array.shape}; reshape it")
        outcome_rewards = array.reshape(n, *array.shape[len(rows) :])
    result = process.process_advantages(
        flat[there],
        ends[there],
        offsets,
        np.arange(n + 1) * width,
        group_ids=group_ids,
        group_offsets=group_offsets,
        step_groups=step_groups,
        outcome_rewards=outcome_rewards,
        backend=backend,
        **options,
    )
    result[counted == 0] = 0
    return result.reshape(flags.shape)


def _flat(name: str, values: npt.ArrayLike, shape: tuple[int, ...], other: str = "logp") -> npt.NDArray[Any]:
    array = check.any_array(name, values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape} to go with {other}, got {array.shape}; reshape or slice it")
    return array.reshape(-1)


def _flat_output(grad_out: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if not isinstance(grad_out, np.ndarray) or grad_out.shape != shape or not grad_out.flags.c_contiguous:
        got = f"shape {grad_out.shape}" if isinstance(grad_out, np.ndarray) else type(grad_out).__name__
        raise ValueError(f"grad_out: expected a contiguous array of shape {shape}, got {got}; pass np.empty_like(logp)")
    return grad_out.reshape(-1)


def _ranges(mask: npt.NDArray[np.uint8] | None, shape: tuple[int, ...]) -> tuple[Ranges, npt.NDArray[np.uint8] | None]:
    """From the first to the last counted slot of every row, and the mask where there are holes between them."""
    width = shape[-1]
    n = int(np.prod(shape[:-1]))
    first = np.arange(n, dtype=np.int64) * width
    if mask is None or mask.size == 0:
        return Ranges(first, first + width, n * width, packed=True, width=width), mask
    rows = mask.reshape(n, width) != 0
    counts = np.count_nonzero(rows, axis=1)
    start = first + np.where(counts > 0, rows.argmax(axis=1), 0)
    stop = np.where(counts > 0, first + width - rows[:, ::-1].argmax(axis=1), start)
    holes = bool((stop - start != counts).any())
    return Ranges(start, stop, n * width, packed=False, width=width), mask if holes else None
