"""A policy small enough to train in a minute with NumPy alone, and a task whose every step can be checked.

**Task.** The prompt is a sum of digits, ``3+5+9+2 mod 10``. A completion takes the numbers from left to right: each
``+`` takes one more, a digit states the sum so far, ``=`` and a digit give the answer, ``.`` ends it. A *step* ends at
each stated sum, and the answer with its ``.`` is the last one:

    +3+8+7+9=9.     five steps
    ++8++9=9.       three
    ++++=9.         one: everything in the head
    =9.             one: a guess

How many steps to take is the policy's choice. A step is right when it takes at least one number and states the true sum
of all numbers taken; the answer, and with it the outcome, when it is ``=``, the true sum and ``.``. A completion of
``max_tokens`` tokens without ``.`` is cut off: truncated, no answer, and worth nothing.

**Policy.** One hidden layer over one-hot slots: the last two tokens, the sum last stated, the numbers taken since
(three at most: what it can hold in the head), and the next one of the prompt. :func:`pretrain` shows it worked
solutions of sloppy calculators, so that it knows the format, likes every number of steps, and is right about as often
as a guess; the rest is for reinforcement learning to find.
:meth:`Policy.backward` turns dL/dlogp of every token, which is ``grpo_loss(...).grad``, into parameter gradients:

    ref = pretrain(Policy(rng), rng)
    policy = ref.copy()
    optimizer = Adam(policy.parameters)
    batch, old_logp = policy.sample(make_prompts(32, rng), 16, rng)
    grades = grade(batch)
    ...  # advantages from grades.rewards, grades.step_rewards
    result = grpo_loss(policy.logp(batch), old_logp, ref.logp(batch), advantages, batch.token_offsets)
    optimizer.step(policy.backward(batch, result.grad))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Parameters = dict[str, Array]

#: Token id = position. The ten digits are their own ids.
TOKENS = "0123456789+=."
TAKE, ANSWER, END = 10, 11, 12
#: Stands in the policy's input where there is no token or number; never sampled.
PAD = len(TOKENS)
MAX_OPERANDS = 6
#: Six steps of two tokens, the three of the answer, and one to spare.
MAX_TOKENS = 16

_TOKENS_SEEN = 2
_NUMBERS_SEEN = 3
_SLOTS = _TOKENS_SEEN + 1 + _NUMBERS_SEEN + 1
_WIDTH = len(TOKENS) + 1


def make_prompts(count: int, rng: np.random.Generator, *, least: int = 2, most: int = MAX_OPERANDS) -> Array:
    """``count`` sums of ``least`` to ``most`` digits: (count, MAX_OPERANDS) int64, filled up with PAD."""
    digits = rng.integers(0, 10, (count, MAX_OPERANDS))
    lengths = rng.integers(least, most + 1, count)
    return np.where(np.arange(MAX_OPERANDS) < lengths[:, None], digits, PAD)


def prompt_text(prompt: Array) -> str:
    """``3+5+9+2 mod 10`` for one row of :func:`make_prompts`."""
    return "+".join(str(digit) for digit in prompt if digit != PAD) + " mod 10"


def decode(token_ids: Array) -> str:
    """The text of one completion, the final ``.`` included."""
    return "".join(TOKENS[token] for token in token_ids)


def encode(text: str) -> Array:
    """Token ids of a completion's text: (len(text),) int64."""
    return np.array([TOKENS.index(character) for character in text], dtype=np.int64)


