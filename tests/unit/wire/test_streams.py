"""A process whose output goes nowhere, in every way that happens, runs to its end."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys, warnings
from titan_rl.wire.program import outlive_readers

outlive_readers()
from titan_rl.record.terminal import Terminal

terminal = Terminal()
print("up", flush=True)
with open(sys.argv[1], "w") as proof:
    sys.stdin.readline() if sys.stdin else None
    for _ in range(3):
        print("a line")
        print("x" * 200_000)
        sys.stdout.flush()
        print("a line", file=sys.stderr)
        warnings.warn("a warning")
        logging.error("an error")
        terminal.note("a note")
        terminal.warn("a warning")
        terminal.error("an error", "its details")
        with terminal.phase("a phase"), terminal.progress("progress", 10) as progress:
            progress.advance()
    assert proof.fileno() > 2, "a file was opened in the place of a standard stream"
    proof.write("done")
"""


def is_done(proof: Path) -> bool:
    return proof.read_text() == "done"


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_a_reader_that_leaves_ends_nothing(tmp_path: Path, opened: Callable[[], tuple[int, int]]) -> None:
    """A closed pipe (EPIPE), and a closed terminal (EIO)."""
    proof = tmp_path / "proof"
    ours, its = opened()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(proof)], stdin=subprocess.PIPE, stdout=its, stderr=its, text=True
    )
    os.close(its)
    assert os.read(ours, 2) == b"up"
    os.close(ours)  # every write fails from now on
    process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    assert is_done(proof)


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&- 2>&-", "</dev/null >&-"])
def test_closed_streams_are_silent(tmp_path: Path, closed: str) -> None:
    proof = tmp_path / "proof"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, str(proof)]
    assert subprocess.run(command, timeout=60, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    assert is_done(proof)


def test_a_full_disk_costs_the_lines_only(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM, str(proof)]
        assert subprocess.run(command, timeout=60, stdin=subprocess.DEVNULL, stdout=full, stderr=full).returncode == 0
    assert is_done(proof)


def test_what_can_be_written_is_whole(tmp_path: Path) -> None:
    """A reader slower than the writer gets everything."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "proof")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    time.sleep(0.5)
    out, _ = process.communicate(timeout=60)
    assert out.count("x") == 600_000
    assert out.count("a line\n") == 3
