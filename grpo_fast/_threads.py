"""How many threads, and how they share work: Python threads around kernels that hold no GIL.

No OpenMP and no threading layer: nothing here hangs in a forked child, aborts when two Python
threads call at once, or spins. The caller works too; helpers come from one pool per process, and a
helper that has not woken up when the work is done is cancelled, so that it never costs anything.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

TOKENS_PER_THREAD = 16384  # a thread that got less would cost more than it saves

MOST = max(64, os.cpu_count() or 1)  # as many as the pool has; more would only wait for each other

_pools: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not survive a fork
_set: int | None = None


def set_num_threads(n: int | None) -> None:
    """Use ``n`` threads where a call says nothing; ``None``: as many as are available."""
    global _set
    _set = None if n is None or n == -1 else _positive("n", n)


def choose(n_tokens: int, n_threads: int | None = None) -> int:
    """The number of threads for so many tokens, at most ``MOST``; results never depend on it."""
    if n_threads is not None:
        return _positive("n_threads", n_threads)
    worth = 1 + n_tokens // TOKENS_PER_THREAD
    return 1 if worth == 1 else min(_set or available(), worth)


def available() -> int:
    """CPUs this process may use: affinity, container quota and environment, whichever is least."""
    cpus = [os.cpu_count() or 1, _quota()]
    if hasattr(os, "sched_getaffinity"):
        cpus.append(len(os.sched_getaffinity(0)))
    for name in ("OMP_NUM_THREADS", "GRPO_FAST_NUM_THREADS"):
        with suppress(ValueError):  # OMP_NUM_THREADS=4,2 is for nested regions; the first counts
            cpus.append(int(os.environ.get(name, "").partition(",")[0]))
    return min(n for n in cpus if n > 0)


def run(worker: Callable[[], None], n_threads: int) -> None:
    """Call ``worker`` here and, as far as they wake up in time, in ``n_threads - 1`` other threads.

    Every ``worker()`` takes pieces of work until none are left, and then returns.
    """
    helpers: list[Future[None]] = []
    if n_threads > 1:
        with suppress(RuntimeError):  # the interpreter is shutting down: no new threads
            helpers.extend(_pool().submit(worker) for _ in range(n_threads - 1))
    try:
        worker()
    finally:
        late = [helper for helper in helpers if not helper.cancel()]
        for helper in late:
            helper.result()


def _positive(name: str, n: int) -> int:
    try:
        if isinstance(n, bool):
            raise TypeError
        value = operator.index(n)
    except TypeError:
        raise TypeError(
            f"{name}: expected a positive integer or -1, got {n!r}; use -1 for all available CPUs"
        ) from None
    if value == -1:
        return _set or available()
    if value < 1:
        raise ValueError(f"{name}: expected a positive integer or -1, got {value}; use -1 for all available CPUs")
    return min(value, MOST)


def _pool() -> ThreadPoolExecutor:
    pool = _pools.get(os.getpid())
    if pool is None:
        from concurrent.futures import ThreadPoolExecutor

        # setdefault is atomic: of two pools made at once one is kept, and the other never had a thread
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(MOST, "grpo_fast"))
    return pool


@functools.cache
def _quota() -> int:
    """CPUs of the cgroup's quota, rounded up; 0 where there is none."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()  # v2: "max 100000" or "150000 100000"
        return -(-int(quota) // int(period))
    with suppress(OSError, ValueError):
        cpu = root / "cpu"
        quota, period = ((cpu / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0, -(-int(quota) // int(period)))
    return 0
