"""trl==1.16.0, its own methods on ragged batches: padded, called, unpadded.

A trainer is replaced by an object that has the attributes its methods read. Whatever is computed is computed by the
imported methods; the stand-in only hands out tensors where a trainer would run a model or an engine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.gmpo import GMPOTrainer
from trl.rewards import accuracy_rewards
from trl.rewards.other_rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from .batches import Ragged, contiguous, pad, tokens, unpad
from .results import Result, float64

VERSION = trl.__version__
PAD, EOS = 0, 1


class Accelerator:
    """One process that talks to nobody."""

    device = torch.device("cpu")
    process_index = 0
    sync_gradients = True

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str = "sum") -> Any:
        return x

    def pad_across_processes(self, x: Any, dim: int = 0, pad_index: float = 0) -> Any:
        return x


def stand_in(batch: Ragged, **options: Any) -> SimpleNamespace:
    """What the trainers' methods read from ``self``, with TRL's own defaults."""
    config = trl.GRPOConfig
    fields = {name: field.default for name, field in config.__dataclass_fields__.items()}
    args = SimpleNamespace(
        per_device_train_batch_size=batch.n,
        per_device_eval_batch_size=batch.n,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        **{
            name: options.pop(name, fields[name])
            for name in (
                "use_bias_correction_kl", "delta", "sapo_temperature_pos", "sapo_temperature_neg",
                "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
            )
        },
    )  # fmt: skip
    args.steps_per_generation = options.pop("steps_per_generation", 1)
    epsilon = options.pop("epsilon", fields["epsilon"])
    epsilon_high = options.pop("epsilon_high", None)
    self = SimpleNamespace(
        args=args,
        accelerator=Accelerator(options.pop("num_processes", 1)),
        model=SimpleNamespace(training=options.pop("training", True), is_gradient_checkpointing=False),
        ref_model=object(),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="dapo",
        epsilon_low=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=fields["vllm_importance_sampling_mode"],
        vllm_importance_sampling_clip_max=fields["vllm_importance_sampling_clip_max"],
        vllm_importance_sampling_clip_min=None,
        current_gradient_accumulation_steps=1,
        max_completion_length=fields["max_completion_length"],
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        environment_factories=None,
        environments=None,
        tools=None,
        _is_vlm=False,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        eos_token_ids=[EOS],
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=1,
        num_generations_eval=1,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        normalize_advantages=False,
        reward_clip_range=None,
        log_multimodal=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs=defaultdict(list),
        _pending_metrics=defaultdict(list),
    )
    unknown = [name for name in options if not hasattr(self, name)]
    if unknown:
        raise TypeError(f"no such attribute of the trainer: {unknown}")
    vars(self).update(options)
    for name in ("get_off_policy_mask", "get_gamma_weights"):  # static methods
        setattr(self, name, getattr(GRPOTrainer, name))
    self.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(self)
    return self


def tensor(batch: Ragged, name: str) -> torch.Tensor:
    return torch.tensor(pad(batch, batch.seen(name)))


def loss(
    batch: Ragged,
    *,
    trainer: str = "grpo",
    old: bool = True,
    advantages: np.ndarray | None = None,
    num_items_in_batch: float | None = None,
    sampling: bool = False,
    **options: Any,
) -> Result:
    """``_compute_loss`` of GRPOTrainer, GMPOTrainer or RLOOTrainer, and its gradient in logp.

    ``sampling`` passes the sampling engine's log-probs, so with ``use_vllm`` the importance ratios are those that
    ``_generate_and_score_completions`` computes from them.
    """
    cls = {"grpo": GRPOTrainer, "gmpo": GMPOTrainer, "rloo": RLOOTrainer}[trainer]
    with float64():
        self = stand_in(batch, **options)
        leaf = torch.tensor(pad(batch, batch.seen("logp")), requires_grad=True)
        entropy = tensor(batch, "entropy")
        self._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropy, None)
        inside = torch.tensor(pad(batch, np.ones(len(batch.mask), np.int64), 0))
        inputs: dict[str, Any] = {
            "prompt_ids": torch.ones(batch.n, 1, dtype=torch.long),
            "prompt_mask": torch.ones(batch.n, 1, dtype=torch.long),
            "completion_ids": inside,
            "completion_mask": inside,
            "advantages": torch.tensor(batch.advantages if advantages is None else advantages),
            "num_items_in_batch": torch.tensor(
                float(batch.n_tokens if num_items_in_batch is None else num_items_in_batch)
            ),
        }
        if not batch.mask.all():
            inputs["tool_mask"] = torch.tensor(pad(batch, batch.mask.astype(np.int64), 1))
        if old:
            inputs["old_per_token_logps"] = tensor(batch, "old_logp")
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = tensor(batch, "ref_logp")
        if sampling:
            inputs["sampling_per_token_logps"] = tensor(batch, "sampling_logp")
        if self.use_vllm:
            inputs["importance_sampling_ratio"] = torch.tensor(importance_ratio_padded(batch, self))
        if trainer == "rloo":  # the mask of this trainer is the completion's own
            inputs["old_logps"] = (tensor(batch, "old_logp") * inside).sum(1)
        value = cls._compute_loss(self, None, inputs)
        value.backward()
    mode = "train" if self.model.training else "eval"
    metrics = {name: values[-1] for name, values in self._metrics[mode].items()}
    return Result(value.item(), unpad(batch, leaf.grad.numpy()), metrics)


def generated(batch: Ragged, self: SimpleNamespace, cls: Any = GRPOTrainer, rewards: np.ndarray | None = None) -> Any:
    """The real ``_generate_and_score_completions`` on completions that exist already."""
    rewards = np.zeros((batch.n, 1)) if rewards is None else rewards
    ids = [[2] * int(length) for length in batch.lengths]
    masks = np.split(batch.mask.astype(int), batch.token_offsets[1:-1])
    sampling = np.split(batch.seen("sampling_logp"), batch.token_offsets[1:-1])
    self._generate = lambda prompts: (
        [[2]] * batch.n,
        ids,
        None if batch.mask.all() else [m.tolist() for m in masks],
        ["" for _ in ids],
        [s.tolist() for s in sampling] if self.use_vllm else None,
        {},
        None,
        None,
    )
    if cls is RLOOTrainer:
        self._generate = lambda prompts: ([[2]] * batch.n, ids, ["" for _ in ids])
    self._calculate_rewards = lambda *_: torch.tensor(rewards)
    self.reward_funcs = [None] * rewards.shape[1]
    self.reward_func_names = [f"reward_{k}" for k in range(rewards.shape[1])]
    logps = {id(self.model): tensor(batch, "old_logp"), id(self.ref_model): tensor(batch, "ref_logp")}
    self._get_per_token_logps_and_entropies = lambda model, *_, **__: (logps[id(model)], None, None)
    return cls._generate_and_score_completions(self, [{"prompt": ""} for _ in range(batch.n)])


def importance_ratio_padded(batch: Ragged, self: SimpleNamespace) -> np.ndarray:
    keep = getattr(self, "_get_per_token_logps_and_entropies", None)
    self.reward_weights = torch.ones(1)
    ratio = generated(batch, self)["importance_sampling_ratio"].numpy()
    self._get_per_token_logps_and_entropies = keep
    return ratio


def importance_ratio(batch: Ragged, **options: Any) -> Result:
    """The vLLM importance ratios: one per token, or one per completion in the sequence modes."""
    with float64():
        self = stand_in(batch, use_vllm=True, **options)
        ratio = importance_ratio_padded(batch, self)
    metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    value = (
        ratio[:, 0] if ratio.shape[1] == 1 and "sequence" in self.vllm_importance_sampling_mode else unpad(batch, ratio)
    )
    return Result(value, None, metrics)


def advantages(
    batch: Ragged, *, trainer: str = "grpo", reward_weights: Any = None, evaluation: bool = False, **options: Any
) -> Result:
    """The inline advantages of GRPOTrainer and RLOOTrainer; all groups of one size."""
    order = contiguous(batch)
    sorted_batch = batch.take(order)
    size = int(np.unique(batch.group_ids, return_counts=True)[1][0])
    with float64():
        self = stand_in(
            sorted_batch, training=not evaluation, num_generations=size, num_generations_eval=size, **options
        )
        weights = np.ones(batch.rewards.shape[1]) if reward_weights is None else reward_weights
        self.reward_weights = torch.tensor(np.asarray(weights, dtype=float))
        cls = RLOOTrainer if trainer == "rloo" else GRPOTrainer
        output = generated(sorted_batch, self, cls, sorted_batch.rewards)
    value = np.empty(batch.n)
    value[order] = output["advantages"].numpy()
    metrics = {name: values[-1] for name, values in self._metrics["eval" if evaluation else "train"].items() if values}
    return Result(value, None, metrics)


def async_advantages(batch: Ragged) -> Result:
    """AsyncGRPO's rollout worker scores one group at a time, of any size."""
    value = np.empty(batch.n)
    for name in np.unique(batch.group_ids):
        rows = np.flatnonzero(batch.group_ids == name)
        columns = [[None if np.isnan(x) else float(x) for x in column] for column in batch.rewards[rows].T]
        self = SimpleNamespace(
            reward_funcs=[(lambda c: lambda **_: c)(column) for column in columns],
            reward_func_names=[f"reward_{k}" for k in range(len(columns))],
            _env_reward_types=[],
            _provides_rollout_reward=False,
        )
        sequence = SimpleNamespace(input_ids=[], completion_mask=[], old_log_probs=[])
        n = len(rows)
        group = async_rollout_worker.RolloutGroup(
            prompts=[[]] * n, reward_kwargs={}, completions=[[]] * n, completions_ids=[[]] * n,
            completions_sequences=[[sequence]] * n, tool_call_counts=[0] * n, tool_failure_counts=[0] * n,
            model_version=0, group_id=0, env_rewards=[None] * n, rollout_rewards=[None] * n,
        )  # fmt: skip
        samples = asyncio.run(async_rollout_worker._AsyncRolloutLoop._score_group(self, group))
        value[rows] = [s.advantage for s in samples]
    return Result(value)


