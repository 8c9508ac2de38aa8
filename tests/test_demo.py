"""The packaged sample: what is in it, that it is what its script makes, and how it is copied."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from grpo_fast.demo import SUFFIXES, demo_file, write_demo

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "make_sample.py"
PER_TOKEN = ("token_ids", "logp", "old_logp", "ref_logp", "mask")


@pytest.fixture(scope="module")
def table():
    return pq.read_table(demo_file())


@pytest.fixture(scope="module")
def columns(table):
    return table.to_pydict()


def flat(table, name):
    return table[name].combine_chunks().flatten().to_numpy()


def test_schema_size_and_source(table):
    integers, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    expected = {
        "prompt_id": pa.string(),
        "sample_idx": pa.int32(),
        "prompt": pa.string(),
        "text": pa.string(),
        "token_ids": integers,
        "reward": pa.float32(),
        "step_ends": integers,
        "step_rewards": floats,
        "logp": floats,
        "old_logp": floats,
        "ref_logp": floats,
        "mask": pa.list_(pa.uint8()),
        "truncated": pa.bool_(),
    }
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == expected
    assert all(column.null_count == 0 for column in table.columns)
    assert demo_file().stat().st_size < 200 * 1024
    source = table.schema.metadata[b"grpo_fast.source"].decode()
    assert "make_sample.py --seed 0" in source and "aborted" in source


def test_lengths_agree(columns):
    lengths = np.array([len(tokens) for tokens in columns["token_ids"]])
    assert lengths.min() >= 1 and len(set(lengths)) > 5
    for name in PER_TOKEN:
        assert np.array_equal([len(values) for values in columns[name]], lengths), name
    assert [len(text) for text in columns["text"]] == lengths.tolist()
    steps = [len(ends) for ends in columns["step_ends"]]
    assert steps == [len(rewards) for rewards in columns["step_rewards"]]
    assert len(set(steps)) > 3
    for ends, length in zip(columns["step_ends"], lengths, strict=True):
        assert np.all(np.diff([-1, *ends, length]) >= 1)


def test_values(table, columns):
    for name in ("logp", "old_logp", "ref_logp"):
        values = flat(table, name)
        assert np.all(np.isfinite(values)) and np.all(values <= 0), name
    logp, old, ref = (flat(table, name) for name in ("logp", "old_logp", "ref_logp"))
    assert np.mean(logp != old) > 0.9 and np.mean(old != ref) > 0.9
    assert 0.01 < np.mean(np.abs(np.exp(logp - old) - 1) > 0.2) < 0.2, "some tokens are clipped"
    assert set(columns["reward"]) == {0.0, 1.0} and set(flat(table, "step_rewards")) == {0.0, 1.0}
    truncated = np.array(columns["truncated"])
    assert 0 < truncated.sum() < 0.1 * len(truncated)
    for cut, mask, text, reward in zip(truncated, columns["mask"], columns["text"], columns["reward"], strict=True):
        assert set(mask) == {0 if cut else 1}
        assert text.endswith(".") != cut
        assert not (cut and reward)


def test_groups(columns):
    ids = columns["prompt_id"]
    assert len(set(zip(ids, columns["sample_idx"], strict=True))) == len(ids)
    assert sum(a != b for a, b in itertools.pairwise(ids)) > len(set(ids)), "groups are not contiguous"
    groups = defaultdict(list)
    for prompt, reward in zip(ids, columns["reward"], strict=True):
        groups[prompt].append(reward)
    assert len(groups) == 64 and len({len(rewards) for rewards in groups.values()}) > 1
    constant = [rewards[0] for rewards in groups.values() if len(set(rewards)) == 1]
    assert set(constant) == {0.0, 1.0}
    assert len(constant) < 0.5 * len(groups)
    assert len(set(zip(ids, columns["prompt"], strict=True))) == len(groups), "one prompt per id"


def test_script_makes_this_file(table, tmp_path):
    out = tmp_path / "again.parquet"
    # Small matrices: a second BLAS thread only waits, badly so on a busy machine.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run([sys.executable, SCRIPT, "--out", out], check=True, env=environment)
    again = pq.read_table(out)
    assert again.schema.equals(table.schema, check_metadata=True)
    drifting = ("logp", "old_logp", "ref_logp")
    assert again.drop_columns(drifting).equals(table.drop_columns(drifting))
    for name in drifting:
        np.testing.assert_allclose(flat(again, name), flat(table, name), rtol=0, atol=1e-5)


def test_write_parquet_is_a_copy(tmp_path):
    out = write_demo(tmp_path / "demo.parquet")
    assert out.read_bytes() == demo_file().read_bytes()
    assert os.listdir(tmp_path) == ["demo.parquet"], "no temporary file is left"


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix != ".parquet"])
def test_write_arrow(tmp_path, table, suffix):
    out = write_demo(str(tmp_path / f"demo{suffix}"))
    with pa.ipc.open_file(out) as reader:
        assert reader.read_all().equals(table, check_metadata=True)
    assert os.listdir(tmp_path) == [f"demo{suffix}"]


def test_existing_file_is_kept(tmp_path):
    out = tmp_path / "demo.parquet"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"^OUT: .*demo\.parquet already exists; pass overwrite=True"):
        write_demo(out)
    assert out.read_text() == "mine"
    write_demo(out, overwrite=True)
    assert out.read_bytes() == demo_file().read_bytes()


def test_other_suffixes_and_missing_directories(tmp_path):
    with pytest.raises(ValueError, match=r"^OUT: unknown suffix '\.csv' .* \.parquet, \.arrow, \.feather, \.ipc"):
        write_demo(tmp_path / "demo.csv")
    with pytest.raises(ValueError, match=r"^OUT: the directory .*nowhere does not exist"):
        write_demo(tmp_path / "nowhere" / "demo.parquet")
    assert os.listdir(tmp_path) == []


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        Path(target).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr("grpo_fast.demo.shutil.copyfile", fail)
    with pytest.raises(OSError, match="disk full"):
        write_demo(tmp_path / "demo.parquet")
    assert os.listdir(tmp_path) == []


def test_arrow_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(ImportError, match=r"^OUT: an Arrow file needs pyarrow; pip install 'grpo-fast\[cli\]'"):
        write_demo(tmp_path / "demo.arrow")
    assert write_demo(tmp_path / "demo.parquet").exists()
