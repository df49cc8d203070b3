#!/usr/bin/env python3
"""Run a command and keep its output as a picture, with its colours. Steps in the middle of a run are cut out.

    .venv/bin/python scripts/picture.py docs/images/grpo_smollm2.svg -- ./scripts/run --config grpo_smollm2.toml

CI=1 makes a run print plain lines, without the status line that is redrawn in place.
"""

import argparse
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 120
STEP, PROGRESS = re.compile(r" +\d+/\d+ "), re.compile(r" +… ")
SHOWN = 3  # steps at either end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+")
    a = parser.parse_args()
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "CI": "1", "COLUMNS": str(WIDTH)}
    with subprocess.Popen(a.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout
        lines = []
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(Text.from_ansi(line.rstrip("\n")))
    if run.returncode:
        return run.returncode
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for line in without_middle(lines):
        console.print(line, no_wrap=True, overflow="crop")
    console.save_svg(str(a.picture), title=" ".join(a.command))
    return 0


def without_middle(lines: list[Text]) -> list[Text]:
    """Return the lines without progress, and without the steps between the first and the last ones."""
    lines = [line for line in lines if not PROGRESS.match(line.plain)]
    steps = [i for i, line in enumerate(lines) if STEP.match(line.plain)]
    if len(steps) <= 2 * SHOWN + 1:
        return lines
    first, last = steps[SHOWN], steps[-SHOWN]
    return [*lines[:first], Text("    ..."), *lines[last:]]


if __name__ == "__main__":
    sys.exit(main())
