"""The benchmark suite: ``pytest bench --benchmark-enable``; every result is checked before it is timed."""

from __future__ import annotations

from typing import Any

import pytest
from contenders import CONTENDERS, check, expectation
from workloads import SHAPES, make


@pytest.fixture(scope="module", params=[name for name in SHAPES if name != "M2"])
def case(request: pytest.FixtureRequest) -> Any:
    work = make(request.param)
    return work, expectation(work)


@pytest.mark.parametrize("name", CONTENDERS)
def test_loss_gradient_and_metrics(case: Any, name: str, benchmark: Any) -> None:
    work, expected = case
    prepared = CONTENDERS[name](work)
    if prepared is None:
        pytest.skip("not available on this machine")
    check(work, prepared, expected)
    benchmark.group = f"{work.name}: {work.tokens} tokens, fill {work.fill:.2f}"
    benchmark.extra_info["tokens"] = work.tokens
    benchmark(prepared[0])
