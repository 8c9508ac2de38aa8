"""Which backend runs: ``cython`` (compiled), ``numba`` (JIT) or ``numpy`` (plain, always there)."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ._validate import one_of

#: In order of preference; nothing is imported before a backend is needed.
_MODULES = {"cython": "_native", "numba": "_numba", "numpy": "_numpy"}
NAMES = tuple(_MODULES)
_WAY_OUT = {
    "cython": "the compiled extension was not built or does not load; reinstall with a C compiler present",
    "numba": "numba does not import; pip install 'grpo-fast[numba]'",
    "numpy": "NumPy does not import",
}
_LEAVE_THE_TREE = "run Python from another folder to use what pip installed, or pip install -e . to build in place"

_chosen: str | None = None


class BackendUnavailable(ImportError):
    """A backend was asked for by name and is not there."""


@cache
def why_not(name: str) -> str | None:
    """None where the backend can run, else the reason in one sentence."""
    try:
        importlib.import_module(f"grpo_fast.{_MODULES[name]}")
    except ImportError as error:
        if name == "cython" and (Path(__file__).parents[1] / "setup.py").exists():
            return f"grpo_fast is imported from a source tree in which nothing is built; {_LEAVE_THE_TREE} ({error})"
        return f"{_WAY_OUT[name]} ({error})"
    return None


def default() -> str:
    """The name in force: ``set_backend``, else ``GRPO_FAST_BACKEND``, else the first that can run."""
    if _chosen is not None:
        return _chosen
    asked = os.environ.get("GRPO_FAST_BACKEND")
    if asked:
        return one_of("GRPO_FAST_BACKEND", asked, NAMES)
    return next(name for name in NAMES if why_not(name) is None)


def set_backend(name: str | None) -> None:
    """Use this backend from now on in this process; None goes back to the default.

    Raises
    ------
    ValueError  for an unknown name
    BackendUnavailable  where the backend cannot run, with the reason
    """
    global _chosen
    if name is not None:
        get(name)
    _chosen = name


def is_set() -> bool:
    """Whether ``set_backend`` has chosen."""
    return _chosen is not None


def get(name: str | None = None) -> Any:
    """The backend module of that name (None: the one in force)."""
    name = default() if name is None else one_of("backend", name, NAMES)
    reason = why_not(name)
    if reason is not None:
        raise BackendUnavailable(f"backend: {name!r} is not available: {reason}")
    return sys.modules[f"grpo_fast.{_MODULES[name]}"]
