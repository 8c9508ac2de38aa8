"""The corrections on padded arrays with masks, on the kernels of the packed ones and without a packing copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _validate as check
from .._contract import Double
from ..correction_options import OPTIONS, resolve
from ..correction_tables import CORRECTIONS
from ..corrections import weigh
from ..diagnostics import POSITION_EDGES, diagnose
from ..losses import Ranges
from ..mismatch import Mask
from ..off_policy import drifted, spiky
from ._layout import flatten, row_ranges


def importance_weights(
    old_logp: npt.ArrayLike,
    sampling_logp: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    mode: str | None = None,
    clip_min: float | None = None,
    clip_max: float | None = None,
    sequence_ratio: str | None = None,
    batch_normalize: str | None = None,
    reject: Any = None,
    reject_threshold: Any = None,
    log_ratio_clamp: float | None = None,
    unscored: str | None = None,
    preset: str | None = None,
    convention: str | None = None,
    backend: str | None = None,
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.bool_], dict[str, float]]:
    """:func:`grpo_fast.importance_weights` on padded arrays; the same numbers as on the packed ones.

    Parameters
    ----------
    old_logp, sampling_logp : (..., L) floats
    mask : (..., L) bool or 0/1; None counts every slot
    mode ... backend : as in :func:`grpo_fast.importance_weights`

    Returns
    -------
    (token_weight, mask, metrics)
        ``token_weight`` is (..., L), or (...) in "sequence_truncate" and "sequence_mask"; ``mask`` is (..., L). Both
        are 0 where the mask is.

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.importance_weights`; shapes that disagree are named.

    References
    ----------
    As :func:`grpo_fast.importance_weights`.

    Examples
    --------
    >>> from grpo_fast.padded import importance_weights
    >>> weight, mask, metrics = importance_weights(
    ...     [[-1.0, -1.5], [-1.0, 0.0]], [[-1.5, -1.0], [-3.5, 0.0]], [[1, 1], [1, 0]], mode="token_mask", clip_max=2.0
    ... )
    >>> weight.round(4)
    array([[1.6487, 0.6065],
           [0.    , 0.    ]])
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    choice = resolve(options, convention, preset)
    array = check.token_matrix("old_logp", old_logp)
    ranges, flat_mask = _layout(mask, array.shape)
    sampling = flatten("sampling_logp", sampling_logp, array.shape, "the log-probs")
    weight, keep, metrics = weigh(ranges, array.reshape(-1), sampling, choice, mask=flat_mask, backend=backend)
    if weight is not None:
        per_completion = CORRECTIONS[choice.mode or ""].per_completion
        weight = weight.reshape(array.shape[:-1] if per_completion else array.shape)
    return weight, keep.reshape(array.shape), metrics


def off_policy_weights(
    logp: npt.ArrayLike,
    sampling_logp: npt.ArrayLike,
    advantages: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    threshold: float | None = None,
    *,
    advantage_level: str = "completion",
    convention: str | None = None,
    backend: str | None = None,
) -> npt.NDArray[Any]:
    """:func:`grpo_fast.off_policy_weights` on padded arrays; the same numbers as on the packed ones.

    Parameters
    ----------
    logp, sampling_logp : (..., L) floats
    advantages : (...), or (..., L) with ``advantage_level="token"``
    mask : (..., L) bool or 0/1; None counts every slot
    threshold, advantage_level, convention, backend : as in :func:`grpo_fast.off_policy_weights`

    Returns
    -------
    (...), or (..., L) with ``advantage_level="token"``

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.off_policy_weights`; shapes that disagree are named.

    References
    ----------
    As :func:`grpo_fast.off_policy_weights`.

    Examples
    --------
    >>> from grpo_fast.padded import off_policy_weights
    >>> off_policy_weights([[-1.0, -1.0], [-1.0, -1.0]], [[-0.4, -0.4], [-0.4, 0.0]], [-1.0, 1.0], threshold=0.5)
    array([0., 1.])
    """
    array = check.token_matrix("logp", logp)
    check.one_of("advantage_level", advantage_level, ("completion", "token"))
    rows = array.shape if advantage_level == "token" else array.shape[:-1]
    ranges, flat_mask = _layout(mask, array.shape)
    weight = drifted(
        ranges,
        array.reshape(-1),
        flatten("sampling_logp", sampling_logp, array.shape, "the log-probs"),
        flatten("advantages", advantages, rows, "the log-probs"),
        threshold,
        advantage_level=advantage_level,
        mask=flat_mask,
        convention=convention,
        backend=backend,
    )
    return weight.reshape(rows)


def top_entropy_weights(
    entropy: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    quantile: float | None = None,
    *,
    threshold: float | None = None,
) -> npt.NDArray[Any]:
    """:func:`grpo_fast.top_entropy_weights` on padded arrays; the same numbers as on the packed ones.

    Parameters
    ----------
    entropy : (..., L) any real dtype
    mask : (..., L) bool or 0/1; None counts every slot
    quantile, threshold : as in :func:`grpo_fast.top_entropy_weights`

    Returns
    -------
    (..., L), 0 where the mask is

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.top_entropy_weights`; shapes that disagree are named.

    References
    ----------
    As :func:`grpo_fast.top_entropy_weights`.

    Examples
    --------
    >>> from grpo_fast.padded import top_entropy_weights
    >>> top_entropy_weights([[0.1, 2.0], [0.3, 9.0]], [[1, 1], [1, 0]], quantile=0.4)
    array([[0., 1.],
           [0., 0.]])
    """
    array = check.any_array("entropy", entropy)
    if array.ndim < 2:
        raise ValueError(f"entropy: expected shape (..., L), got {array.shape}; add a dimension")
    flat = check.real("entropy", array.reshape(-1))
    ranges, flat_mask = _layout(mask, array.shape, "entropy")
    return spiky(ranges, flat, quantile, threshold=threshold, mask=flat_mask).reshape(array.shape)


def off_policy_metrics(
    old_logp: npt.ArrayLike,
    sampling_logp: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    tails: tuple[float, float] = (0.5, 2.0),
    position_edges: Sequence[int] = POSITION_EDGES,
    log_ratio_clamp: float | None = None,
    unscored: str | None = None,
    backend: str | None = None,
) -> tuple[dict[str, float], dict[str, Double]]:
    """:func:`grpo_fast.off_policy_metrics` on padded arrays; the same numbers as on the packed ones.

    Positions count from the first counted slot of each row.

    Parameters
    ----------
    old_logp, sampling_logp : (..., L) floats
    mask : (..., L) bool or 0/1; None counts every slot
    tails ... backend : as in :func:`grpo_fast.off_policy_metrics`

    Returns
    -------
    (metrics, by_position)

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.off_policy_metrics`; shapes that disagree are named.

    References
    ----------
    As :func:`grpo_fast.off_policy_metrics`.

    Examples
    --------
    >>> from grpo_fast.padded import off_policy_metrics
    >>> metrics, _ = off_policy_metrics([[-1.0, -1.5], [-1.0, 0.0]], [[-1.5, -1.0], [-1.0, 0.0]], [[1, 1], [1, 0]])
    >>> metrics["tokens"], metrics["kl"]
    (3.0, 0.0)
    """
    array = check.token_matrix("old_logp", old_logp)
    ranges, flat_mask = _layout(mask, array.shape)
    return diagnose(
        ranges,
        array.reshape(-1),
        flatten("sampling_logp", sampling_logp, array.shape, "the log-probs"),
        mask=flat_mask,
        tails=tails,
        position_edges=position_edges,
        log_ratio_clamp=log_ratio_clamp,
        unscored=unscored,
        backend=backend,
    )


def _layout(
    mask: npt.ArrayLike | None, shape: tuple[int, ...], like: str = "the log-probs"
) -> tuple[Ranges, Mask | None]:
    """From the first to the last counted slot of every row, and the mask where there are holes between them."""
    flat = None if mask is None else check.mask("mask", flatten("mask", mask, shape, like), int(np.prod(shape)))
    return row_ranges(flat, shape)
