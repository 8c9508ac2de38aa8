"""Results do not depend on threads, place or order; and threads survive forks, concurrency and environments."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import plans
import pytest

import grpo_fast as gf
from grpo_fast import _backends, _threads
from grpo_fast import _contract as c

LENGTHS = (0, 1, 255, 256, 257, 20000, 3, 33000, 700)


@pytest.fixture(params=[name for name in _backends.NAMES if name != "numpy"])
def kernels(request: pytest.FixtureRequest) -> Any:
    reason = _backends.why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return _backends.get(request.param)


@pytest.fixture(autouse=True)
def no_setting() -> Iterator[None]:
    yield
    _threads.set_num_threads(None)


def example(level: int = c.LEVEL_TOKEN, dtype: Any = np.float32, seed: int = 3) -> tuple[c.Plan, c.Batch]:
    rng = np.random.default_rng(seed)
    plan = plans.plan(rng, "clip", level, dtype, kl=3, beta=0.1)
    return plan, plans.batch(rng, plan, dtype, LENGTHS)


def run(module: Any, plan: c.Plan, batch: c.Batch, n_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    grad, stats = np.zeros_like(batch.logp), np.empty((len(batch.start), len(c.STATS)))
    module.policy_loss(plan, batch, grad, stats, n_threads)
    return grad, stats


def same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


EVERY = pytest.mark.parametrize("level", [c.LEVEL_TOKEN, c.LEVEL_SEQUENCE, c.LEVEL_SEQUENCE_TOKEN])
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@EVERY
@DTYPES
def test_any_number_of_threads(kernels: Any, level: int, dtype: Any) -> None:
    plan, batch = example(level, dtype)
    alone = run(kernels, plan, batch)
    for n in (2, 3, 7):
        same(run(kernels, plan, batch, n), alone)


@EVERY
@DTYPES
def test_any_place_in_the_buffer(kernels: Any, level: int, dtype: Any) -> None:
    plan, batch = example(level, dtype)
    grad, stats = run(kernels, plan, batch)
    for shift in range(1, 18):
        moved = {"start": batch.start + shift, "stop": batch.stop + shift}
        for name in ("logp", "old_logp", "ref_logp", "mask", "token_weight", "token_advantages"):
            array = getattr(batch, name)
            if array is not None:
                moved[name] = np.concatenate([np.zeros(shift, array.dtype), array])
        same(run(kernels, plan, batch._replace(**moved)), (np.concatenate([np.zeros(shift, grad.dtype), grad]), stats))


@EVERY
@DTYPES
def test_any_order_of_completions(kernels: Any, level: int, dtype: Any) -> None:
    plan, batch = example(level, dtype)
    batch = batch._replace(step_advantages=None, step_offsets=None, step_ends=None)
    grad, stats = run(kernels, plan, batch)
    order = np.random.default_rng(0).permutation(len(LENGTHS))
    per_completion = ("start", "stop", "completion_weight", "advantages", "weights")
    permuted = {name: a[order] for name in per_completion if (a := getattr(batch, name)) is not None}
    same(run(kernels, plan, batch._replace(**permuted), 2), (grad, stats[order]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_works(kernels: Any) -> None:
    plan, batch = example()
    want = run(kernels, plan, batch, 2)  # the parent has threads by now
    child = os.fork()
    if child == 0:
        try:
            same(run(kernels, plan, batch, 2), want)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_concurrent_calls(kernels: Any) -> None:
    examples = [example(seed=seed) for seed in range(4)]
    want = [run(kernels, *e) for e in examples]
    got: list[Any] = [None] * len(examples)

    def call(k: int) -> None:
        for _ in range(5):
            got[k] = run(kernels, *examples[k], 2)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(examples))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for left, right in zip(got, want, strict=True):
        same(left, right)


def test_run_shares_the_work_and_cancels_the_late() -> None:
    todo, done = iter(range(1000)), []

    def worker() -> None:
        for k in todo:
            done.append(k)

    _threads.run(worker, 4)
    assert sorted(done) == list(range(1000))


def test_run_raises_what_a_worker_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        _threads.run(lambda: 1 // 0, 3)


def test_run_waits_for_helpers_that_have_begun() -> None:
    begun, ended = threading.Barrier(2), []

    def worker() -> None:
        begun.wait(10)
        ended.append(threading.get_ident())

    _threads.run(worker, 2)
    assert len(set(ended)) == 2


def test_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "available", lambda: 8)
    assert [_threads.choose(n) for n in (0, 16383, 16384, 10**9)] == [1, 1, 2, 8]
    assert _threads.choose(0, 5) == 5
    assert _threads.choose(0, -1) == 8
    _threads.set_num_threads(3)
    assert _threads.choose(10**9) == _threads.choose(0, -1) == 3
    for wrong in (0, -2):
        with pytest.raises(ValueError, match=f"n_threads: expected a positive integer or -1, got {wrong}; "):
            _threads.choose(1, wrong)
    with pytest.raises(TypeError):
        _threads.choose(1, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("many", [2**31, 2**63, 10**30])
def test_more_threads_than_there_can_be(many: int, backend: str) -> None:
    logp, offsets = np.full(40_000, -1.0), np.arange(0, 40_001, 20_000)
    got = gf.grpo_loss(logp, logp, None, [1.0, -1.0], offsets, n_threads=many, backend=backend)
    assert got.loss == gf.grpo_loss(logp, logp, None, [1.0, -1.0], offsets, n_threads=1, backend=backend).loss


def test_true_is_no_number_of_threads(backend: str) -> None:
    with pytest.raises(TypeError, match="n_threads: expected a positive integer or -1, got True; "):
        gf.grpo_loss([-1.0], None, None, [1.0], [0, 1], n_threads=True, backend=backend)
    with pytest.raises(TypeError, match=r"^n: expected a positive integer or -1, got True; "):
        gf.set_num_threads(True)


def test_available_respects_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GRPO_FAST_NUM_THREADS", raising=False)
    cpus = _threads.available()
    assert 1 <= cpus <= (os.cpu_count() or 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert _threads.available() == 1
    for ignored in ("", "0", "-3", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", ignored)
        assert _threads.available() == cpus
    monkeypatch.setenv("GRPO_FAST_NUM_THREADS", "1")
    assert _threads.available() == 1
