"""The library against trl==1.16.0 and verl==0.9.1 themselves: value and gradient, on random ragged batches.

Skipped where a framework is not installed; tools/parity_env.sh makes an environment in which both run on a CPU.
GRPO_FAST_SEEDS=20 tries every row on twenty batches instead of two; GRPO_FAST_PARITY=required fails where it would skip.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import numpy as np
import pytest

from .compare import FLOAT32
from .features import ROWS, Row

SEEDS = range(int(os.environ.get("GRPO_FAST_SEEDS", "2")))
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}

# The frameworks warn while they are imported and called; what the library warns of has tests elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")


def missing(framework: str) -> str | None:
    """Why a framework cannot be run here."""
    for package in (framework, "torch"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; tools/parity_env.sh makes an environment that has it"
    version = importlib.metadata.version(framework)
    return None if version == VERSIONS[framework] else f"{framework} {version} is not {VERSIONS[framework]}"


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.framework}: {row.name}" for row in ROWS])
def test_same_numbers(row: Row, backend: str) -> None:
    reason = missing(row.framework)
    if reason is not None:
        (pytest.fail if os.environ.get("GRPO_FAST_PARITY") == "required" else pytest.skip)(reason)
    worst = 0.0
    for seed, batch in zip(SEEDS, row.batches(SEEDS), strict=True):
        for options in row.grid:
            for dtype, tolerance in ((np.float64, row.tolerance), (np.float32, max(row.tolerance, FLOAT32))):
                if dtype is np.float32 and not row.float32:
                    continue
                difference = row.compare(row, batch, options, dtype, backend)
                worst = max(worst, difference.worst)
                if not row.differs:
                    assert difference.worst <= tolerance, f"seed {seed}, {np.dtype(dtype)}, {options}: {difference}"
    if row.differs:
        assert worst > row.tolerance, f"{row.framework} no longer differs: {row.why}"
