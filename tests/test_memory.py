"""What a call allocates beyond its outputs: Python's and NumPy's by tracemalloc, the kernels' by the process's peak."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc
from typing import Any

import numpy as np
import pytest

import grpo_fast as gf

MIB = 1 << 20


def batch(n_completions: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    n = n_completions * length
    logp = -rng.exponential(1, n).astype(np.float32)
    return {
        "logp": logp,
        "old_logp": logp - np.float32(0.01),
        "ref_logp": logp + np.float32(0.01),
        "advantages": rng.normal(size=n_completions),
        "token_offsets": np.arange(n_completions + 1) * length,
    }


@pytest.mark.parametrize("options", [{}, {"loss_type": "gspo"}, {"loss_type": "sapo"}, {"kl_ratio_factor": "ratio"}])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_loss_allocates_little(backend: str, options: dict[str, Any], n_threads: int) -> None:
    if backend == "numpy":
        pytest.skip("the oracle is plain, not thrifty")
    arguments = batch(256, 1600)
    grad = np.empty_like(arguments["logp"])
    call = {**arguments, **options, "grad_out": grad, "backend": backend, "n_threads": n_threads}
    gf.grpo_loss(**call)  # compiles, starts threads
    tracemalloc.start()
    gf.grpo_loss(**call)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB * n_threads


def test_step_advantages_are_not_expanded(backend: str) -> None:
    if backend == "numpy":
        pytest.skip("the oracle is plain, not thrifty")
    arguments = batch(256, 1600)
    ends = np.tile(np.arange(99, 1600, 100), 256)
    call = {
        **arguments,
        "advantages": np.random.default_rng(1).normal(size=len(ends)),
        "advantage_level": "step",
        "step_ends": ends,
        "step_offsets": np.arange(257) * 16,
        "grad_out": np.empty_like(arguments["logp"]),
        "backend": backend,
    }
    gf.grpo_loss(**call)
    tracemalloc.start()
    gf.grpo_loss(**call)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernels_allocate_nothing_themselves() -> None:
    """The process's peak grows by no more than the bookkeeping of the call, gradient of 40 MB included nowhere."""
    code = """
        import re, sys, numpy as np, grpo_fast as gf
        from grpo_fast import _backends
        if _backends.why_not("cython"):
            sys.exit(77)
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
        n, length = 256, 40000
        logp = -np.ones(n * length, np.float32)
        grad = np.zeros_like(logp)
        call = lambda: gf.grpo_loss(
            logp, logp, logp, np.ones(n), np.arange(n + 1) * length, grad_out=grad, loss_type="gspo", n_threads=2, backend="cython"
        )
        small = lambda: gf.grpo_loss(
            logp[:1000], logp[:1000], logp[:1000], np.ones(1), [0, 1000], loss_type="gspo", n_threads=2, backend="cython"
        )
        small()
        before = peak()
        call()
        print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    if run.returncode == 77:
        pytest.skip("the compiled backend is not here")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2 * MIB
