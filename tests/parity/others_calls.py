"""Seven more frameworks, their own functions on ragged batches: padded, called, unpadded.

liger_kernel 0.8.5, openrlhf 0.11.2, skyrl 0.3.0, areal 1.0.4 (torch), google-tunix 0.1.7 (JAX), tinker_cookbook 0.6.1
(its advantages; the losses run on a server, skyrl's restatement of them is called here). ``tools/parity_env_others.sh``
makes the environment. Packages that only engines and clusters need are hollow (:mod:`others_stubs`).
"""

from __future__ import annotations

import importlib
import typing
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import typing_extensions

from .batches import Ragged, outcome_at_end, pad, unpad
from .others_stubs import absent, double
from .results import Result

absent(
    [
        "PIL",
        "accelerate",
        "aiofiles",
        "aiohttp",
        "anthropic",
        "anyio",
        "asyncer",
        "bitsandbytes",
        "blobfile",
        "chz",
        "cloudpathlib",
        "cloudpickle",
        "colorama",
        "colorlog",
        "datasets",
        "deepspeed",
        "distro",
        "einops",
        "fastapi",
        "flash_attn",
        "flask",
        "google",
        "grain",
        "gymnasium",
        "hf_transfer",
        "hf_xet",
        "httpx",
        "huggingface_hub",
        "hydra",
        "hydra_plugins",
        "kagglehub",
        "lark",
        "math_verify",
        "mbridge",
        "megatron",
        "metrax",
        "nest_asyncio",
        "openai",
        "optimum",
        "orbax",
        "orjson",
        "pandas",
        "pebble",
        "peft",
        "perfetto",
        "prettytable",
        "protobuf",
        "psutil",
        "pylatexenc",
        "pynvml",
        "pyqwest",
        "qwix",
        "ray",
        "regex",
        "requests",
        "rich",
        "ring_flash_attn",
        "safetensors",
        "sentencepiece",
        "setproctitle",
        "sgl_kernel",
        "sglang",
        "skyrl_gym",
        "sniffio",
        "sqlalchemy",
        "sqlmodel",
        "swanboard",
        "swanlab",
        "tenacity",
        "tensorboard",
        "tensorboardX",
        "tensordict",
        "tensorflow",
        "tensorflow_datasets",
        "termcolor",
        "tiktoken",
        "tml_renderers",
        "tokenizers",
        "torch_memory_saver",
        "torchao",
        "torchdata",
        "torchvision",
        "tqdm",
        "trackio",
        "transformers",
        "typer",
        "uvicorn",
        "uvloop",
        "vllm",
        "wandb",
        "werkzeug",
        "zmq",
        "zstandard",
    ]
)
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]  # what skyrl's models need below Python 3.12


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def tensor(batch: Ragged, name: str, **options: Any) -> torch.Tensor:
    return torch.tensor(pad(batch, batch.seen(name)), **options)


def padded_mask(batch: Ragged) -> torch.Tensor:
    return torch.tensor(pad(batch, batch.mask.astype(np.float64)))


def of_tokens(batch: Ragged) -> torch.Tensor:
    """The advantage of its completion on every slot."""
    return torch.tensor(pad(batch, batch.advantages[batch.owner]))


def result(batch: Ragged, value: torch.Tensor, leaf: torch.Tensor, **metrics: Any) -> Result:
    value.backward()
    return Result(value.item(), unpad(batch, leaf.grad.numpy()), metrics)


# --- Liger


def liger(
    batch: Ragged, *, old: bool = True, beta: float = 0.0, weights: np.ndarray | None = None, **options: Any
) -> Result:
    """``LigerFusedLinearGRPOFunction.ppo_loss_fn`` on log-probs, in one chunk."""
    module = load("liger_kernel.chunked_loss.grpo_loss")
    with double(module):
        leaf = tensor(batch, "logp", requires_grad=True)
        mask = padded_mask(batch)
        value, metrics = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
            leaf, mask, torch.tensor(batch.advantages), mask,
            ref_per_token_logps=tensor(batch, "ref_logp") if beta else None,
            old_per_token_logps=tensor(batch, "old_logp") if old else None,
            vllm_is_ratio=None if weights is None else torch.tensor(pad(batch, weights)),
            beta=beta, **options,
        )  # fmt: skip
        names = (["kl"] if beta else []) + ["clip_ratio/region_mean"]
        return result(batch, value, leaf, **{n: float(m) for n, m in zip(names, metrics, strict=True)})


# --- OpenRLHF


