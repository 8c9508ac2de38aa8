"""The sample that ships with the package: real rollouts of a tiny policy, made by ``examples/make_sample.py``."""

from __future__ import annotations

import os
import shutil
from importlib import resources
from pathlib import Path

_ARROW = (".arrow", ".feather", ".ipc")
SUFFIXES = (".parquet", *_ARROW)


def demo_file() -> Path:
    """Where the packaged Parquet file is."""
    return Path(str(resources.files("grpo_fast"))) / "data" / "tiny_rollouts.parquet"


def write_demo(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the sample to ``path``, as Parquet or as an Arrow IPC file by its suffix; returns the path.

    The file appears under its name only when it is complete.

    Raises
    ------
    ValueError  where the suffix is none of :data:`SUFFIXES`, the directory is missing, or the file exists and
        ``overwrite`` is false
    ImportError  where an Arrow file is asked for without pyarrow
    """
    out = Path(path)
    suffix = out.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"OUT: unknown suffix {out.suffix!r} of {out}; supported are {', '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise ValueError(f"OUT: the directory {out.parent} does not exist; create it or write somewhere else")
    if out.exists() and not overwrite:
        raise ValueError(f"OUT: {out} already exists; pass overwrite=True (--overwrite) or another name")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if suffix in _ARROW:
            _convert(temporary)
        else:
            shutil.copyfile(demo_file(), temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
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
