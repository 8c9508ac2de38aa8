"""``grpo-fast`` and ``python -m grpo_fast``."""

from __future__ import annotations

import signal
import sys

from .output import complain


def main() -> int:
    """Run the command line on ``sys.argv``; returns the exit code: 0, 1 (bad input), 2 (usage) or 130 (interrupted)."""
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
        return _run(sys.argv[1:])
    except KeyboardInterrupt:  # during an import, most likely: run() has its own
        return complain("error: interrupted; nothing was written", 130)


def _run(arguments: list[str]) -> int:
    try:
        from .cli import run
    except ImportError as error:
        return _without_extra(arguments, error)
    return run(arguments)


def _without_extra(arguments: list[str], error: ImportError) -> int:
    """``info`` works anyway; everything else says what to install."""
    if arguments == ["info"]:
        from ._info import show_info

        show_info()
        return 0
    return complain(f"error: the command line needs more ({error}); pip install 'grpo-fast[cli]'", 2)


if __name__ == "__main__":
    sys.exit(main())
