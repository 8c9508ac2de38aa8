"""What a framework's function gives back, and the precision it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Result:
    """``value`` per completion, per token, or one number; ``grad`` per token, 0 on masked ones."""

    value: Any
    grad: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@contextmanager
def float64() -> Iterator[None]:
    """The frameworks' own constants in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