def openrlhf(
    batch: Ragged,
    *,
    beta: float = 0.0,
    kl_estimator: str = "k1",
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    dp_size: int = 1,
    sampling: bool = False,
    **options: Any,
) -> Result:
    """``PolicyLoss``, and the KL loss of ``ActorPPOTrainer.training_step`` (compute_approx_kl, aggregate_loss) with ``beta``."""
    module, utils = load("openrlhf.models.loss"), load("openrlhf.models.utils")
    info = {"dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
    with double(module, utils):
        leaf = tensor(batch, "logp", requires_grad=True)
        mask = padded_mask(batch)
        value, _clip_ratio, ppo_kl, *_ = module.PolicyLoss(**options)(
            leaf, tensor(batch, "old_logp"), of_tokens(batch), action_mask=mask,
            rollout_log_probs=tensor(batch, "sampling_logp") if sampling else None, **info,
        )  # fmt: skip
        if beta:
            kl = utils.compute_approx_kl(
                leaf, tensor(batch, "ref_logp"), log_probs_old=tensor(batch, "old_logp"), kl_estimator=kl_estimator
            )
            value = value + beta * module.aggregate_loss(kl, mask, **info)
        return result(batch, value, leaf, ppo_kl=ppo_kl.item())


def openrlhf_advantages(batch: Ragged, rewards: np.ndarray, estimator: str, n_samples: int, **reward: Any) -> Result:
    """``RemoteExperienceMaker.compute_advantages_and_returns``: one number per token, no KL; groups lie together."""
    maker = load("openrlhf.trainer.ppo_utils.experience_maker")
    experience = load("openrlhf.trainer.ppo_utils.experience")
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=n_samples),
        reward=SimpleNamespace(clip_range=reward.get("clip_range", (-10.0, 10.0))),
        data=SimpleNamespace(max_len=0),
    )
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=estimator, kl_ctl=SimpleNamespace(value=0.0)
    )
    for name in ("get_cumulative_returns", "get_advantages_and_returns"):
        setattr(self, name, getattr(maker.RemoteExperienceMaker, name).__get__(self))
    with double(maker, load("openrlhf.models.utils")):
        mask = padded_mask(batch)
        one = experience.Experience(
            rewards=torch.tensor(rewards), action_mask=mask, kl=torch.zeros_like(mask), info={}, index=list(range(batch.n)),
            response_length=mask.sum(1),
        )  # fmt: skip
        maker.RemoteExperienceMaker.compute_advantages_and_returns(self, [one])
    return Result(unpad(batch, one.advantages.numpy()))


# --- SkyRL


def skyrl(
    batch: Ragged,
    loss_type: str = "regular",
    *,
    loss_reduction: str = "token_mean",
    beta: float = 0.0,
    kl_estimator: str = "k3",
    max_seq_len: int | None = None,
    prompt_boundaries: list[tuple[int, int]] | None = None,
    sampling: bool = False,
    **options: Any,
) -> Result:
    """``apply_loss_reduction_to_advantages_minibatch``, a registered policy loss, and the worker's KL term with ``beta``."""
    module = load("skyrl.backends.skyrl_train.utils.ppo_utils")
    tools = load("skyrl.backends.skyrl_train.utils.torch_utils")
    config = load("skyrl.train.config").AlgorithmConfig(policy_loss_type=loss_type, loss_reduction=loss_reduction)
    for name, value in options.items():
        inner, _, last = name.rpartition("__")
        owner = getattr(config, inner) if inner else config
        if not hasattr(owner, last):
            raise TypeError(f"no such option: {name}")
        setattr(owner, last, value)
    with double(module, tools):
        leaf = tensor(batch, "logp", requires_grad=True)
        mask = padded_mask(batch)
        advantages = module.apply_loss_reduction_to_advantages_minibatch(
            of_tokens(batch), mask, loss_reduction, batch.n, max_seq_len, prompt_boundaries
        )
        value, _ = module.PolicyLossRegistry.get(loss_type)(
            leaf,
            tensor(batch, "old_logp"),
            advantages,
            config,
            mask,
            tensor(batch, "sampling_logp") if sampling else None,
        )
        if beta:
            kl = module.compute_approx_kl(leaf, tensor(batch, "ref_logp"), mask, kl_estimator)
            value = value + beta * tools.masked_mean(kl, mask, dim=-1).mean()
        return result(batch, value, leaf)


def skyrl_advantages(batch: Ragged, rewards: np.ndarray, estimator: str, **options: Any) -> Result:
    """A registered estimator: one number per token."""
    module = load("skyrl.backends.skyrl_train.utils.ppo_utils")
    with double(module):
        scores, mask = torch.tensor(outcome_at_end(batch, rewards)), padded_mask(batch)
        value, _ = module.AdvantageEstimatorRegistry.get(estimator)(scores, mask, index=batch.group_ids, **options)
    return Result(unpad(batch, value.numpy()))


