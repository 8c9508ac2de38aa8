"""Corrections between the engine that sampled and the policy in training, as rows.

x = old_logp - sampling_logp is the log-ratio of a token, r = exp(x). Weights multiply the surrogate of a token and
leave every denominator alone; rejection shrinks the mask, and every denominator that counts tokens with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from . import _contract as c


@dataclass(frozen=True, slots=True)
class Correction:
    """A ``mode`` of :func:`grpo_fast.importance_weights`."""

    formula: str
    per_completion: bool  # one weight per completion rather than per token
    outside: int  # what happens outside [clip_min, clip_max]
    sequence_ratio: str | None  # its own default, None where it has no sequence ratio
    source: str
    denominators: str = "kept"


CORRECTIONS: dict[str, Correction] = {
    "token_truncate": Correction(
        "clip(r_t, clip_min, clip_max)",
        False,
        c.OUTSIDE_CLIP,
        None,
        "TIS. TRL 1.16.0; verl 0.9.1 rollout_is='token'; OpenRLHF and NeMo-RL 'tis'; slime; SkyRL; open-instruct",
    ),
    "token_mask": Correction(
        "r_t, 0 outside [clip_min, clip_max]",
        False,
        c.OUTSIDE_ZERO,
        None,
        "IcePop. TRL 1.16.0; verl 0.9.1 rollout_is_threshold='lo_hi'; OpenRLHF and NeMo-RL 'icepop'; slime; AReaL",
    ),
    "sequence_truncate": Correction(
        "clip(R_i, clip_min, clip_max)",
        True,
        c.OUTSIDE_CLIP,
        "product",
        "TRL 1.16.0; verl 0.9.1 rollout_is='sequence'; AReaL with the geometric mean",
    ),
    "sequence_mask": Correction(
        "R_i, 0 outside [clip_min, clip_max]",
        True,
        c.OUTSIDE_ZERO,
        "product",
        "TRL 1.16.0's default; verl 0.9.1 rollout_is='sequence' with 'lo_hi'; AReaL with the geometric mean",
    ),
    "sequence_filter": Correction(
        "r_t, 0 for every token of a completion whose R_i is outside [clip_min, clip_max]",
        False,
        c.OUTSIDE_ZERO,
        "geometric",
        "OpenRLHF and NeMo-RL 'seq-mask-tis'",
    ),
}

#: R_i, from the log-ratios of the counted tokens of a completion.
SEQUENCE_RATIOS = {"product": "exp(sum x_t)", "geometric": "exp(mean x_t)"}
BATCH_NORMALIZE = {
    "mean": "divided by their mean: over the counted tokens, or over the completions with any in the sequence modes",
    "none": "as they are",
}
UNSCORED = {
    "one": "a NaN sampling_logp is a token the engine could not score: x = 0, weight 1",
    "error": "a NaN sampling_logp is refused",
}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A ``reject`` of :func:`grpo_fast.importance_weights`: keep while low <= statistic <= high."""

    formula: str
    statistic: int
    reduce: str | None  # over the counted tokens of a completion; None decides per token
    two_sided: bool  # the threshold is a pair of ratios, whose logs are the bounds
    source: str = "verl 0.9.1 rollout_rs"
    denominators: str = "shrink with the mask"


_K = {
    "k1": ("-x_t", c.STATISTIC_LOG_RATIO),
    "k2": ("x_t^2 / 2", c.STATISTIC_K2),
    "k3": ("exp(x_t) - 1 - x_t", c.STATISTIC_K3),
}
#: verl's eleven; k1 has no maximum, for it has two sides.
REJECTIONS: dict[str, Rejection] = {
    f"{prefix}_{k}": Rejection(f"{reduce} of {formula}" if reduce else formula, statistic, reduce, k == "k1")
    for prefix, reduce in (("token", None), ("seq_sum", "sum"), ("seq_mean", "mean"), ("seq_max", "max"))
    for k, (formula, statistic) in _K.items()
    if (prefix, k) != ("seq_max", "k1")
}


@dataclass(frozen=True, slots=True)
class Preset:
    """Options of :func:`grpo_fast.importance_weights` under a name that someone published."""

    options: dict[str, Any]
    source: str
    loss: str = "any, with the weights as token_weight and the mask as mask"
    #: ``old_logp`` are then the log-probs of the policy in training itself: there is no third policy.
    bypass: bool = False


