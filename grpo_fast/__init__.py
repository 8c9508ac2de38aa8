"""GRPO advantages and losses on ragged rollouts, on the CPU, at the speed of memory.

>>> import numpy as np, grpo_fast as gf
>>> advantages = gf.group_advantages([1.0, 0.0, 0.0, 1.0], group_ids=["a", "b", "a", "b"])
>>> advantages.round(4)
array([ 1., -1., -1.,  1.])
"""

from __future__ import annotations

from . import padded
from ._backends import BackendUnavailable, set_backend
from ._info import show_info
from ._threads import set_num_threads
from ._version import __version__
from .advantages import compute_grpo_advantages, group_advantages
from .conventions import Convention, convention
from .losses import LossResult, grpo_loss, kl
from .process import process_advantages
from .rollouts import Rollouts

__all__ = [
    "BackendUnavailable",
    "Convention",
    "LossResult",
    "Rollouts",
    "__version__",
    "compute_grpo_advantages",
    "convention",
    "group_advantages",
    "grpo_loss",
    "kl",
    "padded",
    "process_advantages",
    "set_backend",
    "set_num_threads",
    "show_info",
]
