"""Print the N-th shell command of the README, for CI to run it as a reader would: ``readme_command.py 1``."""

import re
import sys
from pathlib import Path


def commands() -> list[str]:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


if __name__ == "__main__":
    print(commands()[int(sys.argv[1]) - 1])
