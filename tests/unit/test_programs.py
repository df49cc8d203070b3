"""Programs that start no process of a run: how they end when their user is gone, or does not want to wait."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def start(*argv: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *argv]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("program", ["audit", "export", "lint"])
def test_a_reader_that_has_ended_is_no_error(program: str) -> None:
    """As in `... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = start(f"titan_rl.{program}", "--help", stdout=writing)
    os.close(writing)
    assert (ended.communicate(timeout=120)[1], ended.returncode) == ("", 0)


def test_an_audit_that_is_stopped_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").touch()
    os.mkfifo(tmp_path / "config.toml")
    audit = start("titan_rl.audit", str(tmp_path))
    with open(tmp_path / "config.toml", "wb"):  # opens once the audit reads it, which then waits for its end
        audit.send_signal(signal.SIGTERM)  # a shell may have SIGINT ignored
        assert (audit.communicate(timeout=120)[1], audit.returncode) == ("", 130)
