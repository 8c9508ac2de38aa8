"""Writes docs/parity.md: every feature of TRL and verl, how far the library is from the framework itself.

    python tools/parity.py [--seeds N] [--backend NAME] [--check]

Runs in the environment that tools/parity_env.sh makes. ``--check`` writes nothing; it fails where a row is out of
tolerance, or where the page names other rows than the table of features.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PAGE = ROOT / "docs" / "parity.md"
HEAD = """# Parity with TRL and verl

Written by `python tools/parity.py`; do not edit. *Executed* means that the framework's own imported function was called
in the run that wrote this page, on random ragged batches: shuffled string ids, groups from one completion on, groups of
equal rewards, holes in masks, completions without tokens and without counted tokens, KL, weights, caps and clamps on.
Masked slots hold NaN for this library, and other finite numbers for the framework, which multiplies its masks in.

{versions} under `torch.set_default_dtype(torch.float64)`; {seeds} batches for every set of options; backend
`{backend}`.

How it is measured:

* *value* of a loss: |difference| over the sum of the absolute values of its terms, the policy part and the KL part of
  every completion; of advantages, weights and rewards: |difference| over max(1, |value|), the largest;
* *gradient*: N |difference| over max(1, N (|policy part| + |KL part|)), the largest over the N counted tokens (the
  policy part of dro and kl_cov is two parts, one without their penalty);
* *float32*: this library in float32 against the framework in float64 on the same numbers, which float32 holds exactly.

Bounds, which `tests/parity` holds every row to: {float64:g} in float64 ({float32:g} where the framework computes in
float32 whatever it is given), {float32:g} in float32. Rows marked *differs* are not held to them: they are known
differences, and the test fails when one of them is gone.
"""


def measure(row: Any, seeds: range, backend: str) -> tuple[Any, Any]:
    """The largest differences in float64 and in float32."""
    from parity.compare import Difference

    found = []
    for dtype in (np.float64, np.float32) if row.float32 else (np.float64,):
        difference = Difference()
        for batch in row.batches(seeds):
            for options in row.grid:
                difference |= row.compare(row, batch, options, dtype, backend)
        found.append(difference)
    return found[0], found[1] if len(found) == 2 else None


def show(x: float) -> str:
    return "0" if x == 0 else "not a number" if np.isinf(x) else f"{x:.1e}"


def line(row: Any, wide: Any, narrow: Any, whys: list[str]) -> str:
    mark = "executed"
    if row.why:
        if row.why not in whys:
            whys.append(row.why)
        mark += f", {'differs' if row.differs else 'note'} {whys.index(row.why) + 1}"
    cells = [
        row.name, f"`{row.function}`", f"`{row.call}`", mark, show(wide.value_abs), show(wide.value_rel),
        *((show(wide.grad_abs), show(wide.grad_rel)) if wide.has_grad else ("", "")),
        "" if narrow is None else show(narrow.value_rel),
        "" if narrow is None or not narrow.has_grad else show(narrow.grad_rel),
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--backend", default="cython")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from parity.compare import FLOAT32, FLOAT64
    from parity.features import ROWS

    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "verl"))
    lines = [
        HEAD.format(versions=versions, seeds=options.seeds, backend=options.backend, float64=FLOAT64, float32=FLOAT32)
    ]
    whys: list[str] = []
    bad = []
    for framework, title in (("trl", "TRL"), ("verl", "verl")):
        lines += [
            f"\n## {title}\n",
            "| feature | its function | this library | checked | value, absolute | value, relative "
            "| gradient, absolute | gradient, relative | float32 value | float32 gradient |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in (row for row in ROWS if row.framework == framework):
            wide, narrow = measure(row, range(options.seeds), options.backend)
            lines.append(line(row, wide, narrow, whys))
            print(lines[-1], flush=True)
            within = wide.worst <= row.tolerance and (narrow is None or narrow.worst <= max(row.tolerance, FLOAT32))
            if within == row.differs:
                bad.append(f"{framework}: {row.name}")
    lines += ["\n## Notes\n", *(f"{k}. {why}." for k, why in enumerate(whys, 1))]
    if options.check:
        page = PAGE.read_text() if PAGE.exists() else ""
        bad += [f"{PAGE.name} has no row {row.name!r}" for row in ROWS if f"| {row.name} |" not in page]
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text("\n".join(lines) + "\n")
    for name in bad:
        print(f"out of tolerance, or no longer different: {name}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
