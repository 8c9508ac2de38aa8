"""verl==0.9.1, its own functions on ragged batches: padded, called, unpadded."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from tensordict import NonTensorData, TensorDict
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from .batches import Ragged, outcome_at_end, pad, unpad, width
from .results import Result, float64

VERSION = verl.__version__


def padded(batch: Ragged, flat: np.ndarray | str, extra: int = 0, fill: float = 0.0) -> torch.Tensor:
    flat = batch.seen(flat) if isinstance(flat, str) else flat
    return torch.tensor(pad(batch, flat, fill, extra))


def padded_mask(batch: Ragged, extra: int = 0) -> torch.Tensor:
    return torch.tensor(pad(batch, batch.mask.astype(np.int64), 0, extra))


def nested(batch: Ragged, flat: np.ndarray) -> torch.Tensor:
    parts = torch.split(torch.tensor(flat), batch.lengths.tolist())
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def actor_config(loss_mode: str = "vanilla", policy: dict[str, Any] | None = None, **options: Any) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(policy or {})),
        **options,
    )


def loss(
    batch: Ragged,
    loss_mode: str = "vanilla",
    *,
    loss_agg_mode: str = "token-mean",
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    dp_size: int = 1,
    beta: float | None = None,
    kl: str = "low_var_kl",
    weights: np.ndarray | None = None,
    advantages: np.ndarray | None = None,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """``verl.workers.utils.losses.ppo_loss``: the registered policy loss, and the KL loss with ``beta``.

    ``advantages`` are those of the completions unless others, one per token, are given.
    """
    with float64():
        config = actor_config(
            loss_mode, policy, loss_agg_mode=loss_agg_mode, use_kl_loss=beta is not None, kl_loss_type=kl,
            kl_loss_coef=0.0 if beta is None else beta, **options,
        )  # fmt: skip
        leaf = torch.tensor(batch.seen("logp"), requires_grad=True)
        # The engine's output has one number per token of prompt and response, each for the token after it.
        sequences = [
            torch.cat([part, torch.zeros(1)]) for part in torch.split(leaf, batch.lengths.tolist())
        ]  # a prompt of one token: its output is that of the first token of the response
        output = torch.cat(sequences)
        per_token = batch.advantages[batch.owner] if advantages is None else advantages
        fields: dict[str, Any] = {
            "prompts": torch.nested.as_nested_tensor([torch.ones(1)] * batch.n, layout=torch.jagged),
            "responses": nested(batch, np.ones(len(batch.mask))),
            "response_mask": nested(batch, batch.mask.astype(np.int64)),
            "old_log_probs": nested(batch, batch.seen("old_logp")),
            "advantages": nested(batch, per_token),
        }
        if beta is not None:
            fields["ref_log_prob"] = nested(batch, batch.seen("ref_logp"))
        if weights is not None:
            fields["rollout_is_weights"] = nested(batch, weights)
        data = TensorDict(
            {
                **fields,
                "dp_size": NonTensorData(dp_size),
                "batch_num_tokens": NonTensorData(batch_num_tokens),
                "global_batch_size": NonTensorData(global_batch_size),
            },
            batch_size=[batch.n],
        )
        value, metrics = ppo_loss(config, {"log_probs": output}, data)
        value.backward()
    return Result(value.item(), leaf.grad.numpy(), {name: number(m) for name, m in metrics.items()})


def number(metric: Any) -> float:
    metric = getattr(metric, "values", metric)
    metric = metric[0] if isinstance(metric, list) else metric
    return float(metric)


def agg_loss(batch: Ragged, flat: np.ndarray, loss_agg_mode: str, **options: Any) -> Result:
    """``agg_loss`` by itself."""
    with float64():
        value = core_algos.agg_loss(padded(batch, flat), padded_mask(batch), loss_agg_mode, **options)
    return Result(float(value))


#: What each estimator takes beside rewards and the mask.
GROUPED = (
    "grpo", "grpo_vectorized", "gdpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo",
    "gpg", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
TOKEN_REWARDS = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")


def advantages(
    batch: Ragged,
    estimator: str,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    reward_weights: Any = None,
    weights: np.ndarray | None = None,
    leak: bool = False,
    **options: Any,
) -> Result:
    """A row of ``ADV_ESTIMATOR_REGISTRY``: one advantage per token, returns in ``extra``.

    ``leak``: the rewards are those of tokens, with numbers on masked ones, also where an outcome is expected.
    """
    function = core_algos.get_adv_estimator_fn(estimator)
    with float64():
        mask = padded_mask(batch)
        if leak or estimator in TOKEN_REWARDS:
            rewards = padded(batch, "token_rewards")
        else:
            rewards = torch.tensor(outcome_at_end(batch, batch.rewards[:, 0]))
        keywords: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask, **options}
        config = AlgoConfig(gamma=gamma, lam=lam, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
        if estimator in GROUPED:
            keywords["index"] = batch.group_ids
        if estimator == "gae":
            keywords.update(values=padded(batch, "values"), gamma=gamma, lam=lam)
        elif estimator == "remax":
            keywords["reward_baselines"] = torch.tensor(batch.baselines)
        elif estimator in ("grpo", "grpo_vectorized", "gdpo"):
            keywords["norm_adv_by_std_in_grpo"] = norm_adv_by_std_in_grpo
        elif "token_baseline" in estimator:
            keywords.update(old_log_probs=padded(batch, "old_logp"), sum_pi_squared=padded(batch, "sum_pi_squared"))
            keywords["rollout_is_weights"] = None if weights is None else padded(batch, weights)
        if estimator == "gdpo":
            names = [f"reward_{k}" for k in range(batch.rewards.shape[1])]
            keywords["config"] = {"gdpo_reward_keys": names, "gdpo_reward_weights": reward_weights}
            keywords["non_tensor_batch"] = {name: batch.rewards[:, k] for k, name in enumerate(names)}
            inside = torch.tensor(pad(batch, np.ones(len(batch.mask), np.int64)))
            keywords["batch"] = {
                "prompts": torch.ones(batch.n, 1),
                "attention_mask": torch.cat([torch.ones(batch.n, 1), inside], 1).long(),
            }
        elif estimator not in ("gae",):
            keywords["config"] = config
        value, returns = function(**keywords)
    return Result(unpad(batch, value.numpy()), extra={"returns": unpad(batch, returns.numpy())})


def kl(batch: Ragged, estimator: str) -> Result:
    """``kl_penalty`` per token and its slope, 0 on masked tokens."""
    with float64():
        leaf = padded(batch, "logp").requires_grad_()
        value = core_algos.kl_penalty(leaf, padded(batch, "ref_logp"), estimator)
        mask = padded_mask(batch)
        (value * mask).sum().backward()
    return Result(unpad(batch, (value * mask).detach().numpy()), unpad(batch, leaf.grad.numpy()))


def masked_whiten(batch: Ragged, flat: np.ndarray, shift_mean: bool = True) -> Result:
    with float64():
        mask = padded_mask(batch)
        value = torch_functional.masked_whiten(padded(batch, flat), mask, shift_mean) * mask
    return Result(unpad(batch, value.numpy()))


def correction(batch: Ragged, **options: Any) -> Result:
    """``compute_rollout_correction_and_rejection_mask``: weights as the value, the mask in ``extra``."""
    with float64():
        proto, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            padded(batch, "old_logp"), padded(batch, "sampling_logp"), padded_mask(batch), **options
        )
    weights = None if proto is None else unpad(batch, proto.batch["rollout_is_weights"].numpy())
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    return Result(weights, None, metrics, {"mask": unpad(batch, mask.numpy()).astype(bool)})


def preset(batch: Ragged, name: str) -> Result:
    """:func:`correction` with a configuration of ``RolloutCorrectionConfig``, by the name of its factory."""
    config = getattr(RolloutCorrectionConfig, name)()
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    return correction(batch, **{name: getattr(config, name) for name in names})


def adaptive_kl(init: float, target: float, horizon: int, steps: list[tuple[float, int]]) -> Result:
    """The coefficient after every update."""
    control = core_algos.AdaptiveKLController(init, target, horizon)
    values = []
    for current, n_steps in steps:
        control.update(current, n_steps)
        values.append(control.value)
    return Result(np.array(values))


def kl_in_reward(batch: Ragged, estimator: str, beta: float) -> Result:
    """``apply_kl_penalty``: token rewards after the penalty."""
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    with float64():
        data = DataProto.from_dict(
            tensors={
                "response_mask": padded_mask(batch),
                "token_level_scores": padded(batch, "token_rewards"),
                "old_log_probs": padded(batch, "old_logp"),
                "ref_log_prob": padded(batch, "ref_logp"),
            }
        )
        control = core_algos.FixedKLController(beta)
        data, metrics = apply_kl_penalty(data, control, estimator)
    return Result(unpad(batch, data.batch["token_level_rewards"].numpy()), None, metrics)


def filter_groups(batch: Ragged, values: np.ndarray) -> Result:
    """``filter_groups`` of the v1 replay buffer: 1 for completions of groups that stay.

    Its storage, a package of its own that verl imports, is replaced by the values.
    """
    if "transfer_queue" not in sys.modules:
        module = ModuleType("transfer_queue")
        module.KVBatchMeta = object  # type: ignore[attr-defined]
        sys.modules["transfer_queue"] = module
    from verl.trainer.ppo.v1 import replay_buffer

    keys = [f"{name}_{i}" for i, name in enumerate(batch.group_ids)]
    score = dict(zip(keys, values, strict=True))
    replay_buffer.tq.kv_batch_get = lambda keys, partition_id, select_fields: {
        "rm_scores": [torch.tensor([0.0, score[key]], dtype=torch.float64) for key in keys]
    }
    self = SimpleNamespace(
        filter_groups_metric=replay_buffer.FILTER_GROUPS_REWARD_METRIC,
        finished_keys={"train": set(batch.group_ids)},
        _dapo_classification_cache={"train": {}},
        partitions={"train": dict.fromkeys(keys)},
    )
    dropped, _ = replay_buffer.ReplayBuffer._dapo_filtered_keys(self, "train")
    return Result(np.array([name not in dropped for name in batch.group_ids], dtype=float))


def overlong(batch: Ragged, max_resp_len: int, buffer_len: int, penalty_factor: float) -> Result:
    """DAPO's overlong penalty as the reward manager adds it to a score of 0."""
    import asyncio

    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    async def run() -> list[float]:
        scores = []
        for n in batch.lengths:
            self = SimpleNamespace(
                loop=asyncio.get_running_loop(),
                tokenizer=SimpleNamespace(decode=lambda *_, **__: ""),
                reward_router_address=None,
                is_async_reward_score=False,
                compute_score=lambda **_: 0.0,
                overlong_buffer_cfg=SimpleNamespace(
                    enable=True, len=buffer_len, penalty_factor=penalty_factor, log=False
                ),
                max_resp_len=max_resp_len,
            )
            total = width(batch)
            data = DataProto.from_dict(
                tensors={
                    "responses": torch.ones(1, total, dtype=torch.long),
                    "attention_mask": (torch.arange(total)[None] < int(n)).long(),
                },
                non_tensors={
                    "data_source": np.array(["x"], dtype=object),
                    "reward_model": np.array([{"ground_truth": ""}], dtype=object),
                },
            )
            scores.append(float((await DAPORewardManager.run_single(self, data))["reward_score"]))
        return scores

    with float64():
        return Result(np.array(asyncio.run(run())))
