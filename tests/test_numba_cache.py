"""What Numba keeps on disk: found again by another process, and renewed when any source of the kernels changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

PACKAGE = Path(__file__).parents[1] / "grpo_fast"

#: Compiles one kernel and one loop, which are made of several files; prints what was found on disk, and a result.
USE = """
import numpy as np
from grpo_fast import _numba, _numba_tokens
from grpo_fast._numba_loops import known_loop
loop = known_loop(True, 4, np.float64)
out = np.zeros(1)
at = np.array([0]), np.array([1])
_numba.mismatch_weights(np.array([-1.0]), np.array([-1.0]), None, *at, np.inf, 0.0, 9.0, 0, out)
hits = sum(_numba_tokens.mismatch_weights.stats.cache_hits.values())
print(loop.cache_hits, hits, out[0])
"""


def use(folder: Path) -> tuple[int, int, float]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "kept")}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loop, kernel, result = done.stdout.split()
    return int(loop), int(kernel), float(result)


def test_kept_and_renewed(tmp_path: Path) -> None:
    """exp stands in another file than the kernel, the formula in another than its loop."""
    shutil.copytree(PACKAGE, tmp_path / "grpo_fast", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    assert use(tmp_path) == (0, 0, 1.0)
    assert use(tmp_path) == (1, 1, 1.0)
    exp = tmp_path / "grpo_fast/_numba_exp.py"
    text = exp.read_text()
    exp.write_text(text.replace("        return e, p if n == zero", "        return e + e, p if n == zero"))
    assert exp.read_text() != text
    assert use(tmp_path) == (0, 0, 2.0)
    exp.write_text(text)
    assert use(tmp_path) == (1, 1, 1.0)