_TOKEN_TIS: dict[str, Any] = {"mode": "token_truncate", "clip_max": 2.0}
_SEQ_TIS: dict[str, Any] = {"mode": "sequence_truncate", "clip_max": 2.0}
_ICEPOP: dict[str, Any] = {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0}
_SEQ_RS: dict[str, Any] = {"reject": ("seq_sum_k1",), "reject_threshold": ((0.5, 2.0),)}
_GEO_RS: dict[str, Any] = {"reject": ("seq_mean_k1",), "reject_threshold": ((0.999, 1.001),)}
_K3_RS: dict[str, Any] = {"reject": ("seq_mean_k3",), "reject_threshold": (0.01,)}


def _verl(options: dict[str, Any], loss: str | None = None) -> Preset:
    source = "verl 0.9.1 trainer/config/algorithm.py RolloutCorrectionConfig"
    options = {**options, "log_ratio_clamp": 20.0}
    return Preset(options, source) if loss is None else Preset(options, source, loss, bypass=True)


_REINFORCE = "loss_type='gpg' with the weights as token_weight: they are detached"
_CLIP = "a clipped loss with old_logp=sampling_logp, whose ratio corrects by itself"
PRESETS: dict[str, Preset] = {
    "disabled": _verl({}),
    "decoupled_token_is": _verl(_TOKEN_TIS),
    "decoupled_seq_is": _verl(_SEQ_TIS),
    "decoupled_token_icepop": _verl(_ICEPOP),
    "decoupled_seq_is_rs": _verl(_SEQ_TIS | _SEQ_RS),
    "decoupled_geo_rs": _verl(_GEO_RS),
    "decoupled_geo_rs_seq_tis": _verl(_SEQ_TIS | _GEO_RS),
    "decoupled_geo_rs_token_tis": _verl(_TOKEN_TIS | _GEO_RS),
    "decoupled_k3_rs": _verl(_K3_RS),
    "decoupled_k3_rs_seq_tis": _verl(_SEQ_TIS | _K3_RS),
    "decoupled_k3_rs_token_tis": _verl(_TOKEN_TIS | _K3_RS),
    "bypass_ppo_clip": _verl({}, _CLIP),
    "bypass_ppo_clip_geo_rs": _verl(_GEO_RS, _CLIP),
    "bypass_ppo_clip_k3_rs": _verl(_K3_RS, _CLIP),
    "bypass_pg_is": _verl(_SEQ_TIS, _REINFORCE),
    "bypass_pg_token_icepop": _verl(_ICEPOP, _REINFORCE),
    "bypass_pg_geo_rs": _verl(_GEO_RS, _REINFORCE),
    "bypass_pg_geo_rs_seq_tis": _verl(_SEQ_TIS | _GEO_RS, _REINFORCE),
    "bypass_pg_geo_rs_token_tis": _verl(_TOKEN_TIS | _GEO_RS, _REINFORCE),
    "tis": Preset({"mode": "token_truncate", "clip_min": 0.5, "clip_max": 5.0}, "OpenRLHF 'tis' and its thresholds"),
    "icepop": Preset({"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0}, "OpenRLHF 'icepop' and its thresholds"),
    "seq_mask_tis": Preset(
        {"mode": "sequence_filter", "clip_min": 0.5, "clip_max": 5.0}, "OpenRLHF 'seq-mask-tis' and its thresholds"
    ),
    "decoupled_ppo": Preset(
        {"mode": "token_mask", "clip_max": 5.0},
        "arXiv:2505.24298 section 5.2; AReaL behave_imp_weight_mode='token_mask' with the cap of its recipes",
        "a clipped loss with old_logp the proximal policy's; sampling_logp is the behaviour policy's",
    ),
}

#: What :func:`grpo_fast.importance_weights` reports, under verl's names without their prefix.
WEIGHT_METRICS: dict[str, str] = {
    "tokens": "counted tokens",
    "unscored": "counted tokens whose sampling_logp is NaN",
    "rollout_is_mean": "mean of the weights over the counted tokens, before batch_normalize",
    "rollout_is_std": "their standard deviation",
    "rollout_is_min": "smallest weight; sequence modes: smallest R_i, not held",
    "rollout_is_max": "largest weight; sequence modes: largest R_i, not held",
    "rollout_is_eff_sample_size": "1 / mean((w / mean w)^2) over the counted tokens, 0 without any weight",
    "rollout_is_ratio_fraction_high": "share of tokens (sequence modes: completions) with a ratio above clip_max",
    "rollout_is_ratio_fraction_low": "the same below clip_min, or below 1 / clip_max where there is none",
    "rollout_is_oob_ratio": "share of counted tokens whose weight is 0 for being outside; the masking modes only",
    "rollout_is_seq_mean": "mean over completions of the mean weight of their tokens",
    "rollout_is_seq_std": "standard deviation of those (ddof 1)",
    "rollout_is_seq_min": "smallest of those",
    "rollout_is_seq_max": "largest of those",
    "rollout_is_seq_max_deviation": "largest |that - 1|",
    "rollout_is_seq_fraction_high": "share of completions whose mean ratio, not held, is above clip_max",
    "rollout_is_seq_fraction_low": "the same below clip_min, or below 1 / clip_max where there is none",
    "rollout_is_batch_norm_factor": "what batch_normalize divides by",
    "rollout_rs_<reject>_mean": "mean of the statistic over the counted tokens",
    "rollout_rs_<reject>_max": "largest value of the statistic",
    "rollout_rs_<reject>_masked_fraction": "share of the counted tokens this one alone rejects",
    "rollout_rs_<reject>_seq_masked_fraction": "share of completions that lose a token to it",
    "rollout_rs_masked_fraction": "share of the counted tokens that all of them together reject",
    "rollout_rs_seq_masked_fraction": "share of completions that lose a token",
}

#: What :func:`grpo_fast.off_policy_metrics` reports; verl's names where it has them. pi is the policy of ``old_logp``,
#: mu that of ``sampling_logp``. Completions without counted tokens are in no mean over completions.
OFF_POLICY_METRICS: dict[str, str] = {
    "tokens": "counted tokens",
    "unscored": "counted tokens whose sampling_logp is NaN: log-ratio 0, and sampled as likely as pi says",
    "kl": "k1: mean of -x over tokens",
    "k3_kl": "mean of exp(x) - 1 - x over tokens",
    "training_ppl": "mean over completions of exp(-mean log pi)",
    "training_log_ppl": "mean over completions of -mean log pi",
    "rollout_ppl": "training_ppl, of mu",
    "rollout_log_ppl": "training_log_ppl, of mu",
    "log_ppl_diff": "mean over completions of -mean x: above 0 where pi finds the text less likely",
    "log_ppl_abs_diff": "mean of its absolute value",
    "log_ppl_diff_max": "largest",
    "log_ppl_diff_min": "smallest",
    "ppl_ratio": "mean over completions of exp(-mean x)",
    "chi2_token": "mean of r^2 over tokens, - 1",
    "chi2_seq": "mean over completions of (prod r)^2, - 1",
    "ess_token": "(sum r)^2 / sum r^2 / n over tokens",
    "ess_seq": "the same over completions, of prod r",
    "log_ratio_median": "median of x over tokens",
    "k3_kl_trimmed": "k3_kl without the tokens of the largest 1 % of |x|",
    "k3_kl_seq_median": "median over completions of their mean k3",
    "log_ratio_abs_mean": "mean of |x| over tokens",
    "log_ratio_abs_p50": "median of |x|",
    "log_ratio_abs_p90": "90 % of the tokens have an |x| up to this",
    "log_ratio_abs_p99": "99 % do",
    "log_ratio_abs_p999": "99.9 % do",
    "log_ratio_abs_max": "all do",
    "ratio_high_share": "share of tokens with r above the upper end of ``tails``",
    "ratio_high_mass": "their share of the sum of r",
    "ratio_low_share": "share of tokens with r below the lower end of ``tails``",
    "ratio_low_mass": "their share of the sum of r",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The options of :func:`grpo_fast.importance_weights`, resolved."""

    mode: str | None = None
    clip_min: float = 0.0
    clip_max: float = inf
    has_min: bool = False
    sequence_ratio: str | None = None
    batch_normalize: str = "none"
    reject: dict[str, tuple[float, float]] = field(default_factory=dict)  # bounds of the statistic
    log_ratio_clamp: float = inf
    unscored: str = "one"
