"""``grpo-fast`` and ``python -m grpo_fast``."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line on ``sys.argv``; returns the exit code: 0, 1 (bad input), 2 (usage) or 130 (interrupted)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    arguments = sys.argv[1:]
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
    print(f"error: the command line needs more ({error}); pip install 'grpo-fast[cli]'", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