def high_entropy(batch: Ragged, quantile: float) -> Result:
    """Which tokens ``top_entropy_quantile`` keeps."""
    with float64():
        self = stand_in(batch)
        mask = torch.tensor(pad(batch, batch.mask.astype(np.int64)))
        keep = self.get_high_entropy_mask(tensor(batch, "entropy"), mask, 1 - quantile)
    return Result(unpad(batch, keep.numpy()).astype(float))


def off_policy_mask(batch: Ragged, threshold: float) -> Result:
    """The off-policy sequence mask, one number per completion."""
    with float64():
        keep = GRPOTrainer.get_off_policy_mask(
            torch.tensor(batch.advantages)[:, None], tensor(batch, "logp"), tensor(batch, "sampling_logp"),
            torch.tensor(pad(batch, batch.mask.astype(np.int64))), threshold,
        )  # fmt: skip
    return Result(keep.numpy()[:, 0].astype(float))


def overlong(batch: Ragged, max_completion_len: int, soft_punish_cache: int) -> Result:
    reward = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
    return Result(np.array(reward([[2] * int(n) for n in batch.lengths])))


def repetition(batch: Ragged, ngram_size: int, max_penalty: float) -> Result:
    ids = [part.tolist() for part in np.split(tokens(batch), batch.token_offsets[1:-1])]
    return Result(np.array(get_repetition_penalty_reward(ngram_size, max_penalty)(ids)))


def correct(batch: Ragged) -> np.ndarray:
    return batch.rewards[:, 0] > 0


def cosine(batch: Ragged, max_len: int) -> Result:
    """The verifier of answers is replaced by the answer; the schedule is TRL's."""
    reward = accuracy_rewards.get_cosine_scaled_reward(max_len)
    before = accuracy_rewards.accuracy_reward
    accuracy_rewards.accuracy_reward = lambda completions, solution, **_: correct(batch).tolist()
    try:
        ids = [[2] * int(n) for n in batch.lengths]
        return Result(np.array(reward([None] * batch.n, [None] * batch.n, ids)))
    finally:
        accuracy_rewards.accuracy_reward = before
