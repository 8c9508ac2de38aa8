"""Who computes clip + k3 loss, gradient and metrics; each on the layout it is made for.

A contender is ``(workload) -> (call, loss of a result, gradient of a result on the flat tokens)``, or None where
it cannot run here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Workload

import grpo_fast as gf
from grpo_fast import _backends

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from reference import padded_numpy_loss_and_grad

BETA = 0.04
Call = Callable[[], Any]
Contender = Callable[[Workload], "tuple[Call, Callable[[Any], float], Callable[[Any], np.ndarray]] | None"]


def library(backend: str, n_threads: int, isa: str | None = None) -> Contender:
    def prepare(work: Workload) -> Any:
        if _backends.why_not(backend) is not None:
            return None
        module = _backends.get(backend)
        if isa is not None and isa not in module.isas():
            return None
        grad = np.empty_like(work.flat["logp"])

        best = None if backend != "cython" else module.isas()[-1]

        def call() -> gf.LossResult:
            if best is not None:
                module.select_isa(isa or best)
            return gf.grpo_loss(
                work.flat["logp"],
                work.flat["old_logp"],
                work.flat["ref_logp"],
                work.advantages,
                work.offsets,
                beta=BETA,
                grad_out=grad,
                n_threads=n_threads,
                backend=backend,
            )

        return call, lambda result: result.loss, lambda result: result.grad

    return prepare


def padded_numpy(with_metrics: bool) -> Contender:
    """What people run: (B, L) arrays, eager NumPy."""

    def prepare(work: Workload) -> Any:
        arrays = [work.padded[name] for name in ("logp", "old_logp", "ref_logp")]

        def call() -> Any:
            return padded_numpy_loss_and_grad(*arrays, work.advantages, work.mask, beta=BETA, with_metrics=with_metrics)

        return call, lambda result: result[0], lambda result: result[1][work.mask]

    return prepare


def unpadded_numpy(work: Workload) -> Any:
    """The same baseline on one completion at a time: NumPy in cache-sized pieces, nothing padded."""
    pieces = [slice(a, b) for a, b in zip(work.offsets[:-1], work.offsets[1:], strict=True)]
    ones = [np.ones((1, p.stop - p.start), bool) for p in pieces]
    rows = len(pieces)

    def call() -> tuple[float, np.ndarray]:
        grad = np.empty_like(work.flat["logp"])
        loss = 0.0
        for i, (piece, mask) in enumerate(zip(pieces, ones, strict=True)):
            arrays = (work.flat[key][None, piece] for key in ("logp", "old_logp", "ref_logp"))
            part, part_grad, _ = padded_numpy_loss_and_grad(*arrays, work.advantages[i : i + 1], mask, beta=BETA)
            loss += part / rows
            grad[piece] = part_grad[0] / rows
        return loss, grad

    return call, lambda result: result[0], lambda result: result[1]


def roof(work: Workload) -> Any:
    """Not a loss: the sum of the same three arrays and a copy of one, which is what memory allows NumPy."""
    out = np.empty_like(work.flat["logp"])

    def call() -> None:
        for key in ("logp", "old_logp", "ref_logp"):
            work.flat[key].sum()
        np.copyto(out, 0.0)

    return call, None, None


CONTENDERS: dict[str, Contender] = {
    "padded NumPy": padded_numpy(True),
    "padded NumPy, without metrics": padded_numpy(False),
    "unpadded NumPy": unpadded_numpy,
    "grpo_fast numpy": library("numpy", 1),
    "grpo_fast numba, 1 thread": library("numba", 1),
    "grpo_fast numba, all threads": library("numba", -1),
    "grpo_fast cython baseline, 1 thread": library("cython", 1, "baseline"),
    "grpo_fast cython x86-64-v3, 1 thread": library("cython", 1, "x86-64-v3"),
    "grpo_fast cython x86-64-v4, 1 thread": library("cython", 1, "x86-64-v4"),
    "grpo_fast cython, 1 thread": library("cython", 1),
    "grpo_fast cython, all threads": library("cython", -1),
    "read 3 arrays, write 1 (NumPy, 1 thread)": roof,
}


def check(work: Workload, prepared: Any, expected: tuple[float, np.ndarray]) -> None:
    """A contender that computes something else is not timed."""
    call, loss, grad = prepared
    result = call()
    if loss is None:
        return
    want_loss, want_grad = expected
    assert abs(loss(result) - want_loss) <= 1e-5 * max(abs(want_loss), 1e-2), (loss(result), want_loss)
    # float32 rivals may take the other side of a clip bound where the ratio lies within rounding of it
    scale = np.abs(want_grad).max()
    off = np.abs(grad(result) - want_grad) > 1e-4 * scale
    assert off.mean() < 1e-4, f"{off.sum()} gradients differ"


def expectation(work: Workload) -> tuple[float, np.ndarray]:
    call, loss, grad = library("numpy", 1)(work)  # type: ignore[misc]
    result = call()
    return loss(result), grad(result).copy()
