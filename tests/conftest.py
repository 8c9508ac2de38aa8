"""Fixtures that several tests share."""

from __future__ import annotations

import pytest

from grpo_fast import _backends


@pytest.fixture(scope="session", params=_backends.NAMES)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend by name, skipped with the reason where it cannot run."""
    name: str = request.param
    reason = _backends.why_not(name)
    if reason is not None and name != "numpy":  # the oracle always runs
        pytest.skip(f"{name}: {reason}")
    return name
