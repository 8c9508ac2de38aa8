"""What went wrong elsewhere, in our own numbers: each row is a kind of bug that must not come back.

The tag says where it was met. Losses are written as rows of (advantage, ratios), expectations as
the arithmetic that gives them, so that every figure can be checked by hand.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import exp, inf, log, nan, sqrt
from typing import Any

import numpy as np
import pytest
from batches import random_batch

import grpo_fast as gf
from grpo_fast import tables

LOGP = (-0.4, -1.3, -0.9, -2.1, -0.15, -0.7)  # log-probs of the tokens of a row where their size does not matter


# --- losses ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """One completion: advantage (one, or one a token), ratios, and what else a token can have."""

    adv: Any
    r: Any = 4  # ratios, or the number of tokens on policy
    logp: Any = None
    old: Any = None  # in place of ratios
    ref: Any = None  # ref_logp - logp
    keep: Any = None
    weight: Any = None

    @property
    def tokens(self) -> int:
        if self.logp is not None:
            return len(self.logp)
        return self.r if isinstance(self.r, int) else len(self.r)


@dataclass
class Bug:
    tag: str
    what: str
    rows: list[Row]
    options: dict[str, Any]
    loss: float
    grad: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    cuts: list[list[list[int]]] = field(default_factory=list)  # ways to cut the batch that must add up to the whole


def on_policy(adv: Any, tokens: int, **more: Any) -> Row:
    return Row(adv, tokens, **more)


TEXTBOOK = [0.5, 0.9, 1.1, 1.5, 5.0]

DENOMINATORS = [
    Bug("trl#6369", "tokens of a truncated row stay in the token count",
        [on_policy(-1, 4), on_policy(-1, 4, keep=[0] * 4)], {"loss_type": "dapo"},
        1.0, [1 / 4] * 4 + [0] * 4),
    Bug("trl#6439", "nothing left to count divides by zero",
        [on_policy(1, 3, keep=[0] * 3), on_policy(-1, 2, keep=[0] * 2)], {"loss_type": "dapo"},
        0.0, [0.0] * 5),
    Bug("open-instruct#1685", "a masked batch with a reference is 0, not NaN",
        [Row(1, [1.1, 0.9], ref=[-0.1, -0.1], keep=[0, 0]), Row(-1, [1, 1.3, 0.7], ref=[-0.1] * 3, keep=[0] * 3)],
        {"loss_type": "grpo", "beta": 0.1}, 0.0, [0.0] * 5),
    Bug("trl#3938", "mean of the means of two windows",
        [on_policy(-1, 6), on_policy(-3, 2)], {"loss_type": "dapo", "num_items_in_batch": 8},
        (6 * 1 + 2 * 3) / 8, [1 / 8] * 6 + [3 / 8] * 2, cuts=[[[0], [1]], [[1], [0]]]),
    Bug("verl#906", "the loss depends on how the batch is cut",
        [Row(1, [1.1, 0.7, 1.3]), Row(-0.5, [0.95]), Row(2, [1.05, 0.6]), Row(-1.5, [1.4, 1, 0.88, 1.6, 0.9])],
        {"loss_type": "dapo", "num_items_in_batch": 11},
        (-1.1 - 0.7 - 1.2 + 0.475 - 2.1 - 1.2 + 2.1 + 1.5 + 1.32 + 2.4 + 1.35) / 11,
        np.array([-1.1, -0.7, 0, 0.475, -2.1, -1.2, 2.1, 1.5, 1.32, 2.4, 1.35]) / 11,
        cuts=[[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0], [2, 1]]]),
    Bug("verl#5366", "constant length forgets the number of sequences",
        [on_policy(-1, 2), on_policy(-1, 3)], {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 3},
        5 / 2 / 3, [1 / 6] * 5),
    Bug("miles#2796", "a masked row adds one to the token count",
        [on_policy(-1, 4), on_policy(-1, 2, keep=[0, 0])], {"loss_type": "bnpo"}, 1.0, [1 / 4] * 4 + [0] * 2),
    Bug("verl#2776", "token mean over the batch, whatever the prompts",
        [on_policy(-1, 2), on_policy(-1, 2), on_policy(-2, 1)],
        {"loss_agg_mode": "token-mean", "group_ids": ["p", "p", "q"]}, 6 / 5, [0.2] * 4 + [0.4]),
    Bug("verl#2776", "token mean inside each prompt",
        [on_policy(-1, 2), on_policy(-1, 2), on_policy(-2, 1)],
        {"loss_agg_mode": "prompt-mean", "group_ids": ["p", "p", "q"]}, (1 + 2) / 2, [1 / 8] * 4 + [1]),
    Bug("verl#2776", "inside a prompt tokens are equal, completions are not",
        [on_policy(-1, 1), on_policy(-2, 3), on_policy(-3, 2)],
        {"loss_agg_mode": "prompt-mean", "group_ids": ["p", "p", "q"]},
        (7 / 4 + 3) / 2, [1 / 8, 1 / 4, 1 / 4, 1 / 4, 3 / 4, 3 / 4]),
    Bug("trl#6380", "the KL metric averages parts of unequal size",
        [on_policy(1, 8, ref=[-0.1] * 8), on_policy(-1, 2, ref=[-0.6] * 2)],
        {"loss_type": "dapo", "beta": 0.04, "kl_estimator": "k1"},
        (-8 + 2) / 10 + 0.04 * 0.2, [(-1 + 0.04) / 10] * 8 + [(1 + 0.04) / 10] * 2, {"kl": (8 * 0.1 + 2 * 0.6) / 10}),
    Bug("OpenRLHF#1249", "accumulation averages a short and a long part",
        [on_policy([-1, -2], 2), on_policy([-3, -4, -5, -6, -7], 5)], {"loss_type": "dapo", "num_items_in_batch": 7},
        28 / 7, np.arange(1, 8) / 7, cuts=[[[0], [1]]]),
    Bug("ROLL#444", "the numerator of a token mean is not masked",
        [on_policy([-1, -100], 2, keep=[1, 0]), on_policy([-1, 50], 2, keep=[1, 0])], {"loss_type": "dapo"},
        1.0, [0.5, 0, 0.5, 0]),
    Bug("slime#364", "the length is taken for the number of counted tokens",
        [on_policy([-4, -9, -2], 3, keep=[1, 0, 1])], {"loss_type": "bnpo"}, 3.0, [2, 0, 1]),
    Bug("miles#1328", "a constant divisor nobody can set",
        [on_policy([-1, -2, -3], 3)], {"loss_type": "dr_grpo", "max_completion_length": 4}, 6 / 4, [0.25, 0.5, 0.75]),
    Bug("torchtune", "sums per sequence collapse into one",
        [on_policy(-1, 2), on_policy(-2, 2)], {"loss_type": "luspo"}, (2 + 4) / 2, [0.5, 0.5, 1, 1]),
    Bug("torchtune", "the same through the aggregation",
        [on_policy(-1, 2), on_policy(-2, 2)], {"loss_agg_mode": "seq-mean-token-sum"}, (2 + 4) / 2, [0.5, 0.5, 1, 1]),
    Bug("trl#6654", "sequence sums include masked tokens",
        [on_policy([-1, -1, -5, -5], 4, keep=[1, 1, 0, 0]), on_policy([-1] * 4, 4)],
        {"loss_agg_mode": "seq-mean-token-sum"}, (2 + 4) / 2, [0.5, 0.5, 0, 0, 0.5, 0.5, 0.5, 0.5]),
    Bug("trl 1.16.0", "rows without counted tokens are sequences, unless said otherwise",
        [on_policy(-1, 2), on_policy(-2, 3, keep=[0] * 3), on_policy(-5, 1)], {"loss_type": "grpo"},
        (1 + 0 + 5) / 3, [1 / 6, 1 / 6, 0, 0, 0, 5 / 3]),
    Bug("verl 0.9.1", "and are not where their number is given without them",
        [on_policy(-1, 2), on_policy(-2, 3, keep=[0] * 3), on_policy(-5, 1)], {"loss_type": "grpo", "num_sequences": 2},
        (1 + 5) / 2, [1 / 4, 1 / 4, 0, 0, 0, 5 / 2]),
    Bug("trl#4852", "a given number of sequences is ignored",
        [on_policy(-1, 2), on_policy(-3, 4)], {"loss_type": "grpo", "num_sequences": 8},
        4 / 8, [1 / 16] * 2 + [3 / 32] * 4, cuts=[[[0], [1]]]),
    Bug("trl#6042", "sequence ratios under a token mean weigh by length",
        [Row(1, [1.1, 1.05, 0.98]), Row(-1, [0.9])],
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "num_items_in_batch": 4},
        (-3 * (1.1 * 1.05 * 0.98) ** (1 / 3) + 0.9) / 4,
        [-((1.1 * 1.05 * 0.98) ** (1 / 3)) / 4] * 3 + [0.9 / 4]),
]  # fmt: skip

MASKS = [
    Bug("NeMo-RL#4120", "NaN log-probs behind the mask",
        [Row(1, [1.1, nan, 0.9, 1.05], logp=[-0.4, nan, -0.9, -2.1], keep=[1, 0, 1, 1]),
         Row(-1, [0.85, nan, 1.0], logp=[-0.15, nan, -0.4], keep=[1, 0, 1])], {"loss_type": "grpo"},
        (-(1.1 + 0.9 + 1.05) / 3 + (0.85 + 1) / 2) / 2,
        [-1.1 / 6, 0, -0.9 / 6, -1.05 / 6, 0.85 / 4, 0, 1 / 4]),
    Bug("prime-rl#2084", "an infinite ratio times a mask of 0",
        [Row(0.5, 3, logp=[-0.4, 0, -0.9], old=[-0.4 - log(1.1), -900, -0.9 - log(0.9)], keep=[1, 0, 1]),
         Row(-1.5, [0.86, 1.3])], {"loss_type": "dapo", "num_items_in_batch": 4},
        (-0.55 - 0.45 + 1.29 + 1.95) / 4, [-0.55 / 4, 0, -0.45 / 4, 1.29 / 4, 1.95 / 4]),
    Bug("SkyRL#1633", "an infinite reference behind the mask",
        [Row(1, [1.1, 1.3, nan], ref=[-0.2, 0.1, inf], keep=[1, 1, 0]), Row(-1, [0.85, nan, 1], ref=[0, nan, -0.25], keep=[1, 0, 1])],
        {"loss_type": "grpo", "beta": 0.1},
        (-(1.1 + 1.2) / 2 + (0.85 + 1) / 2
         + 0.05 * (exp(-0.2) - 0.8 + exp(0.1) - 1.1) + 0.05 * (exp(-0.25) - 0.75)) / 2,
        [(-1.1 + 0.1 * (1 - exp(-0.2))) / 4, 0.1 * (1 - exp(0.1)) / 4, 0, 0.85 / 4, 0, (1 + 0.1 * (1 - exp(-0.25))) / 4],
        {"kl": (exp(-0.2) - 0.8 + exp(0.1) - 1.1 + exp(-0.25) - 0.75) / 4}),
    Bug("unsloth-zoo", "garbage in every array",
        [Row(1, 4, logp=[-0.4, -1.3, -inf, -inf], old=[-0.4 - log(1.1), -1.3 - log(1.4), nan, nan], ref=[-0.2, 0.1, inf, inf],
             keep=[1, 1, 0, 0]), Row(-1, [1.1], ref=[0.2])],
        {"loss_type": "grpo", "beta": 0.05, "kl_ratio_factor": "ratio", "epsilon_high": 0.28},
        (-(1.1 + 1.28) / 2 + 0.025 * (1.1 * (exp(-0.2) - 0.8) + 1.4 * (exp(0.1) - 1.1)) + 1.1
         + 0.05 * 1.1 * (exp(0.2) - 1.2)) / 2,
        [(-1.1 + 0.05 * 1.1 * 0.2) / 4, 0.05 * 1.4 * -0.1 / 4, 0, 0, (1.1 - 0.05 * 1.1 * 0.2) / 2],
        {"clip_ratio/high_mean": 1 / 3, "clip_ratio/low_mean": 0.0}),
    Bug("AReaL#1346", "NaN advantages behind the mask",
        [Row([1, 1, nan, nan], [1.1, 0.9, 1.3, 1], keep=[1, 1, 0, 0])], {"loss_type": "grpo"}, -1.0, [-0.55, -0.45, 0, 0]),
    Bug("SkyRL#1633", "NaN weights behind the mask",
        [Row(1, [1.1, 0.9, 1.15], weight=[0.5, 2, nan], keep=[1, 1, 0]), Row(-1, [0.85, 1], weight=[1.5, inf], keep=[1, 0])],
        {"loss_type": "dapo"}, (-0.55 - 1.8 + 1.275) / 3, [-0.55 / 3, -1.8 / 3, 0, 1.275 / 3, 0]),
    Bug("trl#3248", "a masked row makes the KL metric 0/0",
        [on_policy(1, 2, ref=[-0.5, -0.5], keep=[0, 0]), on_policy(-1, 2, ref=[-0.2, -0.2])],
        {"loss_type": "dapo", "beta": 0.1, "kl_estimator": "k1"}, 1 + 0.02, [0, 0, 0.55, 0.55], {"kl": 0.2}),
    Bug("trl", "completions without a token break the indexing",
        [Row(5, []), Row(1, [1.1, 0.9]), Row(-7, []), Row(-1, [1.3, 0.7, 1]), Row(2, [])], {"loss_type": "dapo"},
        (-1.1 - 0.9 + 1.3 + 0.8 + 1) / 5, [-1.1 / 5, -0.9 / 5, 1.3 / 5, 0, 1 / 5]),
    Bug("Soup#723", "masked tokens enter the sequence ratio",
        [Row(1, [1.1, 5, 0.95, 1.02], logp=[-0.4, nan, -0.9, -2.1], keep=[1, 0, 1, 1]), Row(-1, [0.9, 1, 7], keep=[1, 1, 0])],
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        (-((1.1 * 0.95 * 1.02) ** (1 / 3)) + 0.9**0.5) / 2,
        [-((1.1 * 0.95 * 1.02) ** (1 / 3)) / 6, 0, -((1.1 * 0.95 * 1.02) ** (1 / 3)) / 6, -((1.1 * 0.95 * 1.02) ** (1 / 3)) / 6,
         0.9**0.5 / 4, 0.9**0.5 / 4, 0]),
    Bug("NeMo-RL#4120", "log-probs of -inf behind the mask of a loss that multiplies them",
        [Row(1, 4, logp=[-0.4, -1.3, -inf, -inf], old=[-0.4 - log(1.1), -1.3 - log(6.5), -0.8, -1.7], keep=[1, 1, 0, 0]),
         Row(-1, [1.1], logp=[-0.15])], {"loss_type": "cispo", "cispo_bound": "cap", "epsilon_high": 5.0},
        (1.1 * 0.4 + 5 * 1.3 - 1.1 * 0.15) / 3, [-1.1 / 3, -5 / 3, 0, 0, 1.1 / 3]),
    Bug("NeMo-RL#4120", "an infinite gate behind the mask",
        [Row(1, 4, logp=[-0.4, -1.3, 0, 0], old=[-0.4 - log(1.1), -1.3 - log(1.5), -1000, -1000], keep=[1, 1, 0, 0]), Row(-1, [1.1])],
        {"loss_type": "sapo"},
        (-(4 / (1 + exp(-0.1)) + 4 / (1 + exp(-0.5))) / 2 + 4 / 1.05 / (1 + exp(-0.105))) / 2),
    Bug("verl#2337", "tool output in the middle changes the tokens around it",
        [Row(1, [1.1, 0.9, 4, 4, 1.05, 0.7], keep=[1, 1, 0, 0, 1, 1])], {"loss_type": "grpo"},
        -(1.1 + 0.9 + 1.05 + 0.7) / 4, [-1.1 / 4, -0.9 / 4, 0, 0, -1.05 / 4, -0.7 / 4]),
]  # fmt: skip

OVERFLOW = [
    Bug("trl#3015", "0 times inf above the clip",
        [Row(1, 2, logp=[-0.5, -0.5], old=[-900.5, -0.5])], {"loss_type": "grpo"}, (-1.2 - 1) / 2, [0, -0.5]),
    Bug("trl#3015", "underflow below the clip",
        [Row(-1, 2, logp=[-900, -0.5], old=[-0.5, -0.5])], {"loss_type": "grpo"}, (0.8 + 1) / 2, [0, 0.5]),
    Bug("verl#891", "underflow of the smaller branch",
        [Row(1, 2, logp=[-900, -0.5], old=[-0.5, -0.5])], {"loss_type": "grpo"}, -0.5, [0, -0.5]),
    Bug("OpenRLHF#1160", "an unbounded bad token",
        [Row(-1, 2, logp=[-0.5, -0.5], old=[-900.5, -0.5])], {"loss_type": "grpo", "delta": 3.0}, (3 + 1) / 2, [0, 0.5]),
    Bug("OpenRLHF#1160", "the same under the dual clip",
        [Row(-1, 2, logp=[-0.5, -0.5], old=[-900.5, -0.5])], {"loss_type": "grpo", "dual_clip": 3.0}, (3 + 1) / 2, [0, 0.5]),
    Bug("verl#721", "clamped at 20, then dual clip",
        [Row(-2, 3, logp=[-0.5, -0.7, -40], old=[-60.5, -0.7, -0.5])],
        {"loss_type": "dapo", "log_ratio_clamp": 20.0, "dual_clip": 3.0}, (6 + 2 + 1.6) / 3, [0, 2 / 3, 0]),
    Bug("verl#721", "a clamp is visible in a vanishing ratio",
        [Row(1, 1, logp=[-30.5], old=[-0.5])], {"loss_type": "dapo", "log_ratio_clamp": 20.0}, -exp(-20), [0]),
    Bug("trl 1.16.0", "and so is none", [Row(1, 1, logp=[-30.5], old=[-0.5])], {"loss_type": "dapo"}, -exp(-30), [-exp(-30)]),
    Bug("OpenRLHF#1293", "the exponent of a sequence has no bound",
        [Row(1, 2, logp=[-0.5, -0.5], old=[-900.5, -900.5])], {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        -1.2, [0, 0]),
    Bug("unsloth-zoo#869", "the gate of an infinite ratio",
        [Row(1, 2, logp=[-0.5, -0.5], old=[-900.5, -0.5])], {"loss_type": "sapo"}, (-4 - 2) / 2, [0, -0.5]),
    Bug("trl#3015", "an infinite ratio under a cap",
        [Row(1, 1, logp=[-0.5], old=[-900.5])], {"loss_type": "cispo", "cispo_bound": "cap", "epsilon_high": 5.0}, 2.5, [-5]),
]  # fmt: skip

RATIOS = [
    Bug("arXiv:2402.03300 eq. 3", "the branch that carries gradient, A > 0",
        [Row(1, TEXTBOOK)], {"loss_type": "dapo"}, -(0.5 + 0.9 + 1.1 + 1.2 + 1.2) / 5, [-0.5 / 5, -0.9 / 5, -1.1 / 5, 0, 0],
        {"clip_ratio/high_mean": 2 / 5, "clip_ratio/low_mean": 0.0}),
    Bug("arXiv:2402.03300 eq. 3", "the branch that carries gradient, A < 0",
        [Row(-1, TEXTBOOK)], {"loss_type": "dapo"}, (0.8 + 0.9 + 1.1 + 1.5 + 5) / 5, [0, 0.9 / 5, 1.1 / 5, 1.5 / 5, 1],
        {"clip_ratio/high_mean": 0.0, "clip_ratio/low_mean": 1 / 5}),
    Bug("arXiv:1912.09729", "a bad token's ratio grows without bound",
        [Row(-1, TEXTBOOK)], {"loss_type": "dapo", "delta": 3.0}, (0.8 + 0.9 + 1.1 + 1.5 + 3) / 5, [0, 0.9 / 5, 1.1 / 5, 1.5 / 5, 0]),
    Bug("arXiv:1912.09729", "the same under its other name",
        [Row(-1, TEXTBOOK)], {"loss_type": "dapo", "dual_clip": 3.0},
        (0.8 + 0.9 + 1.1 + 1.5 + 3) / 5, [0, 0.9 / 5, 1.1 / 5, 1.5 / 5, 0]),
    Bug("arXiv:1912.09729", "the cap binds on good tokens",
        [Row(1, TEXTBOOK)], {"loss_type": "dapo", "dual_clip": 3.0},
        -(0.5 + 0.9 + 1.1 + 1.2 + 1.2) / 5, [-0.5 / 5, -0.9 / 5, -1.1 / 5, 0, 0]),
    Bug("verl 0.9.1", "a dual clip below the upper bound still caps",
        [Row(-1, [1.05, 1.15, 1.3]), Row(1, [1.05, 1.15, 1.3])], {"loss_type": "dapo", "dual_clip": 1.1},
        (1.05 + 1.1 + 1.1 - 1.05 - 1.15 - 1.2) / 6, [1.05 / 6, 0, 0, -1.05 / 6, -1.15 / 6, 0]),
    Bug("trl 1.16.0", "a delta below the upper bound binds on both signs, and leaves the clipped branch",
        [Row(1, [0.9, 1.15, 1.5]), Row(-1, [0.9, 1.15, 1.5])], {"loss_type": "dapo", "epsilon_high": 0.4, "delta": 1.1},
        (-0.9 - 1.1 - 1.1 + 0.9 + 1.15 + 1.4) / 6, [-0.9 / 6, 0, 0, 0.9 / 6, 1.15 / 6, 0]),
    Bug("arXiv:2503.14476", "the upper bound is used below as well",
        [Row(1, [0.75, 1.25, 1.3, 0.85]), Row(-1, [0.75, 0.85, 1.25, 1.3])], {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
        (-0.75 - 1.25 - 1.28 - 0.85 + 0.8 + 0.85 + 1.25 + 1.3) / 8,
        np.array([-0.75, -1.25, 0, -0.85, 0, 0.85, 1.25, 1.3]) / 8,
        {"clip_ratio/low_mean": 1 / 8, "clip_ratio/high_mean": 1 / 8, "clip_ratio/region_mean": 2 / 8}),
    Bug("trl#3175", "tokens outside the range count as clipped where the other branch is taken",
        [Row([1, -1, 1, -1], [0.7, 0.7, 1.4, 1.4])], {"loss_type": "dapo"},
        (-0.7 + 0.8 - 1.2 + 1.4) / 4, [-0.7 / 4, 0, 0, 1.4 / 4],
        {"clip_ratio/low_mean": 1 / 4, "clip_ratio/high_mean": 1 / 4, "clip_ratio/region_mean": 1 / 2}),
    Bug("trl#3175", "a group without signal counts as clipped",
        [Row(0, [0.5, 1, 2])], {"loss_type": "dapo"}, 0.0, [0, 0, 0], {"clip_ratio/region_mean": 0.0}),
    Bug("trl 1.16.0", "without old log-probs the ratio carries no gradient",
        [on_policy(0.5, 2), on_policy(-2, 3)], {"loss_type": "grpo"}, (-0.5 + 2) / 2, [-1 / 8] * 2 + [1 / 3] * 3),
    Bug("trl 1.16.0", "half the gradient is lost where the branches tie",
        [on_policy(1, 2)], {"loss_type": "grpo", "epsilon": 0.0}, -1.0, [-0.5, -0.5]),
    Bug("trl 1.16.0", "half the gradient is lost where the branches tie, A < 0",
        [on_policy(-1, 2)], {"loss_type": "grpo", "epsilon": 0.0}, 1.0, [0.5, 0.5]),
    Bug("trl 1.16.0", "half the gradient is lost at delta",
        [on_policy(-1, 2)], {"loss_type": "grpo", "delta": 1.0}, 1.0, [0.5, 0.5]),
    Bug("OpenRLHF#1293", "drifts that cancel are clipped one by one",
        [Row(1, 4, logp=[-1, -3, -0.5, -0.5], old=[-3, -1, -0.5, -0.5])], {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        -1.0, [-1 / 4] * 4),
    Bug("arXiv:2507.18071", "the 1/length of the mean is missing from the gradient",
        [Row(1, [1.1, 1.05, 0.98]), Row(-1, [0.9, 0.8]), Row(2, [1.3, 1.3, 1.3, 1.3])],
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        (-((1.1 * 1.05 * 0.98) ** (1 / 3)) + 0.72**0.5 - 2 * 1.2) / 3,
        [-((1.1 * 1.05 * 0.98) ** (1 / 3)) / 9] * 3 + [0.72**0.5 / 6] * 2 + [0] * 4,
        {"clip_ratio/high_mean": 1 / 3, "clip_ratio/low_mean": 0.0}),
    Bug("arXiv:2507.18071 4.3", "the token form: the sequence's value, each token its own gradient",
        [Row([1, 1, -0.5], [1.1, 1.05, 0.98]), Row([-1, 2], [0.85, 0.95])],
        {"loss_type": "grpo", "importance_sampling_level": "sequence_token"},
        (-1.5 / 3 * (1.1 * 1.05 * 0.98) ** (1 / 3) - 0.5 * (0.85 * 0.95) ** 0.5) / 2,
        [*(-np.array([1, 1, -0.5]) * (1.1 * 1.05 * 0.98) ** (1 / 3) / 6), *(np.array([1, -2]) * (0.85 * 0.95) ** 0.5 / 4)]),
    Bug("trl#4499", "the clipped branch of CISPO is inverted",
        [Row(1, [6, 0.5], logp=[-1, -2])], {"loss_type": "cispo", "cispo_bound": "cap", "epsilon_high": 5.0}, (5 + 1) / 2, [-2.5, -0.25]),
    Bug("SkyRL#1928", "the same numbers are other bounds elsewhere",
        [Row(1, [6, 0.5, 1.1], logp=[-1, -2, -0.5])],
        {"loss_type": "cispo", "cispo_bound": "relative", "epsilon": 0.2, "epsilon_high": 0.3},
        (1.3 + 1.6 + 0.55) / 3, [-1.3 / 3, -0.8 / 3, -1.1 / 3]),
    Bug("tinker", "and other ones again",
        [Row(1, [6, 0.5, 1.1], logp=[-1, -2, -0.5])],
        {"loss_type": "cispo", "cispo_bound": "absolute", "epsilon": 0.7, "epsilon_high": 1.3},
        (1.3 + 1.4 + 0.55) / 3, [-1.3 / 3, -0.7 / 3, -1.1 / 3]),
    Bug("unsloth-zoo#869", "SAPO lost its sign and advantage",
        [on_policy(-1, 1)], {"loss_type": "sapo"}, 2 / 1.05, [1.0]),
    Bug("arXiv:2511.20347", "the temperature of the other sign",
        [Row(1, [0.6, 1, 1.7]), Row(-1, [0.6, 1, 1.7])],
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.3},
        (-sum(4 / (1 + exp(1 - r)) for r in (0.6, 1, 1.7)) + sum(4 / 1.3 / (1 + exp(1.3 * (1 - r))) for r in (0.6, 1, 1.7))) / 6,
        [-4 * r * exp(1 - r) / (1 + exp(1 - r)) ** 2 / 6 for r in (0.6, 1, 1.7)]
        + [4 * r * exp(1.3 * (1 - r)) / (1 + exp(1.3 * (1 - r))) ** 2 / 6 for r in (0.6, 1, 1.7)]),
    Bug("arXiv:2504.02546", "a plain policy gradient has no ratio",
        [on_policy(1, 2, logp=[-1, -0.5]), on_policy(-2, 1, logp=[-2])], {"loss_type": "gpg"}, (1 + 0.5 - 4) / 3, [-1 / 3, -1 / 3, 2 / 3]),
    Bug("NeMo-RL", "masked tokens in the extremes of the ratio",
        [Row(1, [1.5, 9, 0.5], keep=[1, 0, 1]), Row(-1, [1, 0.25], keep=[1, 0])], {"loss_type": "dapo"},
        (-1.2 - 0.5 + 1) / 3, None, {"ratio/mean": 1.0, "ratio/min": 0.5, "ratio/max": 1.5}),
    Bug("trl 1.16.0", "a correction weight of 0 is not a mask",
        [Row(1, [1.1, 0.9, 1.3], weight=[0.5, 1, 2]), Row(-1, [0.85, 1.05], weight=[0, 3])], {"loss_type": "dapo"},
        (-0.55 - 0.9 - 2.4 + 0 + 3.15) / 5, [-0.55 / 5, -0.9 / 5, 0, 0, 3.15 / 5]),
]  # fmt: skip


def _kl_rows() -> list[Row]:
    return [Row(1, [1.1, 1.3, 0.9], ref=[-0.2, 0.4, -0.1]), Row(-1, [0.75, 1], ref=[0.3, -0.6])]


def _k3(d: float) -> float:
    return exp(d) - d - 1


_D = [-0.2, 0.4, -0.1, 0.3, -0.6]
_R = [1.1, 1.3, 0.9, 0.75, 1.0]
_SURROGATE = [-1.1, -1.2, -0.9, 0.8, 1.0]
_SLOPE = [-1.1, 0, -0.9, 0, 1.0]
_N = [6, 6, 6, 4, 4]  # 1 / weight of each token under a mean of two rows of three and two
_S = ((1.1 * 1.02 * 0.97) ** (1 / 3), 0.92**0.5)  # two sequence ratios

KL_IN_LOSS = [
    Bug("trl 1.16.0", "KL without a gradient of its own", _kl_rows(), {"loss_type": "grpo", "beta": 0.2},
        sum((v + 0.2 * _k3(d)) / n for v, d, n in zip(_SURROGATE, _D, _N, strict=True)),
        [(s + 0.2 * (1 - exp(d))) / n for s, d, n in zip(_SLOPE, _D, _N, strict=True)], {"kl": sum(map(_k3, _D)) / 5}),
    Bug("trl 1.16.0", "the ratio before the KL is taken for a constant",
        _kl_rows(), {"loss_type": "grpo", "beta": 0.2, "kl_ratio_factor": "ratio"},
        sum((v + 0.2 * r * _k3(d)) / n for v, r, d, n in zip(_SURROGATE, _R, _D, _N, strict=True)),
        [(s - 0.2 * r * d) / n for s, r, d, n in zip(_SLOPE, _R, _D, _N, strict=True)],
        {"kl": sum(r * _k3(d) for r, d in zip(_R, _D, strict=True)) / 5}),
    Bug("NeMo-RL", "or the other way round",
        _kl_rows(), {"loss_type": "grpo", "beta": 0.2, "kl_ratio_factor": "ratio_detached"},
        sum((v + 0.2 * r * _k3(d)) / n for v, r, d, n in zip(_SURROGATE, _R, _D, _N, strict=True)),
        [(s + 0.2 * r * (1 - exp(d))) / n for s, r, d, n in zip(_SLOPE, _R, _D, _N, strict=True)]),
    Bug("trl 1.16.0", "a sequence's ratio spreads each KL over the sequence",
        [Row(1, [1.1, 1.02, 0.97], ref=[-0.2, 0.4, -0.1]), Row(-1, [0.92, 1], ref=[0.3, -0.6])],
        {"loss_type": "grpo", "beta": 0.2, "kl_ratio_factor": "ratio", "importance_sampling_level": "sequence"},
        sum((a + 0.2 * _k3(d)) * s / n for a, d, s, n in zip([-1] * 3 + [1] * 2, _D, [_S[0]] * 3 + [_S[1]] * 2, _N, strict=True)),
        [s / n * (a + 0.2 * (1 - exp(d) + mean)) for a, d, s, n, mean in
         zip([-1] * 3 + [1] * 2, _D, [_S[0]] * 3 + [_S[1]] * 2, _N,
             [sum(map(_k3, _D[:3])) / 3] * 3 + [sum(map(_k3, _D[3:])) / 2] * 2, strict=True)]),
    Bug("verl 0.9.1", "the KL has another denominator than the surrogate",
        _kl_rows(), {"loss_type": "dapo", "beta": 0.2, "kl_estimator": "k2"},
        sum(v + 0.1 * d * d for v, d in zip(_SURROGATE, _D, strict=True)) / 5,
        [(s - 0.2 * d) / 5 for s, d in zip(_SLOPE, _D, strict=True)], {"kl": sum(d * d / 2 for d in _D) / 5}),
    Bug("trl 1.16.0", "the correction weight scales the KL as well",
        [Row(1, [1.1, 1.3, 0.9], ref=[-0.2, 0.4, -0.1], weight=[0.5, 2, 1]), Row(-1, [0.75, 1], ref=[0.3, -0.6], weight=[0, 3])],
        {"loss_type": "dapo", "beta": 0.2, "kl_ratio_factor": "ratio"},
        sum(w * v + 0.2 * r * _k3(d) for w, v, r, d in zip([0.5, 2, 1, 0, 3], _SURROGATE, _R, _D, strict=True)) / 5,
        [(w * s - 0.2 * r * d) / 5 for w, s, r, d in zip([0.5, 2, 1, 0, 3], _SLOPE, _R, _D, strict=True)]),
    Bug("arXiv:2402.03300 eq. 3", "loss, KL and sequence mean in one",
        [on_policy(1, 2, logp=[-1, -2], ref=[0, -1]), on_policy(-1, 1, logp=[-1], ref=[0])], {"loss_type": "grpo", "beta": 0.1},
        0.1 * exp(-1) / 4, [-0.25, (-1 + 0.1 * (1 - exp(-1))) / 4, 0.5]),
]  # fmt: skip

PACKING = [
    Bug("prime-rl#605", "rows are cut one short",
        [Row(1, [1.1, 0.9, 1.3], ref=[-0.1, 0.2, -0.3]), Row(-1, [0.85, 1.05], ref=[-0.05, 0.1]),
         Row(0.5, [0.7, 1, 1.6, 0.95], ref=[-0.2, -0.4, 0.3, -0.15])], {"loss_type": "grpo", "beta": 0.1},
        ((-3.2 + 0.1 * (_k3(-0.1) + _k3(0.2) + _k3(-0.3))) / 3 + (1.9 + 0.1 * (_k3(-0.05) + _k3(0.1))) / 2
         + (-0.5 * 3.85 + 0.1 * (_k3(-0.2) + _k3(-0.4) + _k3(0.3) + _k3(-0.15))) / 4) / 3, None,
        {"clip_ratio/region_mean": 2 / 9}),
    Bug("trl#5854", "the end of a row leaks into the next",
        [Row(1, [1.1, 0.9, 1.3]), Row(-1, 2, logp=[-9, -0.15], old=[-1.876856448686, -0.15 - log(1.05)]), Row(0.5, [0.7, 1, 1.6, 0.95])],
        {"loss_type": "dapo", "num_items_in_batch": 9},
        (-1.1 - 0.9 - 1.2 + 0.8 + 1.05 - 0.35 - 0.5 - 0.6 - 0.475) / 9,
        np.array([-1.1, -0.9, 0, 0, 1.05, -0.35, -0.5, 0, -0.475]) / 9, cuts=[[[0], [1], [2]], [[2, 0], [1]]]),
    Bug("Liger-Kernel", "one advantage a token is refused or spread wrongly",
        [Row([1, 1, 1], [1.1, 0.9, 1.3]), Row([-1, -1], [0.85, 1.05])], {"loss_type": "grpo"},
        (-3.2 / 3 + 1.9 / 2) / 2, [-1.1 / 6, -0.9 / 6, 0, 0.85 / 4, 1.05 / 4]),
    Bug("trl#6095", "one advantage a row runs along the tokens where the shapes allow it",
        [Row(1, [1.1, 0.9]), Row(-1, [1.3, 0.8])], {"loss_type": "grpo", "epsilon": 0.5},
        (-2 / 2 + 2.1 / 2) / 2, [-1.1 / 4, -0.9 / 4, 1.3 / 4, 0.8 / 4]),
    Bug("prime-rl#1525", "rows of one token are shifted",
        [Row(1, [1.5]), Row(-1, [0.5]), Row(-2, [1])], {"loss_type": "grpo"}, (-1.2 + 0.8 + 2) / 3, [0, 0, 2 / 3]),
    Bug("tinker-cookbook#507", "nothing but zero advantages",
        [Row(0, [1.1, 2]), Row(0, [0.5])], {"loss_type": "dapo"}, 0.0, [0, 0, 0]),
]  # fmt: skip

LOSSES = {
    "denominator": DENOMINATORS,
    "mask": MASKS,
    "overflow": OVERFLOW,
    "ratio": RATIOS,
    "kl": KL_IN_LOSS,
    "packing": PACKING,
}


def call(rows: list[Row], options: dict[str, Any], **more: Any) -> Any:
    """grpo_loss on rows, in float64; beta is 0 unless the options say so."""
    lengths = [row.tokens for row in rows]

    def flat(values: Any) -> np.ndarray:
        return np.concatenate([np.zeros(0), *[np.asarray(v, np.float64) for v in values]])

    logp = flat(row.logp if row.logp is not None else np.resize(LOGP, row.tokens) if row.tokens else [] for row in rows)
    free = all(isinstance(row.r, int) and row.old is None for row in rows)
    old = None
    if not free:
        ratios = flat(np.ones(row.tokens) if isinstance(row.r, int) else row.r for row in rows)
        given = flat(row.old if row.old is not None else [nan] * row.tokens for row in rows)
        replaced = flat([row.old is not None] * row.tokens for row in rows) > 0
        old = np.where(replaced, given, logp - np.log(ratios))
    keywords: dict[str, Any] = {"beta": 0.0, "loss_type": "grpo", **options}
    ref = None
    if any(row.ref is not None for row in rows):
        with np.errstate(invalid="ignore"):
            ref = logp + flat(row.ref for row in rows)
        keywords = {"kl_estimator": "k3", "kl_ratio_factor": "none", **keywords}
    if any(row.keep is not None for row in rows):
        keywords["mask"] = flat(row.keep if row.keep is not None else [1] * row.tokens for row in rows).astype(bool)
    if any(row.weight is not None for row in rows):
        keywords["token_weight"] = flat(row.weight for row in rows)
    per_token = any(np.ndim(row.adv) for row in rows)
    advantages = flat(np.broadcast_to(row.adv, row.tokens) for row in rows) if per_token else [row.adv for row in rows]
    if per_token:
        keywords["advantage_level"] = "token"
    clips = tables.METHODS[keywords["loss_type"]].surrogate == "clip"
    if (
        old is not None and clips and "importance_sampling_level" not in keywords
    ):  # where a ratio meets a bound, what exp returns in its last bit decides
        epsilon = keywords.get("epsilon", 0.2)
        with np.errstate(over="ignore", invalid="ignore"):
            off = [
                np.abs(np.exp(logp - old) - bound) for bound in (1 - epsilon, 1 + keywords.get("epsilon_high", epsilon))
            ]
        assert not any((distance < 1e-9).any() for distance in off), "a ratio lies on a bound"
    return gf.grpo_loss(
        logp, old, ref, np.asarray(advantages, np.float64), np.cumsum([0, *lengths]), **keywords, **more
    )


def needs(bug: Bug) -> None:
    if bug.options.get("loss_type", "grpo") not in tables.METHODS:
        pytest.skip(f"loss_type {bug.options['loss_type']!r} is not in the tables")


@pytest.mark.parametrize(
    "bug",
    [bug for bugs in LOSSES.values() for bug in bugs],
    ids=[f"{kind}-{bug.tag}-{bug.what}" for kind, bugs in LOSSES.items() for bug in bugs],
)
def test_losses(bug: Bug, backend: str) -> None:
    needs(bug)
    result = call(bug.rows, bug.options, backend=backend)
    assert result.loss == pytest.approx(bug.loss, rel=1e-12, abs=1e-15), bug.what
    assert np.isfinite(result.grad).all(), bug.what
    assert not any(np.isnan(value) for value in result.metrics.values()), bug.what
    if bug.grad is not None:
        np.testing.assert_allclose(result.grad, bug.grad, rtol=1e-12, atol=1e-15, err_msg=bug.what)
    for name, value in bug.metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-12, abs=1e-15), (bug.what, name)
    for cut in bug.cuts:
        loss, grad = 0.0, np.full(len(result.grad), nan)
        offsets = np.cumsum([0, *[row.tokens for row in bug.rows]])
        for part in cut:
            piece = call([bug.rows[i] for i in part], bug.options, backend=backend)
            loss += piece.loss
            grad[np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in part])] = piece.grad
        assert loss == pytest.approx(bug.loss, rel=1e-12), (bug.what, cut)
        np.testing.assert_array_equal(grad, result.grad, err_msg=f"{bug.what}, cut {cut}")


def test_step_level_advantages(backend: str) -> None:
    # trl#3090: one number a sample was all there was
    r = np.array([1.1, 0.9, 1.3, 0.85, 1.05, 1, 0.95])
    logp = np.resize(LOGP, 7)
    result = gf.grpo_loss(
        logp, logp - np.log(r), None, [1.0, -1.0, 0.5, 2.0], [0, 4, 7], advantage_level="step",
        step_offsets=[0, 2, 4], step_ends=[1, 3, 0, 1], backend=backend,
    )  # fmt: skip
    assert result.loss == pytest.approx(((-1.1 - 0.9 + 1.3 + 0.85) / 4 + (-0.525 - 2 + 0) / 3) / 2, rel=1e-12)
    expected = [-1.1 / 8, -0.9 / 8, 1.3 / 8, 0.85 / 8, -0.525 / 6, -2 / 6, 0]
    np.testing.assert_allclose(result.grad, expected, rtol=1e-12, atol=1e-15)


def test_slices_keep_the_buffer_of_the_whole(backend: str) -> None:
    # apache/arrow: offsets of a sliced list column start above 0
    r = np.array([1.1, 0.9, 1.3, 0.85, 1.05])
    logp = np.resize(LOGP, 5)
    plain = gf.grpo_loss(logp, logp - np.log(r), None, [1.0, -1.0], [0, 3, 5], loss_type="dapo", backend=backend)
    long, old = np.r_[nan, inf, logp, nan], np.r_[nan, -inf, logp - np.log(r), 3.0]
    sliced = gf.grpo_loss(long, old, None, [1.0, -1.0], [2, 5, 7], loss_type="dapo", backend=backend)
    assert sliced.loss == plain.loss == pytest.approx((-1.1 - 0.9 - 1.2 + 0.85 + 1.05) / 5, rel=1e-12)
    np.testing.assert_array_equal(sliced.grad, np.r_[0, 0, plain.grad, 0])


def test_padding_holds_garbage(backend: str) -> None:
    # verl#6475, pytorch/rl: what stands in the padding reaches the loss, or the mean of the KL
    garbage = [nan, inf, -1e30]
    logp = np.array([[-0.4, -1.3, -0.9, garbage[0]], [-2.1, -0.15, *garbage[:2]], [-0.7, -0.4, -1.3, -0.9]])
    r = np.array([[1.1, 0.9, 1.3, nan], [0.85, 1.05, nan, inf], [0.7, 1, 1.6, 0.95]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    ref = np.where(mask, logp - 1, garbage[1])
    with np.errstate(invalid="ignore"):
        old = logp - np.log(r)
    result = gf.padded.grpo_loss(
        logp, old, ref, [1.0, -1.0, 0.5], mask=mask, beta=0.1, kl_estimator="k1", backend=backend
    )
    assert result.metrics["kl"] == pytest.approx(1.0, rel=1e-12)
    assert result.loss == pytest.approx((-3.2 / 3 + 1.9 / 2 - 0.5 * 3.85 / 4) / 3 + 0.1, rel=1e-12)
    slopes = np.array([[-1.1, -0.9, 0, 0], [0.85, 1.05, 0, 0], [-0.35, -0.5, 0, -0.475]])
    np.testing.assert_allclose(result.grad, (slopes + 0.1 * mask) / (3 * mask.sum(1)[:, None]), rtol=1e-12, atol=1e-15)


REFUSED = [
    ("xtuner#2095", "offsets fall", {"token_offsets": [0, 3, 2]}, "token_offsets"),
    ("xtuner#2095", "one advantage too many", {"advantages": [1.0] * 5, "advantage_level": "token"}, "advantages"),
    ("xtuner#2095", "advantages of tokens where those of rows are meant", {"advantages": [1.0] * 4}, "advantages"),
    ("Megatron-Bridge#5400", "an offset outside the buffer", {"token_offsets": [0, 2, 5]}, "token_offsets"),
    ("trl 1.16.0", "a penalty without a reference", {"beta": 0.1}, "beta"),
    ("radixark/miles#1328", "a constant length nobody gave", {"loss_type": "dr_grpo"}, "max_completion_length"),
    ("trl#4852", "a denominator the method has no use for", {"num_items_in_batch": 8}, "num_items_in_batch"),
    ("", "NaN on a token that counts", {"logp": [-1.0, nan, -1.0, -1.0]}, "logp"),
    ("", "an infinite old log-prob on a token that counts", {"old_logp": [-1.0, -1.0, -1.0, -inf]}, "old_logp"),
    ("", "a method nobody knows", {"loss_type": "grpoo"}, "loss_type"),
]


@pytest.mark.parametrize(("tag", "what", "change", "name"), REFUSED, ids=[row[1] for row in REFUSED])
def test_refused(tag: str, what: str, change: dict[str, Any], name: str, backend: str) -> None:
    arguments: dict[str, Any] = {
        "logp": [-1.0] * 4, "old_logp": [-1.0] * 4, "ref_logp": None, "advantages": [1.0, -1.0], "token_offsets": [0, 2, 4],
    }  # fmt: skip
    arguments.update(change)
    for array in ("logp", "old_logp"):
        arguments[array] = np.array(arguments[array])
    with pytest.raises(ValueError, match=rf"^{name}:"):
        gf.grpo_loss(**arguments, backend=backend)


# --- dtypes ----------------------------------------------------------------------------------------


def test_mixed_precision_keeps_the_whole_gradient(backend: str) -> None:
    # products compared in two precisions: half the gradient is lost while the loss agrees to 1e-8
    for dtype in (np.float32, np.float64):
        n = 37
        logp = np.full(n, -1.0, dtype)
        old = (logp - np.log(0.95)).astype(dtype)
        result = gf.grpo_loss(logp, old, None, [-0.3], [0, n], loss_type="dapo", backend=backend)
        np.testing.assert_allclose(n * result.grad.astype(np.float64), 0.285, rtol=4e-7)


def test_float32_ratio_of_exp_120(backend: str) -> None:
    # trl#3015: inf in float32, and the unused branch poisons the gradient
    logp = np.array([-0.5, -0.5, -0.5], np.float32)
    old = np.array([-120.5, -0.5, -130.5], np.float32)
    result = gf.grpo_loss(logp, old, None, [1.0, -1.0], [0, 2, 3], loss_type="dapo", delta=3.0, backend=backend)
    assert result.loss == pytest.approx((-1.2 - 1 + 3) / 3, rel=1e-6)
    np.testing.assert_allclose(result.grad, [0, -1 / 3, 0], rtol=1e-6)


def test_float32_k3_of_near_policies(backend: str) -> None:
    # verl#1779: exp(d) - d - 1 leaves nothing of d^2/2 in float32
    for d in (1e-3, -1e-3, 3e-4, 0.1, -0.7):
        logp, ref = np.float32(-1.0), np.float32(-1.0 + d)
        exact = float(ref) - float(logp)
        result = gf.grpo_loss(np.array([logp]), None, np.array([ref]), [0.0], [0, 1], beta=1.0, backend=backend)
        value = exact**2 / 2 + exact**3 / 6 + exact**4 / 24 if abs(d) < 0.01 else exp(exact) - exact - 1
        slope = -(exact + exact**2 / 2 + exact**3 / 6) if abs(d) < 0.01 else 1 - exp(exact)
        assert result.loss == pytest.approx(value, rel=1e-6), d
        assert float(result.grad[0]) == pytest.approx(slope, rel=1e-6), d


def test_16_bit_inputs_compute_wider(backend: str) -> None:
    # verl#6280, prime-rl#568: the difference of two bfloat16 numbers was exponentiated in bfloat16
    logp, old = [-0.5, -1.0, -2.0, -0.25], [-0.625, -0.9375, -2.0, -0.5]  # exact in 16 bits of either kind
    x = np.array(logp) - np.array(old)
    r = np.exp(x)
    loss = (-min(r[0], 1.2) - r[1] + r[2] + r[3]) / 4
    dtypes: list[Any] = [np.float16]
    if find_spec("ml_dtypes") is not None:
        dtypes.append(pytest.importorskip("ml_dtypes").bfloat16)
    for dtype in dtypes:
        result = gf.grpo_loss(
            np.array(logp, dtype), np.array(old, dtype), None, [1.0, -1.0], [0, 2, 4], loss_type="dapo", backend=backend
        )
        assert result.loss == pytest.approx(loss, rel=1e-6), dtype
        np.testing.assert_allclose(result.grad.astype(np.float64), np.array([-r[0], -r[1], r[2], r[3]]) / 4, rtol=4e-3)


def test_integer_and_mask_types_agree(backend: str) -> None:
    # slime#2114: a mask of another type becomes an index; NeMo-RL: cu_seqlens are int32
    batch = random_batch(3, [3, 0, 5])
    args = (batch.logp, batch.old_logp, batch.ref_logp, batch.advantages)
    expected = gf.grpo_loss(*args, batch.token_offsets, mask=batch.mask, backend=backend)
    for kind in (np.int32, np.uint32, np.int64):
        for mask in (batch.mask, batch.mask.astype(np.uint8), batch.mask.astype(np.int64)):
            result = gf.grpo_loss(*args, batch.token_offsets.astype(kind), mask=mask, backend=backend)
            assert result.loss == expected.loss
            np.testing.assert_array_equal(result.grad, expected.grad)


# --- KL --------------------------------------------------------------------------------------------

KL = [
    ("verl kl_penalty", "k1", [-0.3, 0.5, -1.2, 2.0], lambda x: x, lambda x: 1.0, {}),
    ("verl kl_penalty", "k2", [-0.3, 0.5, -1.2, 2.0], lambda x: x * x / 2, lambda x: x, {}),
    ("verl kl_penalty", "abs", [-0.3, 0.5, -1.2, 2.0], abs, lambda x: 1.0 if x > 0 else -1.0, {}),
    ("verl kl_penalty", "k3", [-0.3, 0.5, -1.2, 2.0], lambda x: _k3(-x), lambda x: 1 - exp(-x), {}),
    ("verl#6058", "k3+", [0.3, -0.7], lambda x: _k3(-x), lambda x: x, {}),
    ("verl#6058", "k1+", [0.3, -0.7], lambda x: x, lambda x: x, {}),
    ("verl#6058", "abs+", [0.3, -0.7], abs, lambda x: x, {}),
    ("verl#2928", "k3", [0.0, 0.001, -0.001, 5.0, -3.0], lambda x: _k3(-x), lambda x: 1 - exp(-x), {}),
    ("NeMo-RL#876", "k3", [900.0], lambda x: x - 1, lambda x: 1.0, {}),
    ("verl#1779", "k3", [-100.0, 100.0], lambda x: 10.0, lambda x: 0.0, {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0}),
    (
        "verl#1779",
        "k3",
        [-2.5, 9.0],
        lambda x: _k3(-x),
        lambda x: 1 - exp(-x),
        {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0},
    ),
    ("verl#1779", "k3", [-3.0], lambda x: 10.0, lambda x: 0.0, {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0}),
    ("verl#1779", "k3+", [-3.0, 30.0], lambda x: 10.0, lambda x: x, {"kl_clamp_in": 20.0, "kl_clamp_out": 10.0}),
]


@pytest.mark.parametrize(
    ("tag", "estimator", "x", "value", "slope", "options"), KL, ids=[f"{r[0]}-{r[1]}-{i}" for i, r in enumerate(KL)]
)
def test_kl(tag: str, estimator: str, x: list[float], value: Any, slope: Any, options: dict[str, float]) -> None:
    logp = np.full(len(x), -1.0)
    ref = logp - np.array(x)
    exact = logp - ref  # what is left of x after rounding
    got_value, got_slope = gf.kl(logp, ref, kl_estimator=estimator, **options)
    np.testing.assert_allclose(got_value, [value(v) for v in exact], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(got_slope, [slope(v) for v in exact], rtol=1e-9, atol=1e-15)
    if estimator == "k3":
        assert (got_value >= 0).all()


def test_k3_of_tiny_differences() -> None:
    # verl#1779: noise, or nothing, is left of d^2/2
    d = np.array([-1e-4, 1e-4, -1e-6, 1e-5, 1e-9, -1e-8, 0.0])
    logp = np.zeros(len(d))
    value, slope = gf.kl(logp, d, kl_estimator="k3")
    np.testing.assert_allclose(value, d**2 / 2 + d**3 / 6 + d**4 / 24, rtol=1e-12, atol=0)
    np.testing.assert_allclose(slope, -(d + d**2 / 2 + d**3 / 6 + d**4 / 24), rtol=1e-12, atol=0)


# --- group statistics ------------------------------------------------------------------------------

A, B = sqrt(2) / 2, sqrt(3)
GROUPS: list[tuple[str, str, Any, dict[str, Any], Any]] = [
    ("arXiv:2402.03300 4.1.2", "the definition", [2, 4, 6], {"group_offsets": [0, 3]}, [-B / sqrt(2), 0, B / sqrt(2)]),
    ("trl, verl, AsyncGRPO", "one winner of four has three advantages", [1, 0, 0, 0], {"group_offsets": [0, 4]},
     [B, -1 / B, -1 / B, -1 / B]),
    ("trl 1.16.0", "ddof 1, eps 1e-4", [1, 0, 0, 0], {"group_offsets": [0, 4], "ddof": 1, "eps": 1e-4},
     [0.75 / (0.5 + 1e-4), *[-0.25 / (0.5 + 1e-4)] * 3]),
    ("verl 0.9.1", "ddof 1, eps 1e-6", [1, 0, 0, 0], {"group_offsets": [0, 4], "ddof": 1, "eps": 1e-6},
     [0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3]),
    ("UniRL#335", "a missing reward leaves the group", [1, nan, 0], {"group_offsets": [0, 3], "scale": "none", "nan_policy": "exclude"},
     [0.5, 0, -0.5]),
    ("trl#5902", "and its statistics", [1, 0, nan, 0], {"group_offsets": [0, 4], "ddof": 1, "eps": 1e-4, "nan_policy": "exclude"},
     [2 / 3 / (1 / B + 1e-4), -1 / 3 / (1 / B + 1e-4), 0, -1 / 3 / (1 / B + 1e-4)]),
    ("trl#5775", "one scored row is left", [1, nan, nan, nan], {"group_offsets": [0, 4], "ddof": 1, "nan_policy": "exclude"}, [0] * 4),
    ("NeMo-RL#3467", "an excluded row stays in the baseline", [1, nan, 0, 0],
     {"group_offsets": [0, 4], "ddof": 1, "nan_policy": "exclude"}, [2 / B, 0, -1 / B, -1 / B]),
    ("verl#6375", "a rejected sibling takes part", [1, nan],
     {"group_offsets": [0, 2], "baseline": "leave_one_out", "scale": "none", "nan_policy": "exclude"}, [0, 0]),
    ("trl#3992", "each group its own scale", [[0, 1], [0, 10]], {"ddof": 1}, [[-A, A], [-A, A]]),
    ("trl#3992", "one scale for the batch", [[0, 1], [0, 10]], {"scale": "batch", "ddof": 1},
     np.array([[-0.5, 0.5], [-5, 5]]) / np.std([0, 1, 0, 10], ddof=1)),
    ("trl#4662", "a group of one is NaN", [[0.7]], {"ddof": 1}, [[0]]),
    ("verl 0.9.1", "a group of one keeps its reward", [0.7, 1, 0],
     {"group_ids": ["solo", "pair", "pair"], "singleton": "raw", "ddof": 1, "eps": 1e-6},
     [0.7 / (1 + 1e-6), 0.5 / (A + 1e-6), -0.5 / (A + 1e-6)]),
    ("verl#7581", "leave-one-out of one, raw", [0.7, 0.2, 0.6],
     {"group_ids": [4, 9, 9], "baseline": "leave_one_out", "scale": "none", "singleton": "raw"}, [0.7, -0.4, 0.4]),
    ("verl#7793", "leave-one-out of one, zero", [0.7, 0.2, 0.6],
     {"group_ids": [4, 9, 9], "baseline": "leave_one_out", "scale": "none"}, [0, -0.4, 0.4]),
    ("verl#6348", "a floor flattens close rewards", [1.0, 1.00001, 2.0, 2.00001], {"group_ids": [0, 0, 1, 1], "ddof": 1, "eps": 1e-6},
     [-0.6194967154969799, 0.6194967154969799] * 2),
    ("verl#6348", "nearly equal is not equal", [0.5, 0.500000001, 0.5, 0.5], {"group_offsets": [0, 2, 4], "ddof": 1}, [-A, A, 0, 0]),
    ("verl#7150", "negative ids are positions", [1, 0, 5, 7], {"group_ids": [-1, -1, 3, 3], "ddof": 1}, [A, -A, -A, A]),
    ("verl#7150", "huge ids are sizes", [1, 0, 5, 7], {"group_ids": [10**15, 10**15, 5, 5], "ddof": 1}, [A, -A, -A, A]),
    ("verl#7150", "ids in any order", [1, 2, 3, 4, 6, 8], {"group_ids": [2, 2, 5, 7, 5, 2], "scale": "none"},
     [-8 / 3, -5 / 3, -1.5, 0, 1.5, 13 / 3]),
    ("verl#7150", "'07' is not '7'", [1, 3, 10, 20], {"group_ids": ["07", "07", "7", "7"], "scale": "none"}, [-1, 1, -5, 5]),
    ("trl#2961", "rows of a prompt that are not neighbours", [1, 10, 0, 30, 0, 20], {"group_ids": list("ababab"), "ddof": 1},
     [2 / B, -1, -1 / B, 1, -1 / B, 0]),
    ("trl#2990", "two halves of a group", [1, 0, 0, 0, 3, 3, 0, 0], {"group_ids": list("ppqqqqpp"), "ddof": 1},
     [1.5, -0.5, -B / 2, -B / 2, B / 2, B / 2, -0.5, -0.5]),
    ("slime#1414", "uneven groups fall into one", [1, 3, 5], {"group_offsets": [0, 2, 3], "ddof": 1}, [-A, A, 0]),
    ("slime#2204", "a constant group between uneven ones", [0, 1, 2, 3, 5, 5, 5, 1, 1, 0, 0], {"group_offsets": [0, 4, 7, 11], "ddof": 1},
     [*(np.array([-1.5, -0.5, 0.5, 1.5]) / sqrt(5 / 3)), 0, 0, 0, B / 2, B / 2, -B / 2, -B / 2]),
    ("AReaL#1419", "a last group of one explodes", [1, 2, 3], {"group_offsets": [0, 2, 3], "ddof": 1, "eps": 1e-5},
     [-0.5 / (A + 1e-5), 0.5 / (A + 1e-5), 0]),
    ("NeMo-RL#4161", "a common offset eats every digit", [100000001, 100000002, 100000003], {"group_offsets": [0, 3], "ddof": 1}, [-1, 0, 1]),
    ("NeMo-RL#4161", "a larger one, where a lost deviation shows", [10**12 + 2, 10**12 + 4, 10**12 + 6], {"group_offsets": [0, 3], "ddof": 1}, [-1, 0, 1]),
    ("trl#5026", "negative rewards turn round", [-1, -3], {"group_offsets": [0, 2], "ddof": 1}, [A, -A]),
    ("trl#5353", "weights of rewards are ignored", [[1, 0], [0, 1], [1, 1], [0, 0]],
     {"group_offsets": [0, 4], "reward_weights": [0.7, 0.3], "scale": "none"}, [0.2, -0.2, 0.5, -0.5]),
]  # fmt: skip


def _available(name: str, keywords: dict[str, Any]) -> Any:
    """A public function, or a skip that says what is missing."""
    function: Any = gf
    for part in name.split("."):
        function = getattr(function, part, None)
        if function is None:
            pytest.skip(f"grpo_fast.{name} does not exist yet")
    missing = set(keywords) - set(inspect.signature(function).parameters)
    if missing:
        pytest.skip(f"{name} has no argument {', '.join(sorted(missing))} yet")
    return function


@pytest.mark.parametrize(
    ("tag", "what", "rewards", "options", "expected"), GROUPS, ids=[f"{row[0]}-{row[1]}" for row in GROUPS]
)
def test_groups(tag: str, what: str, rewards: Any, options: dict[str, Any], expected: Any, backend: str) -> None:
    function = _available("group_advantages", options)
    result = function(np.array(rewards, np.float64), **{"eps": 0.0, **options}, backend=backend)
    rtol = 1e-6 if tag == "verl#6348" else 1e-12  # differences of 1e-9 in numbers near 1 keep seven digits
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=1e-12, err_msg=what)
    if "group_ids" in options:  # arrays of ids go another way than lists
        ids = np.array(options["group_ids"])
        np.testing.assert_array_equal(
            result,
            function(np.array(rewards, np.float64), **{"eps": 0.0, **options, "group_ids": ids}, backend=backend),
        )


EQUAL = [
    ("NeMo-RL#4158", [0.3] * 8, np.float32),
    ("OpenRLHF#1334", [0.1] * 5, np.float16),
    ("NeMo-RL#4158", [0.3] * 8, np.float64),
    ("two workers, one score", [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], np.float64),
]


@pytest.mark.parametrize(("tag", "rewards", "dtype"), EQUAL, ids=[f"{row[0]}-{row[2].__name__}" for row in EQUAL])
def test_equal_rewards_give_exactly_zero(tag: str, rewards: list[float], dtype: Any, backend: str) -> None:
    function = _available("group_advantages", {})
    for options in ({}, {"ddof": 1}, {"baseline": "leave_one_out", "scale": "none"}, {"scale": "batch"}):
        result = function(
            np.array(rewards, dtype), group_offsets=[0, len(rewards)], eps=1e-8, backend=backend, **options
        )
        assert (result == 0).all(), options


NARROW = [
    ("OpenRLHF#1334", "int64", [1, 0, 0, 1], {}, [1, -1, -1, 1]),
    ("OpenRLHF#1334", "bool", [True, False, False, False], {}, [B, -1 / B, -1 / B, -1 / B]),
    ("OpenRLHF#1334", "int8", [127, -128, 127, -128], {}, [1, -1, 1, -1]),
    ("OpenRLHF#1334", "uint8", [0, 255], {"scale": "none"}, [-127.5, 127.5]),
    ("OpenRLHF#1334", "float16", [60000, 60000, 50000, 50000], {}, [1, 1, -1, -1]),
    ("OpenRLHF#1334", "float16", [65504, -65504], {"scale": "none", "baseline": "leave_one_out"}, [65504, -65504]),
    ("OpenRLHF#1334", "bfloat16", [1, 1, 1, 1.0078125], {}, [-1 / B, -1 / B, -1 / B, B]),
    ("OpenRLHF#1334", "bfloat16", [1, 1, 1, 1.0078125], {"scale": "none"}, [-1 / 512, -1 / 512, -1 / 512, 3 / 512]),
]


@pytest.mark.parametrize(
    ("tag", "dtype", "rewards", "options", "expected"), NARROW, ids=[f"{r[1]}-{i}" for i, r in enumerate(NARROW)]
)
def test_narrow_rewards(
    tag: str, dtype: str, rewards: Any, options: dict[str, Any], expected: Any, backend: str
) -> None:
    function = _available("group_advantages", options)
    kind: Any = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    result = function(np.array(rewards, kind), group_offsets=[0, len(rewards)], eps=0.0, backend=backend, **options)
    assert result.dtype == (kind if "float" in dtype else np.float64)
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-12)
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=tolerance)


@pytest.mark.parametrize(
    ("tag", "rewards", "options"),
    [("trl#4662", [0.7, 1, 0], {"group_ids": ["solo", "pair", "pair"], "singleton": "error"}),
     ("trl#5902", [1, nan, 0], {"group_offsets": [0, 3]})],
)  # fmt: skip
def test_groups_refused(tag: str, rewards: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        _available("group_advantages", options)(np.array(rewards, np.float64), **options)


@pytest.mark.parametrize(
    ("rewards", "eps", "expected"),
    [([[1, 0, 1, 0]], 1e-8, [[1, -1, 1, -1]]), ([[0.5] * 3, [1, 0, 0.5]], 0.0, [[0] * 3, [B / sqrt(2), -B / sqrt(2), 0]]),
     ([[1, 0]], 0.5, [[0.5, -0.5]]), ([[3, 1]], 1e-8, [[1, -1]])],
)  # fmt: skip
def test_textbook(rewards: Any, eps: float, expected: Any) -> None:
    function = _available("compute_grpo_advantages", {"eps": eps})
    np.testing.assert_allclose(function(np.array(rewards), eps=eps), expected, rtol=3e-8, atol=1e-15)


# --- process rewards -------------------------------------------------------------------------------

#: step rewards, step ends and lengths of three completions, written as the paper's section 4.1.3 lets one work by hand
WORKED = ([[1, 0], [1], [0, 0, 1]], [[1, 3], [2], [0, 1, 2]], [4, 3, 5])
PROCESS: list[tuple[str, str, tuple[Any, Any, Any], dict[str, Any], Any]] = [
    ("arXiv:2402.03300 4.1.3", "the definition", WORKED, {}, [0, 0, -1, -1, 1, 1, 1, -1, 0, 1, 0, 0]),
    ("arXiv:2402.03300 4.1.3", "n - 1", WORKED, {"ddof": 1}, np.array([0, 0, -1, -1, 1, 1, 1, -1, 0, 1, 0, 0]) * sqrt(5 / 6)),
    ("arXiv:2402.03300 4.1.3", "after the last step", WORKED, {"tail": "last"}, [0, 0, -1, -1, 1, 1, 1, -1, 0, 1, 1, 1]),
    ("trl#3090", "the own step only", WORKED, {"credit": "step"}, [1, 1, -1, -1, 1, 1, 1, -1, -1, 1, 0, 0]),
    ("arXiv:2402.03300 4.1.3", "the outcome on top", WORKED, {"outcome_rewards": [1, 0, 1], "outcome_weight": 0.5},
     np.array([0, 0, -1, -1, 1, 1, 1, -1, 0, 1, 0, 0]) + np.repeat([0.5 * A, -A, 0.5 * A], [4, 3, 5])),
    ("arXiv:2402.03300 4.1.3", "a completion without steps", ([[1, 0], [], [0, 1]], [[0, 1], [], [1, 2]], [2, 3, 3]), {},
     [0, -1, 0, 0, 0, 0, 0, 1]),
    ("arXiv:2402.03300 4.1.3", "no step at all", ([[], []], [[], []], [2, 1]), {"ddof": 1, "eps": 1e-6}, [0, 0, 0]),
    ("arXiv:2402.03300 4.1.3", "one step has no spread", ([[0.7], []], [[1], []], [3, 2]), {"ddof": 1, "eps": 1e-6}, [0] * 5),
    ("pytorch/rl", "steps are pooled, not completions", ([[1, 1, 1, 1], [0]], [[0, 1, 2, 3], [0]], [4, 1]), {}, [2, 1.5, 1, 0.5, -2]),
    ("RLinf", "two prompts", ([[1], [0], [4, 2]], [[0], [1], [0, 1]], [1, 2, 2]), {"group_ids": ["a", "a", "b"]}, [1, -1, -1, 0, -1]),
    ("PRIME", "two prompts, interleaved", ([[1], [4, 2], [0]], [[0], [0, 1], [1]], [1, 2, 2]), {"group_ids": ["a", "b", "a"]},
     [1, 0, -1, -1, -1]),
    ("arXiv:2402.03300 4.1.3", "running totals", ([[1, 2], [0, 1]], [[0, 1], [0, 1]], [2, 2]), {"step_form": "cumulative_sum"},
     np.array([1.5, 1.75, -1.5, -0.25]) / np.std([1, 3, 0, 1])),
    ("arXiv:2410.01679", "values of prefixes", ([[0.5, 0.75, 1], [0.5, 0.25]], [[1, 2, 3], [0, 2]], [4, 3]),
     {"step_form": "prefix_value", "normalize": "none"}, [1, 1, 0.5, 0.25, 0.25, -0.25, -0.25]),
    ("verifiers#1554", "a discount per step", ([[1, 2, 4], [8]], [[0, 1, 2], [0]], [3, 1]), {"normalize": "none", "gamma": 0.5}, [3, 4, 4, 8]),
    ("", "each completion by itself", ([[1, 3], [5], [2, 2]], [[0, 1], [0], [0, 1]], [2, 1, 2]), {"normalize": "completion"},
     [0, 1, 0, 0, 0]),
    ("PipelineRL#135", "each step index by itself", ([[1, 5], [3, 7], [5]], [[0, 1], [0, 1], [0]], [2, 2, 1]), {"normalize": "step_index"},
     [-1 - B / sqrt(2), -1, 1, 1, B / sqrt(2)]),
    ("", "over the batch", ([[1], [0, 0], [1]], [[0], [0, 1], [0]], [1, 2, 1]), {"group_ids": [1, 1, 2], "normalize": "batch"},
     [1, -2, -1, 1]),
    ("PURE", "not normalised", ([[1.5, 1, 2, 2]], [[0, 1, 2, 3]], [4]), {"normalize": "none"}, [6.5, 5, 4, 2]),
    ("trl#7024", "the sum runs past the end of the row", ([[1.5, 1], [2, 2]], [[0, 1], [0, 1]], [2, 2]), {"normalize": "none"}, [2.5, 1, 4, 2]),
    ("PURE", "the smallest step takes the credit", ([[0.9, 0.1, 0.8]], [[0, 2, 3]], [4]),
     {"normalize": "none", "credit": "min", "temperature": 0.1},
     [0.10090555793541539, 0.10060401769489186, 0.10060401769489186, 0.0007285967612127042]),
    ("SkyRL#1492", "every step keeps its own mask", ([[1, 0, 2], [3]], [[0, 2, 3], [1]], [4, 2]), {"credit": "step"},
     np.array([-0.5, -1.5, -1.5, 0.5, 1.5, 1.5]) / sqrt(1.25)),
]  # fmt: skip


def _steps(steps: tuple[Any, Any, Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rewards, ends, lengths = steps
    flat = [
        np.array([v for row in part for v in row], kind) for part, kind in ((rewards, np.float64), (ends, np.int64))
    ]
    keywords = {"eps": 0.0, **options}
    if "group_ids" not in keywords:
        keywords["group_offsets"] = [0, len(lengths)]
    return (*flat, np.cumsum([0, *map(len, ends)]), np.cumsum([0, *lengths])), keywords


@pytest.mark.parametrize(
    ("tag", "what", "steps", "options", "expected"), PROCESS, ids=[f"{row[0]}-{row[1]}" for row in PROCESS]
)
def test_process(tag: str, what: str, steps: Any, options: dict[str, Any], expected: Any, backend: str) -> None:
    args, keywords = _steps(steps, options)
    result = _available("process_advantages", keywords)(*args, **keywords, backend=backend)
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12, err_msg=what)


def test_equal_steps_give_exactly_zero(backend: str) -> None:
    args, keywords = _steps(([[0.1] * 3, [0.1] * 2, [0.1]], [[0, 1, 2], [0, 2], [1]], [3, 3, 2]), {"eps": 1e-8})
    result = _available("process_advantages", keywords)(*args, **keywords, backend=backend)
    assert (result == 0).all()


@pytest.mark.parametrize(("what", "ends"), [("outside", [[2], [0]]), ("not increasing", [[1, 1], [0]])])
def test_step_ends_refused(what: str, ends: Any) -> None:
    args, keywords = _steps(([[1.0] * len(row) for row in ends], ends, [2, 1]), {})
    with pytest.raises(ValueError, match="step_ends"):
        _available("process_advantages", keywords)(*args, **keywords)


def test_a_missing_component_adds_nothing_and_a_row_of_none_is_out(backend: str) -> None:
    """trl#5902: sums 1, 1, none, 0 over the three rows that have something."""
    rewards = [[1.0, nan], [0.0, 1.0], [nan, nan], [0.0, 0.0]]
    result = gf.group_advantages(rewards, group_offsets=[0, 4], ddof=1, eps=1e-4, nan_policy="exclude", backend=backend)
    deviation = sqrt(1 / 3) + 1e-4
    np.testing.assert_allclose(result, [1 / 3 / deviation, 1 / 3 / deviation, 0, -2 / 3 / deviation], rtol=1e-12)


