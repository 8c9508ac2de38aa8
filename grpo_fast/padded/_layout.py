"""What padded arrays have in common: completions in the leading dimensions, tokens in the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _validate as check
from ..losses import Ranges


def flatten(name: str, values: npt.ArrayLike, shape: tuple[int, ...], other: str = "logp") -> npt.NDArray[Any]:
    """One dimension, contiguous; another shape is refused by the name of what it must go with."""
    array = check.any_array(name, values)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape} to go with {other}, got {array.shape}; reshape or slice it")
    return np.ascontiguousarray(array.reshape(-1))


def flat_output(grad_out: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    wrong = (
        type(grad_out).__name__
        if not isinstance(grad_out, np.ndarray)
        else f"shape {grad_out.shape}"
        if grad_out.shape != shape
        else None
        if grad_out.flags.c_contiguous
        else "one in Fortran order"
        if grad_out.flags.f_contiguous
        else "one with strides"
    )
    if wrong is not None:
        raise ValueError(
            f"grad_out: expected an array of shape {shape}, contiguous in C order, got {wrong}; "
            "pass np.empty_like(logp, order='C')"
        )
    return grad_out.reshape(-1)


def row_ranges(
    mask: npt.NDArray[np.uint8] | None, shape: tuple[int, ...]
) -> tuple[Ranges, npt.NDArray[np.uint8] | None]:
    """From the first to the last counted slot of every row, and the mask where there are holes between them."""
    width = shape[-1]
    n = int(np.prod(shape[:-1]))
    first = np.arange(n, dtype=np.int64) * width
    if mask is None or mask.size == 0:
        return Ranges(first, first + width, n * width, packed=True, width=width), mask
    rows = mask.reshape(n, width) != 0
    counts = np.count_nonzero(rows, axis=1)
    start = first + np.where(counts > 0, rows.argmax(axis=1), 0)
    stop = np.where(counts > 0, first + width - rows[:, ::-1].argmax(axis=1), start)
    holes = bool((stop - start != counts).any())
    return Ranges(start, stop, n * width, packed=False, width=width), mask if holes else None
