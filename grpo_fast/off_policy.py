"""Which tokens and completions of an off-policy batch the surrogate counts: weights of 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _validate as check
from .conventions import correction_options
from .losses import Ranges
from .mismatch import Mismatch, counted_slots, packed


def off_policy_weights(
    logp: npt.ArrayLike,
    sampling_logp: npt.ArrayLike,
    advantages: npt.ArrayLike,
    token_offsets: npt.ArrayLike,
    threshold: float | None = None,
    *,
    advantage_level: str = "completion",
    mask: npt.ArrayLike | None = None,
    convention: str | None = None,
    backend: str | None = None,
) -> npt.NDArray[Any]:
    """0 for completions with a negative advantage that the policy has drifted away from, else 1.

        w_i = 1 where A_i >= 0 or mean over t of (sampling_logp - logp) <= threshold

    Parameters
    ----------
    logp, sampling_logp : (n_tokens,) float16, bfloat16, float32 or float64
        Log-probabilities under the policy in training, now, and when the tokens were sampled, by the engine that
        sampled where it reports them. NaN in ``sampling_logp``: not scored, no drift.
    advantages : (n_completions,), or (n_tokens,) with ``advantage_level="token"``
    token_offsets : (n_completions + 1,) integers
    threshold : the largest mean drift that stays
        TRL and DeepSeek-V3.2 leave it to the user (0.5, say); under slime it is 1e-4.
    advantage_level : "completion" or "token"
        With "token" the sign is each token's own, the drift still that of the completion.
    mask : (n_tokens,) bool or 0/1
    convention, backend : as in :func:`grpo_fast.importance_weights`

    Returns
    -------
    (n_completions,), or (n_tokens,) with ``advantage_level="token"``
        Of the dtype of the log-probs, float32 for 16-bit ones. A ``token_weight`` of :func:`grpo_fast.grpo_loss` (with
        ``weight_level="completion"``): it multiplies the surrogate and leaves denominators and KL alone. 0 on masked
        tokens.

    Raises
    ------
    ValueError, TypeError
        As :func:`grpo_fast.importance_weights`; advantages that are not finite.

    References
    ----------
    DeepSeek-AI 2025, DeepSeek-V3.2, section 3.1; TRL 1.16.0 ``GRPOTrainer.get_off_policy_mask``; slime ``--use-opsm``.

    Examples
    --------
    >>> from grpo_fast.off_policy import off_policy_weights
    >>> off_policy_weights([-1.0, -1.0, -1.0], [-0.4, -0.4, -0.4], [-1.0, 1.0], [0, 2, 3], threshold=0.5)
    array([0., 1.])
    """
    now = check.log_probs("logp", logp)
    return drifted(
        packed(token_offsets, now, "logp"), now, sampling_logp, advantages, threshold,
        advantage_level=advantage_level, mask=mask, convention=convention, backend=backend,
    )  # fmt: skip


def drifted(
    ranges: Ranges,
    logp: npt.NDArray[Any],
    sampling_logp: npt.ArrayLike,
    advantages: npt.ArrayLike,
    threshold: float | None,
    *,
    advantage_level: str,
    mask: npt.ArrayLike | None,
    convention: str | None,
    backend: str | None,
) -> npt.NDArray[Any]:
    """:func:`off_policy_weights` on any ranges; ``logp`` is flat and checked."""
    check.one_of("advantage_level", advantage_level, ("completion", "token"))
    threshold = correction_options(convention).get("threshold") if threshold is None else threshold
    if threshold is None:
        raise ValueError("threshold: there is no usual one; pass the largest mean drift that stays, such as 0.5")
    bound = check.number("threshold", threshold, least=0.0)
    names = ("logp", "sampling_logp")
    pair = Mismatch(names, ranges, logp, sampling_logp, mask=mask, clamp=np.inf, backend=backend)
    near = -pair["log_ratio"] / np.maximum(pair.counts, 1) <= bound
    array = check.real("advantages", advantages)
    if advantage_level == "completion":
        check.length("advantages", array, len(near), "completion")
        values = np.where(pair.filled, array.astype(np.float64), 0.0)
        check.finite("advantages", values, "completion")
        return (near | (values >= 0)).astype(pair.dtype)
    check.length("advantages", array, ranges.n_slots, "token")
    slots, _ = pair.slots()
    values = np.zeros(ranges.n_slots)
    values[slots] = array[slots]
    check.finite("advantages", values, "token")
    out = np.zeros(ranges.n_slots, pair.dtype)
    out[slots] = np.repeat(near, pair.counts) | (values[slots] >= 0)
    return out


def top_entropy_weights(
    entropy: npt.ArrayLike,
    token_offsets: npt.ArrayLike,
    quantile: float | None = None,
    *,
    threshold: float | None = None,
    mask: npt.ArrayLike | None = None,
) -> npt.NDArray[Any]:
    """1 for the share ``quantile`` of the counted tokens that have the highest entropy, 0 for the others.

        w_t = 1 where H_t >= quantile(H of the counted tokens, 1 - quantile)

    with linear interpolation between neighbours; ties with the threshold stay.

    Parameters
    ----------
    entropy : (n_tokens,) any real dtype, of the policy's distribution at the token
    token_offsets : (n_completions + 1,) integers
    quantile : in [0, 1], the share that stays; 1 keeps all (TRL's ``top_entropy_quantile``; 0.2 in the paper)
    threshold : the entropy to reach, in place of ``quantile``
        That of the whole batch, where this call sees a part of it: the parts then agree with the whole.
    mask : (n_tokens,) bool or 0/1

    Returns
    -------
    (n_tokens,) of the dtype of ``entropy``, float32 for 16-bit
        A ``token_weight`` of :func:`grpo_fast.grpo_loss`: denominators and KL are left alone, as in TRL. 0 on masked
        tokens.

    Raises
    ------
    ValueError, TypeError
        Entropies of counted tokens that are not finite, a quantile outside [0, 1], both or neither of quantile and
        threshold, a mask that counts nothing.

    References
    ----------
    Wang et al. 2025, arXiv:2506.01939; TRL 1.16.0 ``GRPOTrainer.get_high_entropy_mask``.

    Examples
    --------
    >>> from grpo_fast.off_policy import top_entropy_weights
    >>> top_entropy_weights([0.1, 2.0, 0.3, 1.0], [0, 2, 4], quantile=0.5)
    array([0., 1., 0., 1.])
    """
    array = check.real("entropy", entropy)
    return spiky(packed(token_offsets, array, "entropy"), array, quantile, threshold=threshold, mask=mask)


def spiky(
    ranges: Ranges,
    entropy: npt.NDArray[Any],
    quantile: float | None,
    *,
    threshold: float | None,
    mask: npt.ArrayLike | None,
) -> npt.NDArray[Any]:
    """:func:`top_entropy_weights` on any ranges; ``entropy`` is flat and real."""
    if (quantile is None) == (threshold is None):
        raise ValueError("quantile: either it or threshold decides, not both and not neither; pass one of the two")
    counted = None if mask is None else check.mask("mask", mask, ranges.n_slots)
    slots, _ = counted_slots(ranges, counted)
    if len(slots) == 0:
        raise ValueError("mask: no token counts, so none has the highest entropy; drop the batch or check the mask")
    dtype = np.dtype(np.float64 if entropy.dtype.itemsize == 8 else np.float32)
    values = np.zeros(ranges.n_slots)
    values[slots] = entropy[slots]
    check.finite("entropy", values, "token")
    own = values[slots]
    if threshold is None:
        share = check.number("quantile", quantile, least=0.0)
        if share > 1:
            raise ValueError(f"quantile: expected a share between 0 and 1, got {share:g}; 0.2 keeps a fifth")
        bound = float(np.quantile(own, 1 - share))
    else:
        bound = check.number("threshold", threshold)
    out = np.zeros(ranges.n_slots, dtype)
    out[slots] = own >= bound
    return out