def test_a_common_offset_of_steps_changes_nothing(backend: str) -> None:
    """nemo-rl#4161, of steps: 0.1, 0.2, 0.3 above ten million."""
    result = gf.process_advantages(
        [1e7 + 0.1, 1e7 + 0.2, 1e7 + 0.3], [0, 1, 0], [0, 2, 3], [0, 2, 3], group_offsets=[0, 2], eps=0.0,
        backend=backend,
    )  # fmt: skip
    np.testing.assert_allclose(result, [-sqrt(1.5), 0.0, sqrt(1.5)], atol=1e-6)


def test_a_clamped_log_ratio_stops_the_gradient_of_a_sequence(backend: str) -> None:
    """openrlhf#1293: log-ratios of 100 held at 10 give e^10; no gradient passes the last clamp, as in verl's gspo.

    One inside the mean is detached with it, as in tunix's gspo-token: every token has its own gradient.
    """
    level: dict[str, Any] = {"importance_sampling_level": "sequence_token", "backend": backend}
    for option, grad in (("log_ratio_cap", 0.0), ("log_ratio_clamp", exp(10) / 2)):
        result = gf.grpo_loss([-0.5, -0.5], [-100.5, -100.5], None, [-1.0], [0, 2], **{option: 10.0}, **level)
        assert result.loss == pytest.approx(exp(10), rel=1e-12)
        assert result.grad == pytest.approx([grad, grad], rel=1e-12)


