"""Writes docs/parity_others.md: how far the library is from liger, OpenRLHF, SkyRL, AReaL, Tunix and tinker themselves.

    python tools/parity_others.py [--seeds N]

Runs in the environment that tools/parity_env_others.sh makes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PAGE = ROOT / "docs" / "parity_others.md"
PACKAGES = {
    "liger": "liger_kernel", "openrlhf": "openrlhf", "skyrl": "skyrl", "areal": "areal", "tunix": "google-tunix",
    "tinker": "tinker_cookbook",
}  # fmt: skip
HEAD = """# Parity with the other frameworks

Written by `python tools/parity_others.py`; do not edit. *Executed* means that the framework's own imported function was
called in the run that wrote this page, in float64, on {seeds} random ragged batches with holes, empty completions,
shuffled ids, KL and weights: {versions}. What only engines and clusters need is a hollow module
in its place, see `tests/parity/others_stubs.py`. *Differences* are relative to the largest number of what is compared;
gradients are per token, times the number of tokens. *Read* conventions were compared with what their sources say, by
hand, in `tests/test_convention_rows.py`: {read}.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")
    import pytest
    from parity.others_features import FEATURES
    from parity.test_others import batch_of

    from grpo_fast.conventions import CONVENTIONS

    lines = [
        "| framework | feature | checked | value | gradient | bound | batches |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    failed = 0
    for feature in FEATURES:
        value, gradient, n = 0.0, None, 0
        for seed in range(seeds):
            try:
                batch = batch_of(feature, seed)
            except pytest.skip.Exception:  # the framework cannot hold it
                continue
            n += 1
            theirs, ours = feature.theirs(batch), feature.ours(batch)
            value = max(value, off(ours.value, theirs.value))
            if theirs.grad is not None and ours.grad is not None:
                gradient = max(gradient or 0.0, off(batch.n_tokens * ours.grad, batch.n_tokens * theirs.grad))
        failed += (feature.value and value > feature.rtol) or (gradient or 0.0) > feature.rtol
        checked = "executed" if feature.value else "executed; another value, see the convention's notes"
        shown = [f"{value:.1e}", "" if gradient is None else f"{gradient:.1e}", f"{feature.rtol:g}", str(n)]
        lines.append(f"| {feature.framework} | {feature.name} | {checked} | {' | '.join(shown)} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(package)}" for name, package in PACKAGES.items())
    read = ", ".join(name for name, row in CONVENTIONS.items() if row.checked == "read")
    PAGE.write_text(HEAD.format(versions=versions, seeds=seeds, read=read) + "\n".join(lines) + "\n", encoding="utf-8")
    if failed:
        print(f"{failed} rows are out of their bounds")
    return 1 if failed else 0


def off(ours: object, theirs: object) -> float:
    found, wanted = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(found - wanted).max(initial=0.0) / max(1.0, np.abs(wanted).max(initial=0.0)))


if __name__ == "__main__":
    sys.exit(main())
