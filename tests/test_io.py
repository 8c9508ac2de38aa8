"""Files and columns: every layout an Arrow list may have, every file that is not one, roles and their aliases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import grpo_fast as gf

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from grpo_fast import arrow, io  # noqa: E402  (needs pyarrow)

ROWS = [[1.0, 2.0], [], [3.0, 4.0, 5.0], [6.0]]
DTYPES = {pa.from_numpy_dtype(t): np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i4", "u2", "?")}
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def rows_of(lists: io.Ragged) -> list[list[float]]:
    return [lists.values[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# ---- layouts of lists (formats.md D) -----------------------------------------------------------------


@pytest.mark.parametrize("list_of", LISTS)
@pytest.mark.parametrize("child", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int32(), pa.uint16()])
def test_lists_of_every_kind_and_child(list_of, child):
    lists = io.ragged(pa.array(ROWS, list_of(child)), "x")
    assert rows_of(lists) == ROWS
    assert lists.offsets.dtype == np.int64 and lists.offsets[0] == 0
    assert lists.values.dtype == DTYPES[child]
    assert lists.null_items is None and not lists.null_rows.any()


@pytest.mark.parametrize("list_of", LISTS)
def test_a_slice_sees_its_own_items(list_of):  # D1: .values of a slice is the whole child
    whole = pa.array([*ROWS, [7.0, 8.0], [9.0]], list_of(pa.float32()))
    assert rows_of(io.ragged(whole.slice(2, 3), "x")) == [[3.0, 4.0, 5.0], [6.0], [7.0, 8.0]]
    assert rows_of(io.ragged(pa.table({"x": whole}).slice(3)["x"], "x")) == [[6.0], [7.0, 8.0], [9.0]]


def test_null_slots_that_own_items_are_empty():  # D2
    values = pa.array(np.arange(6.0))
    owning = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), values, mask=pa.array([False, True, False]))
    assert len(owning.values) == 6, "the case is what it says"
    lists = io.ragged(owning, "x")
    assert rows_of(lists) == [[0, 1], [], [4, 5]]
    assert lists.null_rows.tolist() == [False, True, False]
    lengths, null_rows = arrow.list_lengths(owning, "x")
    assert lengths.tolist() == [2, 0, 2] and null_rows.tolist() == [False, True, False]
    assert rows_of(io.ragged(owning.slice(1), "x")) == [[], [4, 5]]
    assert arrow.flat_items(owning, "x").to_pylist() == [0, 1, 4, 5]


def test_lengths_are_compared_by_row_not_by_offsets():  # D2: equal lengths, different offsets
    ends = pa.ListArray.from_arrays(
        pa.array([0, 1, 3, 4], pa.int32()), pa.array([0, 9, 9, 0]), mask=pa.array([False, True, False])
    )
    rewards = pa.array([[1.0], None, [2.0]], pa.list_(pa.float32()))
    steps = io.read_steps(io.Source(pa.table({"step_ends": ends, "step_rewards": rewards})))
    assert (
        steps.rewards.tolist() == [1.0, 2.0]
        and steps.ends.tolist() == [0, 0]
        and steps.offsets.tolist() == [0, 1, 1, 2]
    )


def test_the_child_may_have_an_offset():  # D3
    child = pa.array(np.arange(10.0)).slice(4)
    assert child.offset == 4
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 5], pa.int32()), child)
    assert rows_of(io.ragged(lists, "x")) == [[4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("child", "fill"), [(pa.float16(), np.nan), (pa.float32(), np.nan), (pa.int32(), 0), (pa.bool_(), 0)]
)
def test_null_items_are_marked(child, fill):  # D4: the buffer holds anything there
    one = pa.scalar(1).cast(child).as_py()
    rows = pa.array([[one, None], None, [one]], pa.list_(child))
    lists = io.ragged(rows, "x")
    assert lists.null_items.tolist() == [False, True, False]
    np.testing.assert_array_equal(lists.values, np.array([1, fill, 1], DTYPES[child]))
    np.testing.assert_array_equal(lists.floats(), [1, np.nan, 1])
    assert lists.row_of(2) == 2
    later = io.ragged(pa.array([[5.0, 1.0], [2.0, None]], pa.list_(pa.float32())).slice(1), "x")
    np.testing.assert_array_equal(later.values, [2.0, np.nan])
    outside = pa.array([[None, 1.0], [2.0]], pa.list_(pa.float32())).slice(1)
    assert io.ragged(outside, "x").null_items is None, "nulls of other rows do not matter"


@pytest.mark.parametrize("list_of", LISTS)
def test_chunks_are_joined(list_of):  # D5
    kind = list_of(pa.float32())
    chunked = pa.chunked_array([pa.array(ROWS[:2], kind), pa.array([], kind), pa.array([None, *ROWS[2:]], kind)])
    lists = io.ragged(chunked, "x")
    assert rows_of(lists) == [*ROWS[:2], [], *ROWS[2:]]
    assert np.flatnonzero(lists.null_rows).tolist() == [2]
    mixed = pa.chunked_array([pa.array([[None]], kind), pa.array([[1.0]], kind)])
    assert io.ragged(mixed, "x").null_items.tolist() == [True, False]
    nothing = io.ragged(pa.chunked_array([], kind), "x")
    assert nothing.offsets.tolist() == [0] and nothing.values.dtype == np.float32


def test_more_items_than_int32_offsets_hold():  # D6: combine_chunks raises; here offsets are 64 bits from the start
    child = pa.array(np.zeros(2**20, np.int8))
    chunk = pa.ListArray.from_arrays(pa.array([0, 2**20], pa.int32()), child)
    column = pa.chunked_array([chunk] * 2049)  # 2^31 + 2^20 items in all, one MiB in memory
    lengths, _ = arrow.list_lengths(column, "x")
    assert arrow.offsets_of(lengths)[-1] == 2049 * 2**20 > 2**31


def test_lists_are_large_only_where_needed(monkeypatch):  # D6, on the way out
    offsets = np.array([2, 4, 5])
    values = np.arange(6.0)
    assert arrow.list_array(values, offsets).type == pa.list_(pa.float64())
    monkeypatch.setattr(arrow, "LARGEST_LIST", 3)
    assert arrow.list_array(values, offsets).type == pa.list_(pa.float64()), "it is the number of items that counts"
    monkeypatch.setattr(arrow, "LARGEST_LIST", 2)
    large = arrow.list_array(values, offsets)
    assert large.type == pa.large_list(pa.float64()) and large.to_pylist() == [[2.0, 3.0], [4.0]]


@pytest.mark.parametrize("store_schema", [True, False])
def test_large_lists_through_parquet(tmp_path, store_schema):  # D7: a foreign writer makes them lists
    pq.write_table(
        pa.table({"x": pa.array(ROWS, pa.large_list(pa.float32()))}), tmp_path / "x", store_schema=store_schema
    )
    table = io.read_table(tmp_path / "x")
    assert pa.types.is_large_list(table["x"].type) == store_schema
    assert rows_of(io.ragged(table["x"], "x")) == ROWS


def test_fixed_size_lists():  # D8: no offsets at all
    padded = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8.0)), 2, mask=pa.array([False, True, False, False]))
    lists = io.ragged(padded, "x")
    assert rows_of(lists) == [[0, 1], [], [4, 5], [6, 7]]
    assert rows_of(io.ragged(padded.slice(2, 1), "x")) == [[4, 5]]
    assert rows_of(io.ragged(padded.slice(1), "x")) == [[], [4, 5], [6, 7]]
    assert arrow.list_lengths(padded, "x")[0].tolist() == [2, 0, 2, 2]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6.0).reshape(3, 2))  # D12: an extension type
    assert rows_of(io.ragged(tensors, "x")) == [[0, 1], [2, 3], [4, 5]]


def test_list_views_in_any_order():  # D8: storage order is not row order, and ranges may overlap
    view = pa.ListViewArray.from_arrays(
        pa.array([4, 0, 2], pa.int32()), pa.array([2, 2, 3], pa.int32()), pa.array(np.arange(6.0)),
        mask=pa.array([False, True, False]),
    )  # fmt: skip
    assert rows_of(io.ragged(view, "x")) == [[4, 5], [], [2, 3, 4]]
    assert arrow.list_lengths(view, "x")[0].tolist() == [2, 0, 3]
    assert rows_of(io.ragged(view.slice(2), "x")) == [[2, 3, 4]]


def test_structs_with_a_logprob():  # D8
    rows = [[{"token": 5, "logprob": -0.5}, None], [{"token": 6, "logprob": None}], [{"token": 7, "logprob": -1.0}]]
    lists = io.ragged(pa.array(rows), "x")
    np.testing.assert_array_equal(lists.values, [-0.5, np.nan, np.nan, -1.0])
    assert lists.null_items.tolist() == [False, True, True, False]
    with pytest.raises(TypeError, match=r"^logp: expected numbers, got struct<token: int64>; name another column"):
        io.ragged(pa.array([[{"token": 5}]]), "logp")


def test_bools_are_unpacked_and_decimals_widened():  # D8
    assert rows_of(io.ragged(pa.array([[True, False], [True]]), "x")) == [[True, False], [True]]
    sliced = pa.array([[True], [False, True]]).slice(1)
    assert rows_of(io.ragged(sliced, "x")) == [[False, True]]
    decimals = pa.array([[1, 2]], pa.list_(pa.decimal128(10, 2)))
    assert rows_of(io.ragged(decimals, "x")) == [[1.0, 2.0]]
    encoded = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), pa.array([0.5, 1.5, 0.5]).dictionary_encode())
    assert rows_of(io.ragged(encoded, "x")) == [[0.5, 1.5, 0.5]]


def test_untyped_columns():  # all rows null or empty: JSON and pandas know no type
    assert rows_of(io.ragged(pa.nulls(2), "x")) == [[], []]
    lists = io.ragged(pa.array([[], [None]]), "x")
    assert lists.lengths.tolist() == [0, 1] and lists.null_items.tolist() == [True]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, 2]), r"^x: expected a list column, got int64; name another column"),
        (pa.array([["a"]]), r"^x: expected numbers, got string; "),
        (pa.array([[[1.0]]]), r"^x: expected numbers, got list<item: double>; "),
        (pa.array([{"a": [1]}]), r"^x: expected a list column, got struct"),
    ],
)
def test_other_columns_are_refused(column, message):
    with pytest.raises(TypeError, match=message):
        io.ragged(column, "x")


def test_no_copy_where_the_layout_allows_it():  # D9, D10
    values = np.arange(10, dtype=np.float32)
    for make, kind in ((pa.ListArray, pa.int32()), (pa.LargeListArray, pa.int64())):
        rows = make.from_arrays(pa.array([0, 4, 4, 10], kind), pa.array(values))
        assert address(io.ragged(rows, "x").values) == address(values)
        assert address(io.ragged(rows.slice(1), "x").values) == address(values[4:])
        with_null = pa.array([[1.0], None, [2.0]], pa.list_(pa.float32()))
        assert address(io.ragged(with_null, "x").values) == with_null.values.buffers()[1].address
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(values), 5)
    assert address(io.ragged(fixed, "x").values) == address(values)
    assert not io.ragged(fixed, "x").values.flags.writeable


def test_damaged_offsets_are_noticed():
    outside = pa.Array.from_buffers(
        pa.list_(pa.float64()), 2, [None, pa.py_buffer(np.array([0, 9, 2], np.int32))], children=[pa.array([1.0, 2.0])]
    )
    with pytest.raises(ValueError, match=r"^x: must be non-decreasing, but x\[2\]=2 < x\[1\]=9"):
        io.ragged(outside, "x")


@pytest.mark.parametrize("backend", ["cython", "numba", "numpy"])
def test_read_only_views_go_through_every_backend(tmp_path, backend):
    if gf._backends.why_not(backend) is not None:
        pytest.skip(gf._backends.why_not(backend))
    logp = pa.array([[-1.0, -0.5], [-0.25]], pa.list_(pa.float32()))
    path = tmp_path / "x.arrow"
    io.write_table(pa.table({"logp": logp}), path)
    lists = io.ragged(io.read_table(path)["logp"], "logp")
    assert not lists.values.flags.writeable
    result = gf.grpo_loss(lists.values, None, None, [1.0, -1.0], lists.offsets, backend=backend)
    assert result.loss == 0.0 and result.grad.tolist() == [-0.25, -0.25, 0.5]


# ---- plain columns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, None, False]), [1, np.nan, 0]),
        (pa.array([1, None, 2], pa.int16()), [1, np.nan, 2]),
        (pa.array(np.float16([0.5, 7, np.nan]), mask=np.array([0, 1, 0], bool)), [0.5, np.nan, np.nan]),
        (pa.array([2, None], pa.decimal128(5, 1)), [2, np.nan]),
        (pa.array([0.5, 1.0, 0.5, None]).dictionary_encode(), [0.5, 1.0, 0.5, np.nan]),
        (pa.nulls(2), [np.nan, np.nan]),
        (pa.chunked_array([[1], [None], [3]], pa.int64()), [1, np.nan, 3]),
    ],
)
def test_numbers(column, expected):
    np.testing.assert_array_equal(arrow.numbers(column, "x"), expected)


# ---- files -------------------------------------------------------------------------------------------


def write(path: Path, table, form: str = "parquet", **options) -> Path:
    if form == "parquet":
        pq.write_table(table, path, **options)
    else:
        make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        settings = pa.ipc.IpcWriteOptions(**options)
        with make(str(path), table.schema, options=settings) as writer:
            writer.write_table(table)
    return path


def small(**columns):
    return pa.table({"prompt_id": [0, 0], "reward": [1.0, 0.0], **columns})


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("parquet", {}),
        ("parquet", {"row_group_size": 1}),
        ("file", {}),
        ("file", {"compression": "lz4"}),
        ("stream", {}),
        ("stream", {"compression": "zstd"}),
    ],
)
def test_formats_are_told_by_content(tmp_path, form, options):
    path = write(tmp_path / "no suffix says it.txt", small(x=pa.array([[1.0], [2.0]])), form, **options)
    assert io.read_table(path).to_pydict() == small(x=[[1.0], [2.0]]).to_pydict()
    assert io.read_table([str(path)]).num_rows == 2


def test_uncompressed_ipc_is_mapped(tmp_path):
    path = write(tmp_path / "x.arrow", small(), "file")
    before = pa.total_allocated_bytes()
    table = io.read_table(path)
    assert pa.total_allocated_bytes() == before
    path.unlink()
    assert table["reward"].to_pylist() == [1.0, 0.0]


def test_a_directory_like_name_adds_no_column(tmp_path):
    (tmp_path / "step=3").mkdir()
    path = write(tmp_path / "step=3" / "x.parquet", small())
    assert io.read_table(path).column_names == ["prompt_id", "reward"]


def test_files_are_unified(tmp_path):
    a = write(
        tmp_path / "a",
        pa.table({"id": pa.array([1], pa.int32()), "x": pa.array([[1.0]], pa.list_(pa.float32())), "n": pa.nulls(1)}),
    )
    b = write(
        tmp_path / "b",
        pa.table(
            {"n": ["s"], "x": pa.array([[2.0]], pa.large_list(pa.float64())), "id": pa.array([2**40], pa.int64())}
        ),
        "stream",
    )
    source = io.read_source([a, b])
    assert source.table.to_pydict() == {"id": [1, 2**40], "x": [[1.0], [2.0]], "n": [None, "s"]}
    assert source.at(0) == f"row 0 of {a}" and source.at(1) == f"row 0 of {b}"
    assert io.Source(source.table).at(1) == "row 1"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"id": ["1"], "x": [1.0]}, r"^IN: column 'id' is string in .*/b but int64 before it; convert one of them"),
        ({"id": [1]}, r"^IN: column 'x' is in .*/a but not in .*/b; give both files the same columns"),
        ({"id": [1], "x": [1.0], "y": [1]}, r"^IN: column 'y' is in .*/b but not in .*/a; give both"),
        ({"id": [2**60 + 1], "x": [1.0]}, None),
    ],
)
def test_files_that_do_not_go_together(tmp_path, second, message):
    a = write(tmp_path / "a", pa.table({"id": [1], "x": [1.0]}))
    b = write(tmp_path / "b", pa.table(second))
    if message is None:
        assert io.read_table([a, b])["id"].to_pylist() == [1, 2**60 + 1]
        c = write(tmp_path / "c", pa.table({"id": [1.5], "x": [1.0]}))
        message, b = r"^IN: the files do not go together \(Integer value .*\); convert", [b, c]
        with pytest.raises(ValueError, match=message):
            io.read_table([a, *b])
        return
    with pytest.raises(ValueError, match=message):
        io.read_table([a, b])


def test_columns_of_one_name(tmp_path):
    double = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"])
    a, b = write(tmp_path / "a", double, "file"), write(tmp_path / "b", double, "stream")
    with pytest.raises(ValueError, match=r"^IN: 2 columns of .*/a are called 'id'; rename all but one"):
        io.read_table([a, b])
    with pytest.raises(ValueError, match=r"^IN: 2 columns of .*/a are called 'id'; rename all but one"):
        io.read_table(a)
    twice = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["reward", "reward"])
    with pytest.raises(ValueError, match=r"^reward: 2 columns are called 'reward'; rename all but one"):
        io.read_rewards(io.Source(twice))


def cut(path: Path, keep: int) -> Path:
    path.write_bytes(path.read_bytes()[:keep])
    return path


@pytest.mark.parametrize(
    ("form", "kind"), [("parquet", "Parquet file"), ("file", "Arrow IPC file"), ("stream", "Arrow IPC stream")]
)
def test_truncated_files(tmp_path, form, kind):
    whole = write(tmp_path / "x", pa.table({"a": np.arange(1000)}), form).read_bytes()
    for keep in (*range(8, len(whole), len(whole) // 25), len(whole) - 8, len(whole) - 1):
        path = tmp_path / f"{keep}"
        path.write_bytes(whole[:keep])
        with pytest.raises(
            ValueError, match=rf"^IN: .*/{keep} is not a complete {kind} \(.+\); it is truncated or damaged, "
        ):
            io.read_table(path)


def test_a_stream_without_its_end_is_truncated(tmp_path):  # cut between two batches it looks whole
    table = pa.table({"a": np.arange(1000)})
    path = tmp_path / "x"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table.slice(0, 500))
        size = path.stat().st_size
        writer.write_table(table.slice(500))
    assert pa.ipc.open_stream(path.read_bytes()[:size]).read_all().num_rows in (0, 500)
    with pytest.raises(ValueError, match=r"no end-of-stream mark, so rows may be missing\); it is truncated"):
        io.read_table(cut(path, path.stat().st_size - 8))


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "is empty"), (b'{"reward": 1}\n', r"begins with b'\{\"reward"), (b"PK\x03\x04", "begins with b'PK")],
)
def test_foreign_files(tmp_path, content, what):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^IN: .*x.parquet is neither Parquet nor Arrow IPC, it {what}.*; convert"):
        io.read_table(path)


def test_damaged_ipc_is_an_error_and_not_a_crash(tmp_path):
    table = pa.table({"prompt_id": ["a", "b"], "x": pa.array([[1.0], [2.0]])})
    path = write(tmp_path / "x", table, "file")
    raw = bytearray(path.read_bytes())
    at = raw.index(np.array([0, 1, 2], np.int32).tobytes())
    raw[at + 4 : at + 8] = np.array([2**30], np.int32).tobytes()
    path.write_bytes(raw)
    with pytest.raises(
        ValueError, match=r"^IN: .*/x is not a complete Arrow IPC file \(.*\); it is truncated or damaged"
    ):
        io.read_table(path)


def test_missing_files_directories_and_repeats(tmp_path):
    with pytest.raises(ValueError, match=r"^IN: no file is given; name at least one"):
        io.read_table([])
    with pytest.raises(ValueError, match=r"^IN: .*/nowhere does not exist; check the name"):
        io.read_table(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^IN: .* is a directory; name Parquet or Arrow IPC files"):
        io.read_table(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^IN: .*/pipe is not a regular file; name"):
        io.read_table(tmp_path / "pipe")
    path = write(tmp_path / "x", small())
    os.symlink(path, tmp_path / "y")
    with pytest.raises(ValueError, match=r"^IN: .*/y is given twice, its rows would count twice; leave one out"):
        io.read_table([path, tmp_path / "y"])


def test_without_pyarrow():
    code = "import sys; sys.modules['pyarrow'] = None; import grpo_fast.io"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: reading and writing files needs pyarrow; pip install 'grpo-fast[cli]'"
    )


# ---- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".ipc", ".PARQUET"])
def test_round_trip(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(io, "ROW_GROUP_BYTES", 40)  # several row groups
    halves = pa.large_list(pa.field("element", pa.float16()))  # Parquet's name for it
    table = small(x=pa.array([[1.0], []], halves), s=pa.array(["a", "b"]).dictionary_encode())
    table = table.replace_schema_metadata({"source": "here"})
    path = io.write_table(table, tmp_path / f"x{suffix}")
    assert io.read_table(path).equals(table, check_metadata=True)
    assert os.listdir(tmp_path) == [f"x{suffix}"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_empty_tables(tmp_path, suffix):
    path = io.write_table(small().slice(0, 0), tmp_path / f"x{suffix}")
    assert io.read_table(path).num_rows == 0


def test_chunks_with_dictionaries_of_their_own(tmp_path):  # the IPC file format has one per column
    column = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", "c"]).dictionary_encode()])
    path = io.write_table(pa.table({"s": column}), tmp_path / "x.arrow")
    assert io.read_table(path)["s"].to_pylist() == ["a", "b", "b", "c"]


def test_types_a_format_does_not_have(tmp_path):
    table = pa.table({"x": pa.array([None], pa.month_day_nano_interval())})
    with pytest.raises(
        ValueError, match=r"^OUT: .*x.parquet cannot hold these columns \(.*month_day_nano.*\); try another"
    ):
        io.write_table(table, tmp_path / "x.parquet")
    assert os.listdir(tmp_path) == []
    assert io.write_table(table, tmp_path / "x.arrow").exists()


def test_what_is_not_overwritten(tmp_path):
    path = io.write_table(small(), tmp_path / "x.parquet")
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=r"^OUT: .*x.parquet already exists; pass overwrite=True or another"):
        io.write_table(small(y=[1, 2]), path)
    os.link(path, tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"^OUT: .*y.parquet is the input .*x.parquet itself; write to another name"):
        io.write_table(small(y=[1, 2]), tmp_path / "y.parquet", overwrite=True, inputs=[path])
    assert path.read_bytes() == kept
    io.write_table(small(y=[1, 2]), path, overwrite=True)
    assert "y" in io.read_table(path).column_names
    with pytest.raises(ValueError, match=r"^OUT: .* is a directory; add a file name such as .*d.parquet/out.parquet"):
        (tmp_path / "d.parquet").mkdir()
        io.write_table(small(), tmp_path / "d.parquet")


def test_a_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    write_parts = io._write
    monkeypatch.setattr(io, "_write", lambda *arguments: (write_parts(*arguments), path.write_text("theirs")))
    with pytest.raises(ValueError, match="already exists"):
        io.write_table(small(), path)
    assert path.read_text() == "theirs" and os.listdir(tmp_path) == ["x.parquet"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_nothing_half_written(tmp_path, monkeypatch, error):
    def fail(table, path, suffix, progress):
        path.write_text("half")
        raise error

    monkeypatch.setattr(io, "_write", fail)
    with pytest.raises(type(error)) as caught:
        io.write_table(small(), tmp_path / "x.parquet")
    assert os.listdir(tmp_path) == []
    if isinstance(error, OSError):
        expected = (
            f"OUT: {tmp_path}/x.parquet cannot be written (No space left on device); make room or write somewhere else"
        )
        assert str(caught.value) == expected


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"^OUT: the directory .*/nowhere does not exist; create it or write somewhere"
    ):
        io.write_table(small(), tmp_path / "nowhere" / "x.parquet")
    with pytest.raises(ValueError, match=r"^OUT: unknown suffix '.csv' of .*x.csv; supported are .parquet, .arrow"):
        io.write_table(small(), tmp_path / "x.csv")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"^OUT: the directory .* is not writable; write somewhere else"):
        io.write_table(small(), tmp_path / "x.parquet")
    assert os.listdir(tmp_path) == []


# ---- roles -------------------------------------------------------------------------------------------


def source(columns, named: list[str] | None = None) -> io.Source:
    table = pa.table(columns)
    return io.Source(table, io.parse_columns(named or [], table.column_names))


ALIASES = [(role, alias) for role, aliases in io.ALIASES.items() for alias in aliases]


@pytest.mark.parametrize(("role", "alias"), ALIASES)
def test_every_alias(role, alias):
    value = [[1.0]] if role in io._LISTS else [1]
    assert source({"other": [0], alias: value}).names(role) == (alias,)


def test_aliases_in_order_and_of_a_fitting_type():
    assert source({"prompt": ["p"], "uid": ["u"], "policy": ["x"]}).names("group") == ("uid",)
    assert source({"tokens": [5], "response_ids": [[1]]}).names("token_ids") == ("response_ids",)
    assert source({"completion_ids": [5]}).names("token_ids") == ()
    assert source({"step": [[1, 2]]}).names("step") == ()
    assert source({"n_tokens": [1.5], "num_tokens": [2]}).names("n_tokens") == ("num_tokens",)
    assert source({"mask": pa.nulls(1)}).names("mask") == ("mask",)


def test_columns_by_name():
    table = {"a": [1], "b,c": [2], "d": [3]}
    assert source(table, ["group=a"]).names("group") == ("a",)
    assert source(table, ["group=a,d"]).names("group") == ("a", "d")
    assert source(table, ["group=b,c"]).names("group") == ("b,c",)
    assert source({"step": [1]}, ["step="]).names("step") == ()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["group"], r"^columns: expected role=name, got 'group'; roles are group, trajectory"),
        (["grup=a"], r"^columns: unknown 'grup'; did you mean 'group'\?"),
        (["group=a", "group=b"], r"^columns: group is given twice; join several columns with a comma"),
        (
            ["group=promt_id"],
            r"^group: there is no column 'promt_id'; did you mean 'prompt_id'\? the input has prompt_id",
        ),
        (["logp=prompt_id,reward"], r"^columns: logp=prompt_id,reward names 2 columns; it takes one"),
    ],
)
def test_wrong_names(named, message):
    with pytest.raises(ValueError, match=message):
        source({"prompt_id": [1], "reward": [1.0]}, named)


def test_a_missing_column_says_what_was_tried_and_what_there_is():
    with pytest.raises(ValueError) as caught:
        source({"group": [1], "points": [0.5]}).need("reward")
    assert str(caught.value) == (
        "reward: no column found, tried reward, rewards, score, scores, total_reward; the input has group (int64), "
        "points (double); name it with columns={'reward': 'NAME'}"
    )
    with pytest.raises(ValueError, match=r"the input has c0 \(int64\), .*c39 \(int64\) and 5 more; name it"):
        source({f"c{k}": [1] for k in range(45)}).need("reward")


# ---- groups ------------------------------------------------------------------------------------------


FAR = [2**62, 5, 2**62]


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(FAR, pa.timestamp("s")),
        pa.array(FAR, pa.timestamp("us", "Mars/Base")),
        pa.array(FAR, pa.duration("s")),
        pa.array([2**30, 5, 2**30], pa.date32()),
        pa.array(FAR, pa.timestamp("s")).dictionary_encode(),
        pa.chunked_array([], pa.timestamp("s")),
    ],
    ids=lambda ids: str(ids.type),
)
def test_times_that_python_has_no_datetime_for(ids):
    groups, _ = io.group_codes(source({"prompt_id": ids}))
    assert groups.codes.tolist() == [0, 1, 0][: len(ids)]
    steps = {"step_ends": [[0, 1, 2]], "step_rewards": [[1.0, 0.0, 0.5]]}
    if isinstance(ids, pa.Array):
        lists = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), ids)
        pools = io.read_steps(source({**steps, "step_groups": lists})).groups
        assert len(set(pools.to_pylist())) == 2


NOT_UTF8 = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"]).buffers())


@pytest.mark.parametrize(
    "ids",
    [
        NOT_UTF8,
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), NOT_UTF8),
        pa.StructArray.from_arrays([pa.array(FAR[:2], pa.timestamp("s"))], ["at"]),
        pa.StructArray.from_arrays([pa.array([0, 1], pa.timestamp("s", "Mars/Base"))], ["at"]),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_that_are_damaged(tmp_path, ids):
    damaged = [io.Source(pa.table({"prompt_id": ids}))]
    if ids.type == pa.string():
        pq.write_table(damaged[0].table, tmp_path / "in")
        damaged.append(io.read_source([tmp_path / "in"]))
    for given in damaged:
        with pytest.raises(ValueError, match=r"^group: column 'prompt_id' of type .* has a value that is none \("):
            io.group_codes(given)
    if ids.type == pa.string():
        lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), ids)
        steps = {"step_ends": [[0, 1]], "step_rewards": [[1.0, 0.0]], "step_groups": lists}
        with pytest.raises(ValueError, match=r"^step_groups: column 'step_groups' of type string has a value that is"):
            io.read_steps(source(steps))


@pytest.mark.parametrize(
    "ids",
    [
        [7, 7, 3, 7],
        ["07", "07", "7", "07"],
        pa.array(["b", "b", "a", "b"]).dictionary_encode(),
        pa.chunked_array([pa.array(["x", "x"]).dictionary_encode(), pa.array(["y", "x"]).dictionary_encode()]),
        [0.5, 0.5, 1.5, 0.5],
        [b"1", b"1", b"2", b"1"],
        [
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "b"}],
            [{"role": "user", "content": "a"}],
        ],
    ],
)
def test_ids_of_any_type(ids):
    groups, by = io.group_codes(source({"prompt": ids}))
    assert groups.codes.tolist() == [0, 0, 1, 0] and by == "prompt"


@pytest.mark.parametrize("ids", [["a", None], [1, None], [0.5, float("nan")], [["a"], None], pa.nulls(2)])
def test_a_null_id_is_named(ids):
    with pytest.raises(ValueError, match=r"^group: column 'uid' is null in row [01]; give that row an id or drop it"):
        io.group_codes(source({"uid": ids}))


def test_a_null_id_in_the_second_file(tmp_path):
    a, b = write(tmp_path / "a", pa.table({"uid": ["x"]})), write(tmp_path / "b", pa.table({"uid": ["y", None]}))
    with pytest.raises(ValueError, match=r"^group: column 'uid' is null in row 1 of .*/b; "):
        io.group_codes(io.read_source([a, b]))


def test_a_prompt_of_two_training_steps_is_two_groups():
    columns = {"prompt_id": ["a", "a", "a", "a"], "step": [1, 2, 1, 2]}
    groups, by = io.group_codes(source(columns))
    assert groups.codes.tolist() == [0, 1, 0, 1] and by == "step, prompt_id"
    assert io.group_codes(source(columns, ["step="]))[0].n_groups == 1
    with pytest.raises(ValueError, match=r"^step: column 'step' is null in row 1"):
        io.group_codes(source({"prompt_id": ["a", "a"], "step": [1, None]}))
    several = source({"task": [1, 1, 2], "n": [1, 2, 1]}, ["group=task,n"])
    assert io.group_codes(several)[0].codes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("names", "n_groups"),
    [
        (["step_1.parquet", "step_2.parquet"], 2),
        (["global_step-9.parquet", "global_step-10.parquet"], 2),
        (["1.parquet", "2.parquet"], 2),
        (["0000.parquet", "0001.parquet"], 1),
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], 1),
        (["step_1/rank_0.parquet", "step_1/rank_1.parquet", "step_2/rank_0.parquet"], 2),
        (["footstep1.parquet", "footstep2.parquet"], 1),
    ],
)
def test_files_numbered_as_steps(tmp_path, names, n_groups):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, pa.table({"prompt_id": ["a", "a"]}))
    paths = [tmp_path / name for name in names]
    groups, by = io.group_codes(io.read_source(paths))
    assert groups.n_groups == n_groups
    assert ("file name" in by) == (n_groups > 1)
    assert io.group_codes(io.read_source(paths, ["step="]))[0].n_groups == 1


def test_files_of_which_some_are_numbered(tmp_path):
    names = ("step_1.parquet", "step_2.parquet", "more.parquet")
    paths = [write(tmp_path / name, pa.table({"prompt_id": ["a"]})) for name in names]
    with pytest.raises(
        ValueError, match=r"^IN: .*step_1.parquet is numbered as a training step and .*more.parquet is not; "
    ):
        io.group_codes(io.read_source(paths))


# ---- rewards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "named", "expected"),
    [
        ({"reward": pa.array([1.0, None, np.nan], pa.float32())}, [], [1, np.nan, np.nan]),
        ({"score": [True, None, False]}, [], [1, np.nan, 0]),
        ({"rewards": [1, None, 3]}, [], [1, np.nan, 3]),
        ({"a": [1, 2, 3], "b": [0.5, None, 0.5]}, ["reward=a,b"], [[1, 0.5], [2, np.nan], [3, 0.5]]),
        ({"rewards": [{"fmt": 1, "acc": 0.5}, None, {"fmt": None, "acc": 1.0}]}, [],
         [[1, 0.5], [np.nan, np.nan], [np.nan, 1.0]]),
        ({"rewards": [[1.0, 2.0], None, [None, 3.0]]}, [], [[1, 2], [np.nan, np.nan], [np.nan, 3]]),
        ({"rewards": pa.array([[1.0], None, [2.0]], pa.list_(pa.float32(), 1))}, [], [1, np.nan, 2]),
        ({"rewards": pa.array([None, None], pa.list_(pa.float32()))}, [], [np.nan, np.nan]),
    ],
)  # fmt: skip
def test_rewards(columns, named, expected):
    order = ("acc", "fmt")
    rewards = io.read_rewards(source(columns, named))
    if "rewards" in columns and isinstance(columns["rewards"], list) and isinstance(columns["rewards"][0], dict):
        names = [entry.name for entry in pa.table(columns)["rewards"].type]
        assert sorted(names) == sorted(order)
        rewards = rewards[:, [names.index("fmt"), names.index("acc")]]
    np.testing.assert_array_equal(rewards, expected)


def test_dtypes_of_rewards():
    assert io.read_rewards(source({"reward": pa.array([1.0], pa.float32())})).dtype == np.float32
    assert io.read_rewards(source({"reward": pa.array([1], pa.int8())})).dtype == np.float64
    assert io.read_rewards(source({"reward": pa.array(np.float16([1.0]))})).dtype == np.float16


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward": ["good"]}, r"^reward: column 'reward': expected numbers, got string; "),
        ({"reward": [0.0, np.inf]}, r"^reward: column 'reward' is inf in row 1; clip it or drop that row"),
        ({"scores": [[0.0, 1.0], None, [1.0]]},
         r"^reward: column 'scores' has 2 rewards in row 0 but 1 in row 2; name a column with one reward per row"),
        ({"reward": [{}]}, r"^reward: column 'reward' has no fields"),
        ({"rewards": [{"acc": {"score": 1.0}}]}, r"^reward: column 'rewards': expected numbers, got struct<score"),
    ],
)  # fmt: skip
def test_rewards_that_are_none(columns, message):
    with pytest.raises((ValueError, TypeError), match=message):
        io.read_rewards(source(columns))


# ---- steps and tokens --------------------------------------------------------------------------------


def test_unscored_steps():
    columns = {"step_ends": [[0, 2], [1], []], "step_rewards": pa.array([[1, None], None, []], pa.list_(pa.int64()))}
    steps = io.read_steps(source(columns))
    np.testing.assert_array_equal(steps.rewards, [1, np.nan, np.nan])
    assert steps.offsets.tolist() == [0, 2, 3, 3] and steps.groups is None
    steps = io.read_steps(source({**columns, "step_groups": [["a", "b"], ["a"], []]}))
    assert steps.groups.to_pylist() == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_ends": [[0, None], [1]]}, r"^step_ends: column 'step_ends' has a null in row 0; give that step"),
        ({"step_rewards": [[1.0, 2.0], [1.0, 2.0]]},
         r"^step_rewards: column 'step_rewards' has 2 entries in row 1 where 'step_ends' has 1; cut them alike"),
        ({"step_ends": [[0, 1], None]},
         r"^step_rewards: column 'step_rewards' has 1 entries in row 1 where 'step_ends' is null; "),
        ({"step_groups": [[1], [1]]}, r"^step_groups: column 'step_groups' has 1 entries in row 0 where 'step_ends' "),
        ({"step_rewards": [["a", "b"], ["a"]]}, r"^step_rewards: column 'step_rewards': expected numbers, got string"),
        ({"step_ends": [3, 4]}, r"^step_ends: no list column found, tried step_ends; the input has step_ends \(int"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit(changed, message):
    columns = {"step_ends": [[0, 1], [1]], "step_rewards": [[1.0, 2.0], [1.0]], **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        io.read_steps(source(columns))


def test_token_lengths():
    columns = {"token_ids": [[1, 2], None, None], "logp": [[-1.0, -2.0], [-1.0], None], "n_tokens": [2, 1, None]}
    assert io.token_lengths(source(columns), strict=True).tolist() == [2, 1, 0]
    assert io.token_lengths(source({"reward": [1.0]}), strict=True) is None
    assert io.token_lengths(source({"mask": [[True]]}), strict=True).tolist() == [1]
    prompt_too = {"tokens": [[1, 2, 3]], "logprobs": [[-1.0]]}
    assert io.token_lengths(source(prompt_too), strict=False).tolist() == [3]
    assert io.token_lengths(source(prompt_too, ["token_ids="]), strict=True).tolist() == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [[1], [1, 2, 3]], "logprobs": [[-1.0], [-1.0]]},
         r"^old_logp: column 'logprobs' has 1 entries in row 1 where 'tokens' has 3; .* none with columns={'old_logp': ''}"),
        ({"token_ids": [[1], [1, 2]], "n_tokens": [1, 3]},
         r"^n_tokens: column 'n_tokens' has 3 entries in row 1 where 'token_ids' has 2; "),
        ({"n_tokens": [1, -3]}, r"^n_tokens: column 'n_tokens' is -3 in row 1; a count is at least 0"),
    ],
)  # fmt: skip
def test_token_lengths_that_disagree(columns, message):
    with pytest.raises(ValueError, match=message):
        io.token_lengths(source(columns), strict=True)


# ---- Rollouts ----------------------------------------------------------------------------------------


def test_rollouts_of_a_table():
    table = pa.table(
        {
            "uid": ["a", "b", "a"], "step": [1, 1, 1], "traj_id": [5, 6, 7], "score": [1.0, 0.0, 0.5],
            "response_ids": [[1, 2], [], [3]], "old_log_probs": [[-1.0, -2.0], [], [-3.0]],
            "rollout_log_probs": [[-1.5, -2.5], [], [-3.5]], "loss_mask": [[True, False], [], [True]],
            "step_ends": [[0, 1], [], [0]], "step_rewards": [[0.5, None], [], [1.0]],
            "step_groups": [["x", "y"], [], ["x"]],
        }
    )  # fmt: skip
    rollouts = gf.Rollouts.from_arrow(table)
    assert rollouts.lengths.tolist() == [2, 0, 1]
    assert rollouts.old_logp.tolist() == [-1, -2, -3] and rollouts.logp is None
    assert rollouts.sampling_logp.tolist() == [-1.5, -2.5, -3.5], "a second name of the same role plays the next"
    assert rollouts.mask.tolist() == [True, False, True]
    assert rollouts.groups().codes.tolist() == [0, 1, 0] and rollouts.trajectory_ids.tolist() == [0, 1, 2]
    assert rollouts.rewards.tolist() == [1.0, 0.0, 0.5]
    np.testing.assert_array_equal(rollouts.step_rewards, [0.5, np.nan, 1.0])
    assert rollouts.step_groups.tolist() == ["x", "y", "x"]
    again = gf.Rollouts.from_arrow(rollouts.to_arrow())
    assert again.token_ids.tolist() == [1, 2, 3] and again.trajectory_ids.tolist() == [0, 1, 2]


def test_one_column_plays_one_role():
    rollouts = gf.Rollouts.from_arrow(pa.table({"rollout_log_probs": [[-1.0]]}))
    assert rollouts.old_logp.tolist() == [-1.0] and rollouts.sampling_logp is None
    named = gf.Rollouts.from_arrow(pa.table({"rollout_log_probs": [[-1.0]]}), {"logp": "rollout_log_probs"})
    assert named.logp.tolist() == [-1.0] and named.old_logp is None


def test_null_log_probs_must_be_masked():
    columns = {"logp": [[-1.0], [-1.0, None]], "mask": [[1], [1, 0]]}
    rollouts = gf.Rollouts.from_arrow(pa.table(columns))
    assert np.isnan(rollouts.logp[2])
    assert np.isfinite(rollouts.loss([1.0, -1.0]).loss)
    with pytest.raises(ValueError, match=r"^logp: token 1 of row 1 is null; mask it with 0 or drop that row"):
        gf.Rollouts.from_arrow(pa.table({**columns, "mask": [[1], [1, 1]]}))
    with pytest.raises(ValueError, match=r"^mask: token 0 of row 0 is null"):
        gf.Rollouts.from_arrow(pa.table({"logp": [[-1.0]], "mask": pa.array([[None]], pa.list_(pa.int8()))}))


def test_rollouts_need_tokens_of_equal_lengths():
    with pytest.raises(ValueError, match=r"^logp: no list column found, tried logp, "):
        gf.Rollouts.from_arrow(pa.table({"reward": [1.0]}))
    with pytest.raises(
        ValueError,
        match=r"^ref_logp: column 'ref_logp' is null in row 1 where 'logp' has 1; .* with columns={'ref_logp': 'NAME'}, or none with columns={'ref_logp': ''}$",
    ):
        gf.Rollouts.from_arrow(pa.table({"logp": [[-1.0], [-1.0]], "ref_logp": [[-1.0], None]}))


def test_several_rewards_and_group_offsets_to_arrow():
    rollouts = gf.Rollouts(
        token_offsets=[0, 1, 2], logp=np.array([-1.0, -2.0]), rewards=[[1.0, 2.0], [3.0, 4.0]], group_offsets=[0, 2]
    )
    table = rollouts.to_arrow()
    assert table.to_pydict() == {"logp": [[-1.0], [-2.0]], "rewards": [[1.0, 2.0], [3.0, 4.0]], "group_ids": [0, 0]}
    assert gf.Rollouts.from_arrow(table).rewards.tolist() == [[1.0, 2.0], [3.0, 4.0]]
