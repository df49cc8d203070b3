"""Runs the user's code in a child process, which it may end, block or crash.

    ask (this process) ── question ──> respond (the child) ── a line of JSON per step ──> Answer

A function that holds the interpreter's lock is ended too. All that the child started ends with it (supervisor.py).
"""

import faulthandler
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.isolation import outside
from titan_rl.tasks.announced import SILENT_SECONDS
from titan_rl.wire.supervisor import how_ended

END_SECONDS = 10.0  # for a supervisor to end all processes of a child
PROGRAM = (
    "import os, sys; sys.path[:] = {path!r}; from titan_rl.wire.supervisor import fork_worker; "
    "fork_worker({starter}); from titan_rl.preflight.child import respond; respond({function!r}, {folder!r})"
)
"""The child finds modules where this process does."""

Write = Callable[..., None]
"""Takes a line, and the seconds to the next one if that is not the usual limit."""


class Answer(NamedTuple):
    lines: Sequence[Any]  # that the child wrote
    code: int | None  # exit code; None: it did not end in time
    stack: str  # if the child was late

    @property
    def late(self) -> bool:
        return self.code is None or bool(self.stack)

    @property
    def failed(self) -> bool:
        return self.late or self.code != 0

    @property
    def ended(self) -> str:
        """How the child ended, for a message."""
        if not self.late:
            return f"that its process {how_ended(self.code or 0)}"
        at = re.search(r'File "(.*)", line (\d+)', self.stack)
        return f"it still running{f' at {at[1]}:{at[2]}' if at else ''}"


def ask(function: str, question: Any, *, seconds: float, lines: int, longest: float = 0.0, rows: str = "") -> Answer:
    """Call `function`, a "module:name", with the question and a function that writes a line, in a child. `seconds`:
    the longest time to a line and between two, or `longest` where `function` asks for it; `lines`: the most
    lines that it writes. `rows`: the work
    done with rows, if there is a line per row: printed with their number every few seconds."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("question", "lines", "stack")}
        files["question"].write_bytes(pickle.dumps((seconds, question)))
        program = PROGRAM.format(path=sys.path, starter=os.getpid(), function=function, folder=folder)
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = outside(
            lambda: subprocess.Popen([sys.executable, "-P", "-c", program], start_new_session=True, **nothing)
        )
        try:
            # The child itself ends earlier, unless its clock is stopped.
            code = _exit_code(child, (lines + 1) * max(seconds, longest) + 30, files["lines"], rows)
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            child.kill()
            child.wait()
        written = files["lines"].read_text().splitlines() if files["lines"].exists() else []
        stack = files["stack"].read_text() if files["stack"].exists() else ""
        return Answer([json.loads(line) for line in written], code, stack)


def _exit_code(child: "subprocess.Popen[Any]", seconds: float, lines: Path, rows: str) -> int | None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            return child.wait(min(left, SILENT_SECONDS))
        except subprocess.TimeoutExpired:
            if rows and lines.exists():
                with suppress(OSError, ValueError):  # nothing reads it
                    count = len(lines.read_text().splitlines())
                    print(f"titan_rl: {rows}: {count:,} rows", file=sys.stderr, flush=True)
    return None


def respond(function: str, folder: str) -> None:
    """Call the function with the question in a folder, as the child."""
    seconds, question = pickle.loads(Path(folder, "question").read_bytes())
    module, _, name = function.partition(":")
    with Path(folder, "lines").open("w") as lines, Path(folder, "stack").open("w") as stack:

        def write(line: Any, within: float | None = None) -> None:
            print(json.dumps(line), file=lines, flush=True)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(within or seconds, file=stack, exit=True)

        getattr(importlib.import_module(module), name)(question, write)
    os._exit(0)  # not to wait for its threads
