"""What is compared with liger, openrlhf, skyrl, areal, tunix and tinker: one row per feature.

``theirs`` and ``ours`` take a batch and give a Result. Advantages, losses and gradients agree to ``rtol`` of the largest
number; where a framework adds 1e-8 to a denominator that is the tolerance, and its row says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import grpo_fast as gf

from . import others_calls as call
from .batches import Ragged, contiguous, width
from .results import Result

EXACT = 1e-11
DENOMINATOR = 3e-8  # a framework adds 1e-8 to a number of tokens that may be 1


@dataclass(frozen=True)
class Feature:
    framework: str
    name: str
    theirs: Callable[[Ragged], Result]
    ours: Callable[[Ragged], Result]
    rtol: float = EXACT
    value: bool = True  # False: only gradients agree, the value is another one (said in the convention's notes)
    batch: dict[str, Any] = field(default_factory=dict)  # options of batches.ragged
    far: bool = True  # also on log-ratios beyond +-20
    filled: bool = False  # only on batches without completions that have no counted token

    def __str__(self) -> str:
        return f"{self.framework}-{self.name}"


def loss(batch: Ragged, convention: str, **options: Any) -> Result:
    names = ("logp", "old_logp", "ref_logp")
    arrays = [batch.poisoned(name) for name in names]
    if not options.pop("reference", True):
        arrays[2] = None
    got = gf.grpo_loss(
        *arrays, batch.advantages, batch.token_offsets, mask=batch.mask, convention=convention, **options
    )
    return Result(got.loss, got.grad, got.metrics)


def corrected(batch: Ragged, convention: str, weights: dict[str, Any], **options: Any) -> Result:
    """The loss with importance weights as token weights: the denominators stay."""
    weight, keep, _ = gf.importance_weights(
        batch.poisoned("old_logp"), batch.poisoned("sampling_logp"), batch.token_offsets, mask=batch.mask,
        convention=convention, **weights,
    )  # fmt: skip
    assert weight is not None
    if keep is not None and len(keep) == len(weight):
        weight = np.where(keep, weight, 0.0)
    level = "token" if len(weight) == len(batch.mask) else "completion"
    return loss(batch, convention, token_weight=weight, weight_level=level, reference=False, **options)


def advantages(batch: Ragged, convention: str, **options: Any) -> Result:
    rewards = batch.rewards[:, 0]
    return Result(gf.group_advantages(rewards, group_ids=batch.group_ids, convention=convention, **options))


def on_tokens(batch: Ragged, per_row: Result) -> Result:
    return Result(np.where(batch.mask, np.asarray(per_row.value)[batch.owner], 0.0))


def held(batch: Ragged, per_token: Result) -> Result:
    """Zero on masked tokens, where frameworks leave a return."""
    return Result(np.where(batch.mask, per_token.value, 0.0))


def in_groups(batch: Ragged, function: Callable[..., Result]) -> Result:
    """A function of equal groups that lie together, on a batch whose rows lie anyhow."""
    order = contiguous(batch)
    out = np.empty(batch.n)
    out[order] = function(batch.rewards[order, 0]).value
    return Result(out)


EQUAL = {"group_size": 4}


def _losses(
    framework: str, convention_beta: float, theirs: Callable[..., Result], **common: Any
) -> Callable[..., Feature]:
    def row(
        name: str, their_options: dict[str, Any] | None = None, our_options: dict[str, Any] | None = None, **extra: Any
    ) -> Feature:
        their_options, our_options = their_options or {}, our_options or {}
        extra = common | extra
        return Feature(
            framework, name,
            lambda batch: theirs(batch, **{k: v(batch) if callable(v) else v for k, v in their_options.items()}),
            lambda batch: loss(batch, framework, **{k: v(batch) if callable(v) else v for k, v in our_options.items()}),
            **extra,
        )  # fmt: skip

    return row


_liger = _losses("liger", 0.04, call.liger)
_NONE = {"reference": False}
_SIZE = {"max_completion_length": 64}
LIGER = [
    *(
        _liger(
            f"{loss_type}, {level}, beta {beta}",
            {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
            | (_SIZE if loss_type == "dr_grpo" else {}),
            {"loss_type": loss_type, "importance_sampling_level": level, "reference": bool(beta)}
            | (_SIZE if loss_type == "dr_grpo" else {}),
            far=beta == 0.0,
        )
        for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo")
        for level in ("token", "sequence")
        for beta in (0.0, 0.04)
    ),
    _liger("default", {"beta": 0.04}, {}, far=False),
    _liger("delta", {"delta": 1.5, "loss_type": "grpo"}, {"delta": 1.5, "loss_type": "grpo"} | _NONE),
    _liger("asymmetric", {"epsilon_low": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.1, "epsilon_high": 0.28} | _NONE),
    _liger("cispo", {"loss_type": "cispo"}, {"loss_type": "cispo"} | _NONE),
    _liger("cispo 5", {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "cispo", "epsilon_high": 5.0} | _NONE),
    _liger("sapo", {"loss_type": "sapo"}, {"loss_type": "sapo"} | _NONE),
    _liger("vespo", {"loss_type": "vespo"}, {"loss_type": "vespo"} | _NONE),
    _liger(
        "luspo, sequence",
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"} | _NONE,
    ),
    _liger("items", {"num_items_in_batch": 777}, {"num_items_in_batch": 777} | _NONE),
    _liger("weights", {"weights": lambda b: b.token_weight}, {"token_weight": lambda b: b.token_weight} | _NONE),
    _liger(
        "bias-corrected KL", {"beta": 0.04, "use_bias_correction_kl": True}, {"kl_ratio_factor": "ratio"}, far=False
    ),
]

_openrlhf = _losses("openrlhf", 0.0, call.openrlhf)
OPENRLHF = [
    _openrlhf("default"),
    _openrlhf(
        "clip-higher, dual clip", {"clip_eps_high": 0.28, "dual_clip": 3.0}, {"epsilon_high": 0.28, "dual_clip": 3.0}
    ),
    _openrlhf("sequence mean", {"token_level_loss": False}, {"loss_type": "grpo"}, rtol=DENOMINATOR),
    _openrlhf("gspo", {"policy_loss_type": "gspo"}, {"loss_type": "gspo"}, rtol=DENOMINATOR),
    _openrlhf(
        "global tokens", {"batch_num_tokens": 999.0, "dp_size": 4}, {"num_items_in_batch": 999, "num_processes": 4}
    ),
    _openrlhf(
        "global sequences",
        {"token_level_loss": False, "global_batch_size": 32.0, "dp_size": 2},
        {"loss_type": "grpo", "num_sequences": 32, "num_processes": 2, "reference": False},
        rtol=DENOMINATOR,
    ),
    *(
        _openrlhf(f"KL {k}", {"beta": 0.02, "kl_estimator": k}, {"beta": 0.02, "kl_estimator": k})
        for k in ("k1", "k2", "k3")
    ),
    _openrlhf(
        "KL beside sequence mean",
        {"token_level_loss": False, "beta": 0.02, "kl_estimator": "k3"},
        {"loss_type": "grpo", "beta": 0.02, "kl_estimator": "k3"},
        rtol=DENOMINATOR,
    ),
    *(
        Feature(
            "openrlhf",
            f"advantages {theirs}",
            lambda b, theirs=theirs: held(b, call.openrlhf_advantages(b, b.rewards[:, 0], theirs, 4)),
            lambda b, ours=ours: on_tokens(b, advantages(b, "openrlhf", **ours)),
            batch=EQUAL | {"together": True},
            filled=True,
        )
        for theirs, ours in (("group_norm", {}), ("rloo", {"estimator": "rloo"}), ("dr_grpo", {"scale": "none"}))
    ),
]

_skyrl = _losses("skyrl", 0.001, call.skyrl)
SKYRL = [
    _skyrl("default", {"beta": 0.001}),
    _skyrl("k1", {"beta": 0.1, "kl_estimator": "k1"}, {"beta": 0.1, "kl_estimator": "k1"}),
    _skyrl("abs", {"beta": 0.1, "kl_estimator": "abs"}, {"beta": 0.1, "kl_estimator": "abs"}),
    _skyrl("k2", {"beta": 0.1, "kl_estimator": "k2"}, {"beta": 0.1, "kl_estimator": "k2"}),
    _skyrl("sequence mean", {"loss_reduction": "sequence_mean", "beta": 0.001}, {"loss_type": "grpo"}),
    _skyrl("dr_grpo", {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 64}, {"loss_type": "dr_grpo"} | _SIZE | _NONE),
    _skyrl("dual clip", {"loss_type": "dual_clip", "eps_clip_high": 0.28}, {"dual_clip": 3.0, "epsilon_high": 0.28} | _NONE),
    _skyrl("gspo", {"loss_type": "gspo"}, {"loss_type": "gspo_token", "loss_agg_mode": "token-mean"} | _NONE),
    _skyrl("gspo, sequence mean", {"loss_type": "gspo", "loss_reduction": "sequence_mean"}, {"loss_type": "gspo_token"} | _NONE),
    _skyrl("cispo", {"loss_type": "cispo"}, {"loss_type": "cispo"} | _NONE),
    _skyrl("sapo", {"loss_type": "sapo", "loss_reduction": "sequence_mean"}, {"loss_type": "sapo"} | _NONE),
    _skyrl("dppo tv", {"loss_type": "dppo"}, {"loss_type": "dppo_tv"} | _NONE, value=False, far=False),
    _skyrl("dppo kl", {"loss_type": "dppo", "dppo__dppo_type": "binary_kl"}, {"loss_type": "dppo_kl"} | _NONE, value=False, far=False),
    Feature(
        "skyrl", "prompt mean",
        lambda b: call.skyrl(b, loss_reduction="prompt_mean", prompt_boundaries=boundaries(b)),
        lambda b: loss(b, "skyrl", loss_agg_mode="prompt-mean", group_ids=b.group_ids, reference=False),
        batch={"together": True},
    ),
    *(
        Feature(
            "skyrl", f"advantages {theirs}",
            lambda b, theirs=theirs, more=more: call.skyrl_advantages(b, b.rewards[:, 0], theirs, **more),
            lambda b, ours=ours: on_tokens(b, advantages(b, "skyrl", **ours)),
            rtol=rtol,
        )
        for theirs, more, ours, rtol in (
            ("grpo", {}, {}, EXACT),
            ("grpo", {"grpo_norm_by_std": False}, {"scale": "none"}, EXACT),
            ("rloo", {}, {"estimator": "rloo"}, EXACT),
        )
    ),
]  # fmt: skip


def boundaries(batch: Ragged) -> list[tuple[int, int]]:
    starts = np.flatnonzero(np.r_[True, batch.group_ids[1:] != batch.group_ids[:-1]])
    return [(int(a), int(b)) for a, b in zip(starts, [*starts[1:], batch.n], strict=True)]


_areal = _losses("areal", 0.0, call.areal)
AREAL = [
    _areal("default"),
    _areal("packed", {"packed": True}),
    _areal("clip-higher, dual clip", {"eps_clip_higher": 0.28, "c_clip": 3.0}, {"epsilon_high": 0.28, "dual_clip": 3.0}),
    *(
        _areal(
            f"gspo, {'packed' if packed else 'padded'}", {"importance_sampling_level": "sequence", "packed": packed},
            {"loss_type": "gspo", "loss_agg_mode": "token-mean"},
        )
        for packed in (False, True)
    ),
    _areal("sapo", {"sapo": True}, {"loss_type": "sapo", "loss_agg_mode": "token-mean"}),
    *(
        Feature(
            "areal", f"advantages {name}",
            lambda b, theirs=theirs: in_groups(b, lambda r: call.areal_advantages(r, 4, **theirs)),
            lambda b, ours=ours: advantages(b, "areal", **ours),
            batch=EQUAL,
        )
        for name, theirs, ours in (
            ("group", {}, {}),
            ("biased", {"std_unbiased": False}, {"ddof": 0}),
            ("leave one out", {"mean_leave1out": True, "std_level": None}, {"estimator": "rloo"}),
            ("mean only", {"std_level": None}, {"scale": "none"}),
        )
    ),
    *(
        Feature(
            "areal", f"KL {k}", lambda b, k=k: held(b, call.areal_kl(b, k)),
            lambda b, k=k: held(
                b, Result(gf.kl(b.seen("logp"), b.seen("ref_logp"), kl_estimator=k, kl_clamp_out=10.0)[0])
            ),
        )
        for k in ("k1", "k2", "k3")
    ),
]  # fmt: skip

_tunix = _losses("tunix", 0.04, call.tunix, rtol=EXACT)
TUNIX = [
    _tunix("default", {"beta": 0.04}),
    _tunix("k3", {"beta": 0.04, "kl_loss_mode": "low_var_kl"}, {"kl_estimator": "k3"}, far=False),
    _tunix("k2", {"beta": 0.04, "kl_loss_mode": "mse_kl"}, {"kl_estimator": "k2"}),
    _tunix(
        "k3 clamped", {"beta": 0.04, "kl_loss_mode": "low_var_kl", "kl_clamp_value": 5.0}, {"kl_estimator": "k3", "kl_clamp_out": 5.0}
    ),
    _tunix("dapo", {"loss_agg_mode": "token-mean", "epsilon_high": 0.28}, {"loss_type": "dapo"}),
    _tunix("dual clip", {"epsilon_c": 3.0}, {"dual_clip": 3.0} | _NONE),
    _tunix(
        "dr_grpo", {"loss_agg_mode": "sequence-mean-token-scale"},
        {"loss_type": "dr_grpo", "max_completion_length": lambda b: width(b)} | _NONE,
    ),
    _tunix("token sum", {"loss_agg_mode": "seq-mean-token-sum"}, {"loss_agg_mode": "seq-mean-token-sum"} | _NONE),
    _tunix("gspo-token", {"loss_algo": "gspo-token"}, {"loss_type": "gspo_token"} | _NONE, far=False),
    *(
        Feature(
            "tunix", f"advantages {theirs}",
            lambda b, theirs=theirs: in_groups(b, lambda r: call.tunix_advantages(r, theirs, 4)),
            lambda b, ours=ours: advantages(b, "tunix", **ours),
            batch=EQUAL,
        )
        for theirs, ours in (("grpo", {}), ("rloo", {"estimator": "rloo"}), ("drgrpo", {"scale": "none"}))
    ),
]  # fmt: skip

TINKER = [
    Feature(
        "tinker", "ppo", lambda b: call.skyrl_tinker(b, "ppo"), lambda b: loss(b, "tinker", loss_type="grpo", loss_agg_mode="token-sum", reference=False),
    ),
    Feature(
        "tinker", "importance sampling", lambda b: call.skyrl_tinker(b, "importance_sampling"),
        lambda b: loss(b, "tinker", loss_type="importance_sampling", loss_agg_mode="token-sum", reference=False),
    ),
    Feature(
        "tinker", "cispo", lambda b: call.skyrl_tinker(b, "cispo", 0.0, 4.0),
        lambda b: loss(b, "tinker", loss_type="cispo", loss_agg_mode="token-sum", reference=False),
    ),
    Feature(
        "tinker", "advantages", lambda b: call.tinker_advantages(b, b.rewards[:, 0]), lambda b: advantages(b, "tinker"),
    ),
]  # fmt: skip

CORRECTIONS = [
    *(
        Feature(
            "openrlhf",
            f"correction by token, {theirs}",
            lambda b, theirs=theirs: call.openrlhf(
                b,
                sampling=True,
                is_correction_level="token",
                is_correction_mode=theirs,
                is_correction_threshold=(0.5, 5.0),
            ),
            lambda b, ours=ours: corrected(b, "openrlhf", {"mode": ours, "clip_min": 0.5, "clip_max": 5.0}),
        )
        for theirs, ours in (("clip", "token_truncate"), ("mask", "token_mask"))
    ),
    *(
        Feature(
            "skyrl",
            f"tis by {theirs}",
            lambda b, theirs=theirs: call.skyrl(b, sampling=True, off_policy_correction__tis_ratio_type=theirs),
            lambda b, ours=ours: corrected(b, "skyrl", ours),
        )
        for theirs, ours in (
            ("token", {"mode": "token_truncate", "clip_max": 2.0}),
            ("sequence", {"mode": "sequence_truncate", "clip_max": 5.0, "sequence_ratio": "product"}),
        )
    ),
    *(
        Feature(
            "areal",
            f"rejection by {level}, {action}",
            lambda b, level=level, action=action: call.areal(
                b, rejection={"level": level, "action": action, "upper": 2.0}
            ),
            lambda b, ours=ours: corrected(b, "areal", {"clip_max": 2.0, **ours}),
        )
        for level, action, ours in (
            ("token", "mask", {"mode": "token_mask"}),
            ("token", "clamp", {"mode": "token_truncate"}),
            ("sequence", "mask", {"mode": "sequence_mask", "sequence_ratio": "geometric"}),
            ("sequence", "clamp", {"mode": "sequence_truncate", "sequence_ratio": "geometric"}),
        )
    ),
]

FEATURES = [*CORRECTIONS, *LIGER, *OPENRLHF, *SKYRL, *AREAL, *TUNIX, *TINKER]
