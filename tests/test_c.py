"""The C code by itself, built with the C compiler of this machine. ``tests/c/run.sh`` has the other builds."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _flags() -> list[str]:
    """FLAGS of setup.py, and everything the compiler can warn of."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLAGS":
            return [*ast.literal_eval(node.value), "-Wall", "-Wextra", "-Werror"]
    raise AssertionError("setup.py has no FLAGS")


@pytest.mark.skipif(sys.platform == "win32", reason="the C tests need POSIX threads")
def test_native_code(tmp_path: Path) -> None:
    if not (ROOT / "src" / "native.c").exists():
        pytest.skip("the C sources are not here")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler: {compiler[0]} is not found")
    program = tmp_path / "test_native"
    sources = ["tests/c/test_native.c", "src/native.c", "src/pools.c", "src/threads.c"]
    command = [*compiler, *_flags(), "-Isrc", *sources, "-o", str(program), "-lpthread", "-lm"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].endswith(" passed, 0 failed")
