"""Named workloads: how long completions are in life, and arrays of those lengths.

Lengths are log-normal, cut at the generation limit, and correlated within a prompt, as training logs
show; log-probs are drawn so that most ratios lie inside the clip range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """prompts x group completions of median length, log-deviation sigma, cut at cap."""

    about: str
    prompts: int
    group: int
    median: float
    sigma: float
    cap: int
    within: float = 0.6  # share of the variance of log-length that lies between prompts

    def lengths(self, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        prompt = np.sqrt(self.within) * rng.standard_normal((self.prompts, 1))
        own = np.sqrt(1 - self.within) * rng.standard_normal((self.prompts, self.group))
        return np.clip(np.rint(self.median * np.exp(self.sigma * (prompt + own))), 16, self.cap).astype(np.int64)


SHAPES = {
    "tiny": Shape("8 completions of about 200 tokens", 1, 8, 200, 0.3, 400),
    "S": Shape("GSM8K-like", 512, 4, 150, 0.45, 1024),
    "W": Shape("wide groups", 16, 64, 280, 0.5, 1024),
    "M1": Shape("instruct, 4k limit", 32, 8, 1400, 0.75, 4096),
    "F": Shape("limit near the mean: little padding", 32, 8, 3600, 0.6, 4096),
    "M2": Shape("8k limit", 512, 16, 2200, 0.75, 8192),
}


@dataclass(frozen=True)
class Workload:
    """One batch in both layouts, float32: flat with offsets, and padded to the longest completion."""

    name: str
    offsets: np.ndarray
    flat: dict[str, np.ndarray]  # logp, old_logp, ref_logp
    padded: dict[str, np.ndarray]
    mask: np.ndarray
    advantages: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def fill(self) -> float:
        return self.tokens / self.mask.size


def make(name: str, seed: int = 0) -> Workload:
    lengths = SHAPES[name].lengths(seed).ravel()
    rng = np.random.default_rng(seed + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    n = int(offsets[-1])
    logp = -rng.exponential(0.7, n).astype(np.float32)
    flat = {
        "logp": logp,
        "old_logp": logp - rng.normal(0, 0.08, n).astype(np.float32),
        "ref_logp": logp + rng.normal(0, 0.15, n).astype(np.float32),
    }
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = {}
    for key, values in flat.items():
        padded[key] = np.zeros(mask.shape, np.float32)
        padded[key][mask] = values
    return Workload(name, offsets, flat, padded, mask, rng.normal(0, 1, len(lengths)).astype(np.float32))