def skyrl_tinker(batch: Ragged, loss_type: str, low: float = 0.8, high: float = 1.2) -> Result:
    """Tinker's losses as ``skyrl.tinker.loss_fns`` restates them, summed."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    module = load("skyrl.tinker.loss_fns")
    config = module.LossFnConfig(jnp.asarray(low), jnp.asarray(high))

    def total(logp: Any) -> Any:
        mask = jnp.asarray(batch.mask, jnp.float64)
        function = module.LOSS_FUNCTION_MAP[loss_type]
        per_token = function(logp, mask, batch.seen("old_logp"), jnp.asarray(batch.advantages[batch.owner]), config)
        return per_token.sum()

    value, grad = jax.value_and_grad(total)(jnp.asarray(batch.seen("logp")))
    return Result(float(value), np.asarray(grad))


def tinker_advantages(batch: Ragged, rewards: np.ndarray) -> Result:
    """``compute_advantages`` of tinker_cookbook: one number per completion."""
    module = load("tinker_cookbook.rl.data_processing")
    out = np.zeros(batch.n)
    with double(module):
        for name in np.unique(batch.group_ids):
            rows = np.flatnonzero(batch.group_ids == name)
            group = SimpleNamespace(get_total_rewards=lambda rows=rows: [float(r) for r in rewards[rows]])
            out[rows] = module.compute_advantages([group])[0].numpy()
    return Result(out)


# --- AReaL


def areal(
    batch: Ragged,
    *,
    sapo: bool = False,
    packed: bool = False,
    rejection: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """``ppo_actor_loss_fn`` or ``sapo_loss_fn``, on padded rows or on one packed row with cu_seqlens."""
    module = load("areal.utils.functional.functional")
    with double(module, load("areal.utils.data")):

        def lay(flat: np.ndarray) -> torch.Tensor:
            return torch.tensor(flat if packed else pad(batch, flat))

        leaf = lay(batch.seen("logp")).requires_grad_()
        mask = lay(batch.mask)
        common = {
            "advantages": lay(batch.advantages[batch.owner]),
            "loss_mask": mask,
            "cu_seqlens": torch.tensor(batch.token_offsets.astype(np.int32)) if packed else None,
        }
        if sapo:
            value, _ = module.sapo_loss_fn(
                leaf, lay(batch.seen("old_logp")), **common, **{"tau_pos": 1.0, "tau_neg": 1.05}, **options
            )
        else:
            if rejection is not None:
                rejection = load("areal.api.cli_args").RejectionSamplingConfig(**rejection)
            old = lay(batch.seen("old_logp"))
            value, _ = module.ppo_actor_loss_fn(
                leaf, old, lay(batch.seen("sampling_logp")) if rejection else old, rejection_sampling=rejection,
                **{"eps_clip": 0.2} | options, **common,
            )  # fmt: skip
        value.backward()
    grad = leaf.grad.numpy()
    return Result(value.item(), grad if packed else unpad(batch, grad))


def areal_advantages(rewards: np.ndarray, group_size: int, **options: Any) -> Result:
    """``Normalization`` of rewards: one number per completion; groups lie together."""
    module, config = load("areal.utils.data"), load("areal.api.cli_args")
    chosen = {"mean_level": "group", "std_level": "group", "group_size": group_size} | options
    with double(module):
        return Result(module.Normalization(config.NormConfig(**chosen))(torch.tensor(rewards)).numpy())


def areal_kl(batch: Ragged, estimator: str) -> Result:
    """``KLEstimator`` of logp against ref_logp: one number per token."""
    module = load("areal.utils.data")
    with double(module):
        value = module.KLEstimator(estimator)(torch.tensor(batch.seen("logp")), torch.tensor(batch.seen("ref_logp")))
    return Result(value.numpy())


# --- Tunix


def tunix(batch: Ragged, *, beta: float = 0.0, kl_loss_mode: str = "kl", old: bool = True, **options: Any) -> Result:
    """``grpo_loss_fn`` with log-probs in place of a model."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    module, common = load("tunix.rl.algo_core"), load("tunix.rl.common")
    chosen = {
        "beta": beta, "epsilon": 0.2, "loss_algo": "grpo", "loss_agg_mode": "sequence-mean-token-mean", "temperature": 1.0,
        "kl_loss_mode": kl_loss_mode, "kl_clamp_value": None,
    } | options  # fmt: skip
    mask = jnp.asarray(pad(batch, batch.mask.astype(np.float64)))
    padded = {name: jnp.asarray(pad(batch, batch.seen(name))) for name in ("logp", "old_logp", "ref_logp")}
    example = SimpleNamespace(
        prompt_ids=None, completion_ids=None, completion_mask=mask, advantages=jnp.asarray(batch.advantages),
        old_per_token_logps=padded["old_logp"] if old else None, ref_per_token_logps=padded["ref_logp"] if beta else None,
    )  # fmt: skip

    def total(logp: Any) -> Any:
        kept, split = common.compute_per_token_logps, module.nnx
        common.compute_per_token_logps = lambda *_, **__: (logp, jnp.zeros((*logp.shape, 2)))
        module.nnx = SimpleNamespace(split=lambda model: (None, None))
        try:
            return module.grpo_loss_fn(None, example, SimpleNamespace(**chosen), 0, 1)[0]
        finally:
            common.compute_per_token_logps, module.nnx = kept, split

    with double(module, common):
        value, grad = jax.value_and_grad(total)(padded["logp"])
    return Result(float(value), unpad(batch, np.asarray(grad)))


def tunix_advantages(rewards: np.ndarray, estimator: str, num_generations: int) -> Result:
    """A registered estimator: one number per completion; groups lie together."""
    module = load("tunix.rl.algo_core")
    names = {"grpo": "compute_advantages", "rloo": "compute_rloo_advantages", "drgrpo": "compute_drgrpo_advantages"}
    return Result(np.asarray(getattr(module, names[estimator])(rewards, num_generations)))
