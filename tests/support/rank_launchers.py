"""The ranks of this machine, found by their launchers: in /proc, a forked rank looks like its fork server."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def is_launcher(process: psutil.Process) -> bool:
    return "rank_launcher.py" in " ".join(process.cmdline())


def launched(processes: Iterable[psutil.Process]) -> Iterator[tuple[psutil.Process, str, int]]:
    """Yield each launcher among these processes whose rank has started, the rank's name, and its pid."""
    for process in processes:
        with suppress(psutil.Error, OSError):  # it has ended
            if is_launcher(process) and (pid := rank_of(process.pid)):
                yield process, process.environ()["TITAN_RL_RANK"].split(" ", 1)[1], pid


def rank_of(launcher: int) -> int:
    """Return the pid of the rank that a launcher watches; 0: it has not started yet, or has ended."""
    found = (
        re.search(r"^Pid:\s+(\d+)$", path.read_text(), re.M) for path in Path(f"/proc/{launcher}/fdinfo").iterdir()
    )
    return next((int(pid[1]) for pid in found if pid), 0)