def test_a_negative_completion_weight_turns_the_loss_and_not_the_clip(backend: str) -> None:
    """Ours: the sign of the weight chose the side that is clipped, in float32 with one advantage per completion."""
    logp = np.array([-1.0, -2.0, -0.5, -1.5], np.float32)
    old = (logp - np.log([1.5, 0.5, 1.5, 0.5])).astype(np.float32)
    plain = gf.grpo_loss(logp, old, None, [1.0, -1.0], [0, 2, 4], backend=backend)
    turned = gf.grpo_loss(
        logp, old, None, [1.0, -1.0], [0, 2, 4], token_weight=[-1.0, -1.0], weight_level="completion", backend=backend
    )
    assert turned.loss == pytest.approx(-plain.loss, rel=1e-6)
    np.testing.assert_allclose(turned.grad, -plain.grad, rtol=1e-6)


def test_steps_of_a_completion_without_counted_tokens_may_be_nan(backend: str) -> None:
    """Ours: the completion's own advantage could be, a step's could not."""
    logp, mask, layout = (
        np.array([-1.0, -2.0, -3.0, -4.0]),
        [1, 1, 0, 0],
        {"step_offsets": [0, 2, 3], "step_ends": [0, 1, 1]},
    )
    want = gf.grpo_loss(
        logp, None, None, [1.0, -2.0, 0.0], [0, 2, 4], mask=mask, advantage_level="step", backend=backend, **layout
    )
    got = gf.grpo_loss(
        logp, None, None, [1.0, -2.0, nan], [0, 2, 4], mask=mask, advantage_level="step", backend=backend, **layout
    )
    assert got.loss == want.loss
    np.testing.assert_array_equal(got.grad, want.grad)
    for wrong in (nan, inf):
        with pytest.raises(ValueError, match=r"advantages: advantages\[1\]=(nan|inf) is not finite"):
            gf.grpo_loss(
                logp,
                None,
                None,
                [1.0, wrong, nan],
                [0, 2, 4],
                mask=mask,
                advantage_level="step",
                backend=backend,
                **layout,
            )


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_compute_grad_is_true_or_false(wrong: Any, backend: str) -> None:
    with pytest.raises(TypeError, match=f"^compute_grad: expected True or False, got {wrong!r}; "):
        gf.grpo_loss([-1.0], None, None, [1.0], [0, 1], compute_grad=wrong, backend=backend)
