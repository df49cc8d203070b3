"""Signals to the ranks of a test's run."""

import os
import signal
from pathlib import Path


def stop(pid: int) -> None:
    """Stop a process, and return once all of its threads have stopped: on a loaded machine they run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    while (states := _states(pid)) != {"T"}:
        assert not states & {"Z", "X"}


def _states(pid: int) -> set[str]:
    found = set[str]()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.add((thread / "stat").read_text().rsplit(")", 1)[1].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # the thread ended
            found.add("ended")
    return found
