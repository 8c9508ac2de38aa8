"""The same on padded arrays, left or right padded, without packing them: one import to change.

Token arrays are (..., L) with the completions in the leading dimensions, usually (B, L) or
(prompts, group size, L). The kernels visit each row from its first counted slot to its last and
skip what lies around, whatever it holds.
"""

from __future__ import annotations

from .advantages import group_advantages, process_advantages
from .corrections import importance_weights, off_policy_metrics, off_policy_weights, top_entropy_weights
from .losses import grpo, grpo_loss
from .reward_kl import kl_in_reward

__all__ = [
    "group_advantages",
    "grpo",
    "grpo_loss",
    "importance_weights",
    "kl_in_reward",
    "off_policy_metrics",
    "off_policy_weights",
    "process_advantages",
    "top_entropy_weights",
]
