"""The sample that ships with the package: real rollouts of a tiny policy, made by ``examples/make_sample.py``."""

from __future__ import annotations

import os
import shutil
from importlib import resources
from pathlib import Path

from .output import SUFFIXES, complete

__all__ = ["SUFFIXES", "demo_file", "write_demo"]


def demo_file() -> Path:
    """Where the packaged Parquet file is."""
    return Path(str(resources.files("grpo_fast"))) / "data" / "tiny_rollouts.parquet"


def write_demo(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the sample to ``path``, as Parquet or as an Arrow IPC file by its suffix; returns the path.

    The file appears under its name only when it is complete.

    Raises
    ------
    ValueError  where the suffix is none of :data:`SUFFIXES`, the directory is missing or read-only, or the file
        exists and ``overwrite`` is false
    OSError  where the system does not write
    ImportError  where an Arrow file is asked for without pyarrow
    """
    out = Path(path)
    with complete(out, overwrite=overwrite, inputs=[demo_file()]) as temporary:
        if out.suffix.lower() == ".parquet":
            shutil.copyfile(demo_file(), temporary)
        else:
            _convert(temporary)
    return out


def _convert(target: Path) -> None:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ImportError("OUT: an Arrow file needs pyarrow; pip install 'grpo-fast[cli]', or write .parquet") from None
    table = pyarrow.parquet.read_table(demo_file())
    with pyarrow.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
