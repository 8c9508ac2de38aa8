"""The rows of :mod:`grpo_fast.conventions`: facts about frameworks, each with version, file and function."""

from __future__ import annotations

from typing import Any

_VERL_TOKEN_CLIP = {"dual_clip": 3.0, "log_ratio_clamp": 20.0}

ROWS: dict[str, dict[str, Any]] = {
    "paper": {
        "version": "2402.03300",
        "source": "DeepSeekMath, arXiv:2402.03300 sections 4.1 and 4.2; the other rows' own papers",
        "checked": "read",
        "loss": {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "kl_estimator": "k3", "kl_ratio_factor": "none"},
        "methods": {"grpo": {"importance_sampling_level": "token"}},
        "levels": {"token": {}},
        "advantages": {"baseline": "mean", "scale": "group", "ddof": 0, "eps": 1e-8, "singleton": "zero"},
    },
    "trl": {
        "version": "1.16.0",
        "source": "trl/trainer/grpo_trainer.py, rloo_trainer.py, experimental/gmpo",
        "checked": "executed",
        "loss": {
            "loss_type": "dapo",
            "epsilon": 0.2,
            "beta": 0.0,
            "kl_estimator": "k3",
            "kl_ratio_factor": "ratio",
            "empty_rows": "count",
        },
        "methods": {
            **{name: {"importance_sampling_level": "token"} for name in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")},
            "gspo": {"importance_sampling_level": "sequence", "levels": ("sequence",)},
            "cispo": {"importance_sampling_level": "token", "cispo_bound": "cap", "epsilon_high": 0.2},
            "sapo": {
                "importance_sampling_level": "token",
                "sapo_temperature_pos": 1.0,
                "sapo_temperature_neg": 1.05,
            },
            "vespo": {
                "importance_sampling_level": "token",
                "vespo_k_pos": 2.0,
                "vespo_lambda_pos": 3.0,
                "vespo_k_neg": 3.0,
                "vespo_lambda_neg": 2.0,
            },
            "gmpo": {"epsilon": 0.4, "kl_ratio_factor": "none"},
        },
        "levels": {"token": {}, "sequence": {}},
        "advantages": {
            "baseline": "mean",
            "scale": "group",
            "ddof": 1,
            "eps": 1e-4,
            "singleton": "zero",
            "nan_policy": "exclude",
            "multi_objective_aggregation": "sum_then_normalize",
        },
        "estimators": {"rloo": {"baseline": "leave_one_out", "scale": "none"}},
        "corrections": {"mode": "sequence_mask", "clip_max": 3.0},
        "notes": (
            "loss_type='cispo' with the default epsilon_high caps every weight at 0.2, as TRL does; 5.0 is recommended",
            "an empty completion, which TRL cannot hold, counts as a sequence",
            "divisions by gradient accumulation steps are left to the caller (num_processes takes them for dapo, cispo "
            "and vespo: num_processes * steps_per_generation / gradient_accumulation_steps)",
        ),
    },
    "verl": {
        "version": "0.9.1",
        "source": "verl/trainer/ppo/core_algos.py, rollout_corr_helper.py; workers/config/actor.py",
        "checked": "executed",
        "loss": {
            "loss_type": "grpo",
            "loss_agg_mode": "token-mean",
            "epsilon": 0.2,
            "beta": 0.0,
            "kl_estimator": "k3",
            "kl_ratio_factor": "none",
            "empty_rows": "exclude",
        },
        "methods": {
            **{name: {"importance_sampling_level": "token"} for name in ("grpo", "dapo", "dr_grpo")},
            "gspo_token": {"importance_sampling_level": "sequence_token", "levels": ("sequence_token",)},
            "cispo": {"importance_sampling_level": "token", "levels": ("token",), "cispo_bound": "relative"},
            "sapo": {
                "importance_sampling_level": "token",
                "levels": ("token",),
                "sapo_temperature_pos": 1.0,
                "sapo_temperature_neg": 1.05,
                "kl_agg_mode": "token-mean",
            },
            "gpg": {"importance_sampling_level": "token", "levels": ("token",)},
            "gmpo": {"empty_rows": "count", "kl_agg_mode": "token-mean"},
            "dppo_tv": {"importance_sampling_level": "token", "levels": ("token",), "delta": 3.0},
            "dppo_kl": {"importance_sampling_level": "token", "levels": ("token",), "delta": 3.0},
            "dro": {"importance_sampling_level": "token", "levels": ("token",), "log_ratio_clamp": None},
            "clip_cov": {
                "importance_sampling_level": "token",
                "levels": ("token",),
                "log_ratio_clamp": None,
                "dual_clip": None,
                "clip_cov_ratio": 2e-4,
                "clip_cov_lb": 1.0,
                "clip_cov_ub": 5.0,
            },
            "kl_cov": {
                "importance_sampling_level": "token",
                "levels": ("token",),
                "log_ratio_clamp": None,
                "kl_cov_ratio": 2e-4,
                "ppo_kl_coef": 0.1,
            },
        },
        "levels": {"token": _VERL_TOKEN_CLIP, "sequence_token": {"log_ratio_cap": 10.0}},
        "kl": {"k3": {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0}},
        "advantages": {"baseline": "mean", "scale": "group", "ddof": 1, "eps": 1e-6, "singleton": "raw"},
        "estimators": {
            "rloo": {"baseline": "leave_one_out", "scale": "none"},
            "opo": {"baseline": "length_weighted", "scale": "none"},
        },
        "corrections": {"clip_max": 2.0, "log_ratio_clamp": 20.0},
        "notes": (
            "rewards on masked slots are not summed into the score (verl-project/verl#6310)",
            "at r == dual_clip with A < 0 the whole gradient flows; verl gives half of it",
            "a batch without a counted token has loss 0; verl divides 0 by 0 without global counts",
        ),
    },
    "nemo-rl": {
        "version": "7ea279a",
        "source": "nemo_rl/algorithms/advantage_estimator.py, utils.py, loss/loss_functions.py",
        "checked": "read",
        "loss": {
            "loss_type": "dapo",
            "epsilon": 0.2,
            "beta": 0.01,
            "kl_estimator": "k3",
            "kl_ratio_factor": "none",
            "kl_clamp_in": 20.0,
            "kl_clamp_out": 10.0,
        },
        "methods": {
            **{name: {"importance_sampling_level": "token"} for name in ("grpo", "dapo")},
            "gspo": {"importance_sampling_level": "sequence", "levels": ("sequence",)},
            "cispo": {"importance_sampling_level": "token", "cispo_bound": "relative"},
        },
        "levels": {"token": {}, "sequence": {}},
        "advantages": {
            "baseline": "leave_one_out",
            "scale": "leave_one_out",
            "ddof": 1,
            "eps": 1e-6,
            "singleton": "zero",
        },
    },
}
