"""Measure, write ``bench/results/<machine>.json``, and put the table into the README.

``python bench/table.py`` measures all contenders in interleaved rounds of one process and rewrites the table;
``--check`` only verifies that README and JSON agree; ``--shapes M1 F`` restricts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from contenders import CONTENDERS, check, expectation
from workloads import SHAPES, make

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench: made by python bench/table.py -->", "<!-- /bench -->"
BASELINE = "padded NumPy"


def machine() -> str:
    """The kind of machine, as a file name: model and CPUs."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model} x{os.cpu_count()}"


def measure(name: str, rounds: int) -> dict[str, object]:
    work = make(name)
    expected = expectation(work)
    ready = {}
    for contender, prepare in CONTENDERS.items():
        prepared = prepare(work)
        if prepared is not None:
            check(work, prepared, expected)
            ready[contender] = prepared[0]
    times: dict[str, list[float]] = {contender: [] for contender in ready}
    for _ in range(rounds):
        for contender, call in ready.items():
            call()  # each meets its own caches, not those of whoever came before
            begin = time.perf_counter()
            call()
            times[contender].append(time.perf_counter() - begin)
    return {
        "tokens": work.tokens,
        "fill": round(work.fill, 3),
        "about": SHAPES[name].about,
        "seconds": {contender: median(values) for contender, values in times.items()},
    }


def run(shapes: list[str], rounds: int) -> Path:
    result = {
        "machine": machine(),
        "versions": {name: version(name) for name in ("numpy", "numba", "cython")}
        | {"python": platform.python_version()},
        "compiler": platform.python_compiler(),
        "shapes": {name: measure(name, rounds) for name in shapes},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{machine().replace(' ', '-').replace('/', '-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def table(path: Path) -> str:
    """Markdown: ns per real token, and how many times faster than padded NumPy."""
    result = json.loads(path.read_text())
    shapes = result["shapes"]
    heads = [
        f"{name} ({shape['about']}; {shape['tokens']:,} tokens, fill {shape['fill']:.2f})"
        for name, shape in shapes.items()
    ]
    lines = ["| loss + gradient + metrics, float32 | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    contenders = dict.fromkeys(c for shape in shapes.values() for c in shape["seconds"])
    for contender in contenders:
        cells = []
        for shape in shapes.values():
            seconds = shape["seconds"].get(contender)
            if seconds is None:
                cells.append("-")
                continue
            cells.append(f"{seconds / shape['tokens'] * 1e9:.2f} ns ({shape['seconds'][BASELINE] / seconds:.1f}x)")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    lines += [
        "",
        "Per real token (and times faster than padded NumPy); medians of interleaved rounds, second of two calls, "
        f"on {result['machine']}, {versions}.",
    ]
    return "\n".join(lines)


def readme_with(text: str) -> str:
    readme = (ROOT / "README.md").read_text()
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not arguments.check:
        path = run(arguments.shapes, arguments.rounds)
        (ROOT / "README.md").write_text(readme_with(table(path)))
        print(table(path))
        return
    readme = (ROOT / "README.md").read_text()
    if not any(table(path) in readme for path in RESULTS.glob("*.json")):
        raise SystemExit("README.md: its table is not that of any file in bench/results; run python bench/table.py")


if __name__ == "__main__":
    main()
