"""Arrow lists are CSR: list columns as values and offsets, without a copy where the layout allows it.

Importing this module imports pyarrow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _validate as check
from ._contract import Int

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError:
    raise ImportError("reading and writing files needs pyarrow; pip install 'grpo-fast[cli]'") from None

__all__ = [
    "LARGEST_LIST",
    "Bool",
    "Ragged",
    "flat_items",
    "is_list",
    "list_array",
    "list_lengths",
    "numbers",
    "offsets_of",
    "pa",
    "pc",
    "ragged",
]

Bool = npt.NDArray[np.bool_]

#: Items beyond which a list needs 64-bit offsets.
LARGEST_LIST = 2**31 - 1


class Ragged(NamedTuple):
    """A list column of numbers: row i holds ``values[offsets[i]:offsets[i + 1]]``, and ``offsets[0]`` is 0.

    Rows that are null are empty, whatever their slots hold, and marked in ``null_rows`` (n_rows,).
    Items that are null are NaN among floats and 0 among others, and marked in ``null_items``
    (n_items,), which is None where there are none.
    """

    values: npt.NDArray[Any]
    offsets: Int
    null_rows: Bool
    null_items: Bool | None

    @property
    def lengths(self) -> Int:
        """Items of each row."""
        return np.diff(self.offsets)

    def row_of(self, item: int) -> int:
        """The row that holds ``values[item]``."""
        return int(np.searchsorted(self.offsets, item, side="right")) - 1

    def floats(self) -> npt.NDArray[Any]:
        """The values as floats (integers and bools as float64), NaN where an item is null."""
        if self.values.dtype.kind == "f":
            return self.values
        return _with_nan(self.values, self.null_items)


def ragged(column: Any, name: str) -> Ragged:
    """A list column of numbers as values and offsets.

    Parameters
    ----------
    column : pyarrow Array or ChunkedArray
        list, large_list, fixed_size_list, list_view or large_list_view, sliced or not, of integers,
        floats, bools, decimals or ``struct<..., logprob>``; extension types by their storage.
    name : what errors call it

    Returns
    -------
    Ragged
        A read-only view of the column's memory where that is one chunk without null items and
        without null rows that own items, and its items are not bools; else a copy.

    Raises
    ------
    TypeError
        Not a list, or not of numbers; names the type that was found.
    """
    parts, lengths, null_rows = [], [], []
    for chunk in _chunks(column):
        layout = _layout(chunk, name)
        parts.append(_numbers(layout.items, name))
        lengths.append(layout.lengths)
        null_rows.append(layout.null_rows)
    nulls = None
    if any(mask is not None for _, mask in parts):
        nulls = _join([np.zeros(len(values), np.bool_) if mask is None else mask for values, mask in parts])
    return Ragged(_join([values for values, _ in parts]), offsets_of(_join(lengths)), _join(null_rows), nulls)


def flat_items(column: Any, name: str) -> Any:
    """The items of a list column of any type, row after row, as a pyarrow ChunkedArray."""
    items = [_layout(chunk, name).items for chunk in _chunks(column)]
    return pa.chunked_array(items)


def list_lengths(column: Any, name: str) -> tuple[Int, Bool]:
    """(items of each row, which rows are null): null rows have none. Raises TypeError where it is not a list."""
    layouts = [_layout(chunk, name, items=False) for chunk in _chunks(column)]
    return _join([layout.lengths for layout in layouts]), _join([layout.null_rows for layout in layouts])


def numbers(column: Any, name: str) -> npt.NDArray[Any]:
    """A column of numbers as NumPy; where there are nulls, integers and bools become float64, and nulls NaN.

    Raises
    ------
    TypeError
        Not numbers; names the type that was found.
    """
    parts = [_numbers(chunk, name) for chunk in _chunks(column)]
    if all(mask is None for _, mask in parts):
        return _join([values for values, _ in parts])
    return _join([values if values.dtype.kind == "f" else _with_nan(values, mask) for values, mask in parts])


def list_array(values: npt.NDArray[Any], offsets: Int) -> Any:
    """A pyarrow list array over ``values``, with 64-bit offsets (large_list) only where 32 bits do not do."""
    first, last = int(offsets[0]), int(offsets[-1])
    items = pa.array(values[first:last].astype(np.float32) if values.dtype.name == "bfloat16" else values[first:last])
    if last - first > LARGEST_LIST:
        return pa.LargeListArray.from_arrays(pa.array(offsets - first, pa.int64()), items)
    return pa.ListArray.from_arrays(pa.array(offsets - first, pa.int32()), items)


def offsets_of(lengths: Int) -> Int:
    """The offsets, from 0, of rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of the lists that :func:`ragged` takes."""
    kind = _storage_type(kind)
    tests = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


# ---- one chunk ---------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    items: Any  # pyarrow Array: the items of all rows, row after row, nothing else
    lengths: Int  # of each row, 0 where it is null
    null_rows: Bool


def _layout(chunk: Any, name: str, items: bool = True) -> _Layout:
    """Where the items of each row are; ``items=False`` leaves out collecting them."""
    chunk = _storage(chunk)
    kind = chunk.type
    null_rows = chunk.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_null(kind):
        return _Layout(pa.nulls(0), np.zeros(len(chunk), np.int64), null_rows)
    if not is_list(kind):
        raise TypeError(f"{name}: expected a list column, got {kind}; name another column")
    if len(chunk) == 0:
        return _Layout(pa.array([], kind.value_type), np.zeros(0, np.int64), null_rows)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        chunk.validate(full=True)
        lengths = np.where(null_rows, 0, chunk.sizes.to_numpy().astype(np.int64))
        return _Layout(chunk.flatten() if items else None, lengths, null_rows)  # in any order, it may overlap
    if pa.types.is_fixed_size_list(kind):
        first = chunk.offset * kind.list_size  # of a slice: .values is the whole child
        lengths = np.full(len(chunk), kind.list_size)
    else:
        bounds = check.offsets(name, chunk.offsets.to_numpy(), len(chunk.values))
        first = int(bounds[0])
        lengths = np.diff(bounds)
    child: Any = chunk.values.slice(first, int(lengths.sum())) if items else None
    if (lengths[null_rows] > 0).any():
        child = child.filter(pa.array(np.repeat(~null_rows, lengths))) if items else None
        lengths = np.where(null_rows, 0, lengths)
    return _Layout(child, lengths, null_rows)


def _numbers(items: Any, name: str) -> tuple[npt.NDArray[Any], Bool | None]:
    """(values, which of them are null, None where none is)."""
    items = _plain(items, name)
    nulls = items.is_null().to_numpy(zero_copy_only=False) if items.null_count else None
    if pa.types.is_null(items.type):
        return np.full(len(items), np.nan), nulls
    if nulls is None:
        return items.to_numpy(zero_copy_only=False), None
    filled = pa.Array.from_buffers(items.type, len(items), [None, items.buffers()[1]], offset=items.offset)
    values = filled.to_numpy(zero_copy_only=False).copy()
    values[nulls] = np.nan if values.dtype.kind == "f" else 0
    return values, nulls


def _plain(items: Any, name: str) -> Any:
    """Of a type NumPy has: dictionaries decoded, decimals as float64, the log-probs of a list of structs."""
    items = _storage(items)
    kind = items.type
    if pa.types.is_dictionary(kind):
        return _plain(items.dictionary_decode(), name)
    if pa.types.is_struct(kind) and kind.get_field_index("logprob") >= 0:
        return _plain(pc.struct_field(items, "logprob"), name)
    if pa.types.is_decimal(kind):
        return items.cast(pa.float64())
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    if not any(test(kind) for test in known):
        raise TypeError(f"{name}: expected numbers, got {kind}; name another column or convert it")
    return items


def _storage(chunk: Any) -> Any:
    return _storage(chunk.storage) if isinstance(chunk, pa.ExtensionArray) else chunk


def _storage_type(kind: Any) -> Any:
    return _storage_type(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def _chunks(column: Any) -> list[Any]:
    """At least one, so that there is a dtype."""
    return getattr(column, "chunks", [column]) or [pa.array([], column.type)]


def _join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _with_nan(values: npt.NDArray[Any], nulls: Bool | None) -> npt.NDArray[np.float64]:
    floats = values.astype(np.float64)
    if nulls is not None:
        floats[nulls] = np.nan
    return floats
