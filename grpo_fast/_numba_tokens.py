# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Kernels over the tokens of completions low..high, apart from the loss: float64 inside, absent arrays come empty."""

from __future__ import annotations

import numpy as np

from . import _contract as c
from ._numba_exp import exp, ordered, unordered
from ._numba_jit import exact_formula, inner, kernel, sum_formula

BOUND = c.EXP_BOUND[np.dtype(np.float64)]
LEAST_SQUARE, MOST_SQUARE = float(np.exp(-BOUND)), float(np.exp(BOUND))

TOKENS, UNSCORED, LOG_RATIO, LOG_RATIO_ABS, LEAST, MOST, RATIO, RATIO_SQ, K2, K2_MAX, K3, K3_MAX, NON_FINITE = map(
    c.MISMATCH.index,
    ("tokens", "unscored", "log_ratio", "log_ratio_abs", "log_ratio_min", "log_ratio_max", "ratio", "ratio_sq",
     "k2", "k2_max", "k3", "k3_max", "non_finite"),
)  # fmt: skip


@exact_formula
def _count_tokens(mask, start, stop, counts):
    for i in range(start.size):
        counted = np.int32(0)
        part = mask[start[i] : stop[i]]
        for t in range(np.uint64(part.size)):
            counted += np.int32(part[t] != 0)
        counts[i] = counted


count_tokens = kernel(_count_tokens)


@exact_formula
def _expand_steps(step_values, step_offsets, step_ends, start, stop, base, largest, out):
    for i in range(start.size):
        own = base[i] if base.size > 0 else 0.0
        begin = start[i]
        for step in range(step_offsets[i], step_offsets[i + 1]):
            end = min(stop[i], start[i] + step_ends[step] + 1)
            value = own + step_values[step]
            for t in range(begin, end):
                out[t] = min(max(value, -largest), largest)
            begin = max(begin, end)
        for t in range(begin, stop[i]):
            out[t] = min(max(own, -largest), largest)


expand_steps = kernel(_expand_steps)


@exact_formula
def _gae(rewards, final, values, mask, start, stop, gamma, lam, largest, out, low, high):
    for i in range(low, high):
        reward = final[i] if final.size > 0 else 0.0  # of the last counted token, on top of its own
        next_value, advantage = 0.0, 0.0
        for t in range(stop[i] - 1, start[i] - 1, -1):
            if mask.size > 0 and mask[t] == 0:
                out[t] = 0.0
                continue
            if rewards.size > 0:
                reward += np.float64(rewards[t])
            value = np.float64(values[t]) if values.size > 0 else 0.0
            advantage = reward + gamma * next_value - value + gamma * lam * advantage
            next_value, reward = value, 0.0
            out[t] = min(max(advantage, -largest), largest)


gae = kernel(_gae)


@sum_formula
def _moments(values, mask, start, stop, centre, out, low, high):
    for i in range(low, high):
        tokens, total, square = np.int64(0), 0.0, 0.0
        for t in range(np.uint64(start[i]), np.uint64(stop[i])):
            counted = mask.size == 0 or mask[t] != 0
            deviation = np.float64(values[t]) - centre if counted else 0.0
            tokens += np.int64(counted)
            total += deviation
            square += deviation * deviation
        out[i, 0], out[i, 1], out[i, 2] = tokens, total, square


moments = kernel(_moments)


@exact_formula
def _affine(values, mask, start, stop, shift, scale, largest, out, low, high):
    for i in range(low, high):
        for t in range(np.uint64(start[i]), np.uint64(stop[i])):
            counted = mask.size == 0 or mask[t] != 0
            scaled = (np.float64(values[t]) - shift) * scale
            out[t] = min(max(scaled, -largest), largest) if counted else 0.0


affine = kernel(_affine)


# ---- two log-probs of the same tokens ----------------------------------------------------------------


@inner
def _log_ratio(a, b):
    """x; 0 where b was not scored."""
    x = np.float64(a) - np.float64(b)
    return x if b == b else 0.0


@inner
def _hold(x, clamp):
    return min(max(x, -clamp), clamp)


@sum_formula
def _mismatch(a, b, mask, start, stop, clamp, out, low, high):
    for i in range(low, high):
        tokens, unscored, non_finite = np.int64(0), np.int64(0), np.int64(0)
        total, size, ratio, square, k2, k3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        first, last, zero = ordered(-np.inf), ordered(np.inf), ordered(0.0)
        least, most, k2_most, k3_most = last, first, zero, zero
        for t in range(np.uint64(start[i]), np.uint64(stop[i])):
            counted = mask.size == 0 or mask[t] != 0
            x = _log_ratio(a[t], b[t]) if counted else 0.0
            y = _hold(x, clamp)
            r, _, tail = exp(y, BOUND)
            half = 0.5 * y * y
            tokens += np.int64(counted)
            unscored += np.int64(counted and b[t] != b[t])
            fits = abs(np.float64(a[t])) <= c.LARGEST and (abs(np.float64(b[t])) <= c.LARGEST or b[t] != b[t])
            non_finite += np.int64(counted and not fits)
            total += x
            size += abs(x)
            ratio += r if counted else 0.0
            square += min(max(r * r, LEAST_SQUARE), MOST_SQUARE) if counted else 0.0
            k2 += half
            k3 += tail
            least = min(least, ordered(x) if counted else last)
            most = max(most, ordered(x) if counted else first)
            k2_most = max(k2_most, ordered(half))
            k3_most = max(k3_most, ordered(tail))
        row = out[i]
        row[TOKENS], row[UNSCORED], row[NON_FINITE] = tokens, unscored, non_finite
        row[LOG_RATIO], row[LOG_RATIO_ABS] = total, size
        row[LEAST], row[MOST] = unordered(least, 0.0), unordered(most, 0.0)
        row[RATIO], row[RATIO_SQ], row[K2], row[K3] = ratio, square, k2, k3
        row[K2_MAX], row[K3_MAX] = unordered(k2_most, 0.0), unordered(k3_most, 0.0)


mismatch = kernel(_mismatch)


@exact_formula
def _mismatch_weights(a, b, mask, start, stop, clamp, least, most, outside, largest, out, low, high):
    for i in range(low, high):
        for t in range(np.uint64(start[i]), np.uint64(stop[i])):
            counted = mask.size == 0 or mask[t] != 0
            weight = exp(_hold(_log_ratio(a[t], b[t]), clamp), BOUND)[0]
            held = min(max(weight, least), most)
            weight = held if outside == c.OUTSIDE_CLIP or held == weight else 0.0
            out[t] = min(weight, largest) if counted else 0.0


mismatch_weights = kernel(_mismatch_weights)


@exact_formula
def _mismatch_keep(a, b, mask, start, stop, clamp, statistic, least, most, keep, low, high):
    for i in range(low, high):
        for t in range(np.uint64(start[i]), np.uint64(stop[i])):
            counted = mask.size == 0 or mask[t] != 0
            y = _hold(_log_ratio(a[t], b[t]), clamp)
            value = y
            if statistic == c.STATISTIC_K2:
                value = 0.5 * y * y
            elif statistic == c.STATISTIC_K3:
                value = exp(y, BOUND)[2]
            keep[t] = counted and least <= value <= most


mismatch_keep = kernel(_mismatch_keep)