@dataclass(frozen=True)
class Batch:
    """Completions in one flat buffer: row i is ``token_ids[token_offsets[i]:token_offsets[i + 1]]``, never empty."""

    prompts: Array  #: (n_completions, MAX_OPERANDS) int64, the prompt of every row
    group_ids: Array  #: (n_completions,) int64, which prompt that is
    token_ids: Array  #: (n_tokens,) int64
    token_offsets: Array  #: (n_completions + 1,) int64

    @classmethod
    def of(cls, prompts: Array, group_ids: Array, completions: Sequence[Array]) -> Batch:
        """Rows ``completions[i]``, answers to ``prompts[group_ids[i]]``."""
        offsets = np.cumsum([0, *map(len, completions)])
        return cls(prompts[group_ids], group_ids, np.concatenate(completions), offsets)

    def __len__(self) -> int:
        return len(self.group_ids)

    @property
    def lengths(self) -> Array:
        """(n_completions,) tokens of every row."""
        return np.diff(self.token_offsets)

    @property
    def completions(self) -> list[Array]:
        """The token ids of every row."""
        return np.split(self.token_ids, self.token_offsets[1:-1])

    @cached_property
    def rows(self) -> Array:
        """(n_tokens,) the row every token belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def count_before(self, token: int) -> Array:
        """(n_tokens,) how often ``token`` occurs in the same row before each position."""
        counts: Array = np.concatenate([[0], np.cumsum(self.token_ids == token)])
        return counts[:-1] - counts[self.token_offsets[self.rows]]

    def previous(self, back: int) -> Array:
        """(n_tokens,) the token ``back`` places earlier in the same row, PAD before its start."""
        index = np.arange(len(self.token_ids)) - back
        return np.where(index >= self.token_offsets[self.rows], self.token_ids[index], PAD)

    @cached_property
    def slots(self) -> Array:
        """(n_tokens, slots) what the policy sees when it chooses each token."""
        history = np.stack([self.previous(back) for back in range(1, _TOKENS_SEEN + 1)], axis=1)
        index = np.arange(len(self.token_ids))
        last = np.maximum.accumulate(np.where(self.token_ids < 10, index, -1))
        last = np.concatenate([[-1], last[:-1]])  # the digit before this token
        stated = last >= self.token_offsets[self.rows]
        taken = self.count_before(TAKE)
        value = np.where(stated, self.token_ids[last], 0)
        return _slots(history, value, taken - np.where(stated, taken[last], 0), taken, self.prompts[self.rows])


@dataclass(frozen=True)
class Grades:
    """What the checker finds; step arrays are flat, those of row i at ``[step_offsets[i], step_offsets[i + 1])``."""

    rewards: Array  #: (n_completions,) float32, 1 for a right answer
    truncated: Array  #: (n_completions,) bool
    step_offsets: Array  #: (n_completions + 1,) int64
    step_ends: Array  #: (n_steps,) int64, index within the completion of the step's last token
    step_rewards: Array  #: (n_steps,) float32, 1 for a right step


def grade(batch: Batch) -> Grades:
    """Check every step and every answer of a batch."""
    tokens, rows, stops = batch.token_ids, batch.rows, batch.token_offsets[1:]
    values = np.where(batch.prompts == PAD, 0, batch.prompts)
    sums = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1) % 10  # sums[:, k]: of the first k numbers
    operands = np.sum(batch.prompts != PAD, axis=1)

    taken = batch.count_before(TAKE)
    answers_before = batch.count_before(ANSWER)
    is_step = ((tokens < 10) & (answers_before == 0)) | (tokens == END)
    truth = sums[rows, np.minimum(taken, MAX_OPERANDS)]
    right = (batch.previous(1) == TAKE) & (taken <= operands[rows]) & (tokens == truth)

    long_enough = batch.lengths >= 3
    first = np.where(long_enough, stops - 3, 0)
    ended = tokens[stops - 1] == END
    answered = long_enough & (tokens[first] == ANSWER) & (answers_before[first] == 0) & ended
    rewards = answered & (tokens[stops - 2] == sums[:, -1])
    right[stops - 1] |= rewards

    step_offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[is_step], minlength=len(batch)))])
    step_ends = (np.arange(len(tokens)) - batch.token_offsets[rows])[is_step]
    return Grades(rewards.astype(np.float32), ~ended, step_offsets, step_ends, right[is_step].astype(np.float32))


def write_solutions(prompts: Array, rng: np.random.Generator, *, accuracy: float, verbosity: float = 0.6) -> Batch:
    """One worked solution per prompt, as a sloppy calculator writes it.

    After each number it states the sum so far with probability ``verbosity``; whatever it states, the answer included,
    is right with probability ``accuracy``, else any digit.
    """
    count = len(prompts)
    present = prompts != PAD
    sums = np.cumsum(np.where(present, prompts, 0), axis=1) % 10
    sums = np.column_stack([sums, sums[:, -1]])
    written = np.where(rng.random(sums.shape) < accuracy, sums, rng.integers(0, 10, sums.shape))
    steps = np.stack([np.full_like(prompts, TAKE), written[:, :-1]], axis=2)
    kept = np.stack([present, present & (rng.random(prompts.shape) < verbosity)], axis=2)
    ending = np.stack([np.full(count, ANSWER), written[:, -1], np.full(count, END)], axis=1)
    tokens = np.concatenate([steps.reshape(count, -1), ending], axis=1)
    real = np.concatenate([kept.reshape(count, -1), np.ones((count, 3), dtype=bool)], axis=1)
    return Batch(prompts, np.arange(count), tokens[real], np.concatenate([[0], np.cumsum(real.sum(axis=1))]))


def _slots(history: Array, value: Array, pending: Array, taken: Array, prompts: Array) -> Array:
    """Columns of the one-hot input that are 1: (n, slots).

    ``history`` (n, 2) holds the tokens before, ``value`` (n,) the sum last stated, ``taken`` (n,) how many numbers of
    ``prompts`` (n, MAX_OPERANDS) the completion has taken, ``pending`` (n,) how many of those after that statement.
    """
    padded = np.pad(prompts, ((0, 0), (_NUMBERS_SEEN, 1)), constant_values=PAD)
    back = np.arange(1, _NUMBERS_SEEN + 1)
    at = np.minimum(taken, MAX_OPERANDS)[:, None] + _NUMBERS_SEEN
    numbers = np.where(back <= pending[:, None], np.take_along_axis(padded, at - back, axis=1), PAD)
    following = np.take_along_axis(padded, at, axis=1)
    return np.concatenate([history, value[:, None], numbers, following], axis=1) + np.arange(_SLOTS) * _WIDTH


def _log_softmax(logits: Array) -> Array:
    shifted: Array = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


class Policy:
    """One hidden layer, from one-hot slots to the log-probabilities of the next token."""

    def __init__(self, rng: np.random.Generator, *, hidden: int = 128, dtype: npt.DTypeLike = np.float32) -> None:
        shapes = {"w1": (_SLOTS * _WIDTH, hidden), "b1": (hidden,), "w2": (hidden, len(TOKENS)), "b2": (len(TOKENS),)}
        scales = {"w1": _SLOTS**-0.5, "b1": 0.0, "w2": 0.1 * hidden**-0.5, "b2": 0.0}
        #: name -> array; what an optimiser changes in place
        self.parameters: Parameters = {
            name: (scales[name] * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()
        }

    def copy(self) -> Policy:
        """The same policy with parameters of its own: a frozen reference, or pi_old."""
        twin = object.__new__(Policy)
        twin.parameters = {name: value.copy() for name, value in self.parameters.items()}
        return twin

    def sample(
        self, prompts: Array, group_size: int, rng: np.random.Generator, *, max_tokens: int = MAX_TOKENS
    ) -> tuple[Batch, Array]:
        """``group_size`` completions of every prompt, each cut off after ``max_tokens``.

        Returns the batch, rows of a group together, and the log-probs the tokens were drawn with (n_tokens,).
        """
        group_ids = np.repeat(np.arange(len(prompts)), group_size)
        expanded = prompts[group_ids]
        tokens = np.full((len(group_ids), max_tokens + _TOKENS_SEEN), PAD)
        chosen_logp = np.zeros((len(group_ids), max_tokens), dtype=self.parameters["w1"].dtype)
        lengths, value, pending, taken = np.zeros((4, len(group_ids)), dtype=np.int64)
        alive = np.arange(len(group_ids))
        for position in range(max_tokens):
            history = tokens[alive, position : position + _TOKENS_SEEN][:, ::-1]
            logp = self._forward(_slots(history, value[alive], pending[alive], taken[alive], expanded[alive]))[2]
            cumulative = np.cumsum(np.exp(logp), axis=1, dtype=np.float64)
            threshold = rng.random((len(alive), 1)) * cumulative[:, -1:]
            choice = np.sum(cumulative[:, :-1] <= threshold, axis=1)
            tokens[alive, position + _TOKENS_SEEN] = choice
            chosen_logp[alive, position] = logp[np.arange(len(alive)), choice]
            lengths[alive] += 1
            taken[alive] += choice == TAKE
            stated = choice < 10
            pending[alive] = np.where(stated, 0, pending[alive] + (choice == TAKE))
            value[alive] = np.where(stated, choice, value[alive])
            alive = alive[choice != END]
            if not len(alive):
                break
        real = np.arange(max_tokens) < lengths[:, None]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return Batch(expanded, group_ids, tokens[:, _TOKENS_SEEN:][real], offsets), chosen_logp[real]

    def logp(self, batch: Batch) -> Array:
        """(n_tokens,) log-probability of every token of the batch."""
        logp: Array = self._forward(batch.slots)[2]
        return np.take_along_axis(logp, batch.token_ids[:, None], axis=1)[:, 0]

    def backward(self, batch: Batch, grad_logp: Array) -> Parameters:
        """Gradient of a loss with respect to every parameter, from dL/dlogp of every token (n_tokens,)."""
        inputs, hidden, logp = self._forward(batch.slots)
        grad_logp = np.asarray(grad_logp, dtype=logp.dtype)
        grad_logits = -np.exp(logp) * grad_logp[:, None]
        grad_logits[np.arange(len(grad_logp)), batch.token_ids] += grad_logp
        grad_hidden = (grad_logits @ self.parameters["w2"].T) * (1 - hidden**2)
        return {
            "w1": inputs.T @ grad_hidden,
            "b1": grad_hidden.sum(axis=0),
            "w2": hidden.T @ grad_logits,
            "b2": grad_logits.sum(axis=0),
        }

    def _forward(self, slots: Array) -> tuple[Array, Array, Array]:
        """One-hot inputs, hidden layer, log-probs (n, 13) of the next token."""
        p = self.parameters
        inputs = np.zeros((len(slots), _SLOTS * _WIDTH), dtype=p["w1"].dtype)
        np.put_along_axis(inputs, slots, 1, axis=1)
        hidden = np.tanh(inputs @ p["w1"] + p["b1"])
        return inputs, hidden, _log_softmax(hidden @ p["w2"] + p["b2"])


class Adam:
    """Adam (Kingma and Ba, 2014) on a dict of arrays, which it changes in place."""

    def __init__(
        self, parameters: Parameters, *, lr: float = 3e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        self.steps = 0
        self.mean = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.square = {name: np.zeros_like(value) for name, value in parameters.items()}

    def step(self, gradients: Parameters) -> None:
        """One step downhill."""
        self.steps += 1
        first, second = self.betas
        rate = self.lr * (1 - second**self.steps) ** 0.5 / (1 - first**self.steps)
        for name, gradient in gradients.items():
            self.mean[name] += (1 - first) * (gradient - self.mean[name])
            self.square[name] += (1 - second) * (gradient**2 - self.square[name])
            self.parameters[name] -= rate * self.mean[name] / (np.sqrt(self.square[name]) + self.eps)


def pretrain(
    policy: Policy, rng: np.random.Generator, *, accuracy: float = 0.5, steps: int = 800, batch_size: int = 64
) -> Policy:
    """Maximise, in place, the likelihood of fresh :func:`write_solutions`; a few seconds. Returns the policy."""
    optimizer = Adam(policy.parameters, lr=1e-2)
    for _ in range(steps):
        batch = write_solutions(make_prompts(batch_size, rng), rng, accuracy=accuracy)
        optimizer.step(policy.backward(batch, np.full(len(batch.token_ids), -1 / len(batch.token_ids))))
    return policy
