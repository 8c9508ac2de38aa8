"""Output files appear under their name when they are complete, or not at all; messages go to stderr if they can."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

#: What can be written; all but the first are Arrow IPC files.
SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")

StrPath = str | os.PathLike[str]


def complain(message: str, code: int = 0) -> int:
    """One line on stderr, where there is one that can be written; returns ``code``."""
    if sys.stderr is not None:  # print() would take stdout instead
        line = " ".join(message.split()).encode("utf-8", "backslashreplace").decode("utf-8")
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
    return code


def check_name(argument: str, path: StrPath) -> None:
    """Raise ValueError, by the name of the ``argument``, where no file can be called that or looked for there."""
    try:
        os.fspath(path).encode()
        os.stat(path)
    except UnicodeEncodeError:
        raise ValueError(f"{argument}: the name {os.fspath(path)!r} is not UTF-8; rename it") from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, out of reach, a loop of links; a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{argument}: {path} is no name to use ({reason}); check it and its permissions") from error


def check_output(path: StrPath, *, overwrite: bool, inputs: Sequence[StrPath] = ()) -> Path:
    """``path``, where a file can be written.

    Raises
    ------
    ValueError
        An unknown suffix, a directory that is missing or read-only, a file that exists (unless
        ``overwrite``), or one of the ``inputs``.
    """
    out = Path(path)
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"OUT: unknown suffix {out.suffix!r} of {out}; supported are {', '.join(SUFFIXES)}")
    check_name("OUT", out)
    if not out.parent.is_dir():
        raise ValueError(f"OUT: the directory {out.parent} does not exist; create it or write somewhere else")
    if out.is_dir():
        raise ValueError(f"OUT: {out} is a directory; add a file name such as {out / ('out' + out.suffix)}")
    for source in inputs:
        if out.exists() and os.path.exists(source) and os.path.samefile(out, source):
            raise ValueError(f"OUT: {out} is the input {source} itself; write to another name")
    if out.is_symlink() and not out.exists() and not overwrite:
        raise ValueError(f"OUT: {out} is a symlink to nothing, which would go; pass overwrite=True or another name")
    if out.exists() and not overwrite:
        raise ValueError(f"OUT: {out} already exists; pass overwrite=True or another name")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"OUT: the directory {out.parent} is not writable; write somewhere else")
    return out


@contextmanager
def complete(path: StrPath, *, overwrite: bool, inputs: Sequence[StrPath] = ()) -> Iterator[Path]:
    """A temporary path next to ``path``, which becomes ``path`` at the end of the block; removed on any error.

    Raises
    ------
    ValueError
        As :func:`check_output`, at the start and again before the rename.
    OSError
        Where the system does not write or rename, with its reason.
    """
    out = check_output(path, overwrite=overwrite, inputs=inputs)
    temporary = out.with_name(f".grpo-fast.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        check_output(path, overwrite=overwrite, inputs=inputs)
        os.replace(temporary, out)
    except OSError as error:
        reason = error.strerror or str(error).rpartition("Detail: ")[2]  # Arrow's own come without strerror
        raise OSError(f"OUT: {out} cannot be written ({reason}); make room or write somewhere else") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
