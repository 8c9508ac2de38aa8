"""What runs here, and why: versions, backends, instruction set, threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from . import _backends, _threads
from ._version import __version__

_OPTIONAL = ("numba", "pyarrow", "torch", "cyclopts")


def show_info() -> None:
    """Print versions, the backend in use with the reason the others are not, instruction set and threads.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.show_info()  # doctest: +ELLIPSIS
    grpo-fast ...
    """
    print("\n".join(_lines()))


def _lines() -> list[str]:
    versions = ", ".join(f"{name} {_version(name)}" for name in _OPTIONAL)
    return [
        f"grpo-fast {__version__}, Python {platform.python_version()}, numpy {_version('numpy')}; {versions}",
        f"machine: {platform.machine()}, {platform.system()}",
        f"backend: {_in_force()}",
        *(f"  {name}: {_state(name)}" for name in _backends.NAMES),
        f"threads: {_threads.choose(sys.maxsize)} ({_thread_reason()})",
    ]


def _in_force() -> str:
    try:
        return f"{_backends.default()} ({_why()})"
    except ValueError as error:  # GRPO_FAST_BACKEND misspelt: this is where one comes to see it
        return f"none: {error}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _why() -> str:
    if _backends.is_set():
        return "chosen with set_backend"
    if os.environ.get("GRPO_FAST_BACKEND"):
        return "chosen with GRPO_FAST_BACKEND"
    return "the first that runs here"


def _state(name: str) -> str:
    reason = _backends.why_not(name)
    if reason is not None:
        return f"not available: {reason}"
    if name != "cython":
        return "available"
    native = _backends.get("cython")
    threads = "with threads" if native.has_threads() else "without threads: this platform has no pthreads"
    return f"available, instruction set {native.isa()} of {', '.join(native.isas())}, {threads}"


def _thread_reason() -> str:
    limits = [
        f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "GRPO_FAST_NUM_THREADS") if name in os.environ
    ]
    return f"of {os.cpu_count()} CPUs; {', '.join(limits) or 'OMP_NUM_THREADS is not set'}"
