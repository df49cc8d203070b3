"""Runs a command to its end and measures the memory of all its processes meanwhile."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

POLL_SECONDS = 0.5
WAIT_FACTOR = 50  # waits last this many times longer than measurements, which use a core
MOST_SECONDS = 5400  # deadline of one command


def run_and_measure(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Run a command to its end; it prints into `log`. Return the peak memory of all its processes in bytes."""
    peak, ends = 0, time.monotonic() + MOST_SECONDS
    with log.open("wb") as out, subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT) as process:
        wait = POLL_SECONDS
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait)
                break
            if time.monotonic() > ends:
                process.kill()
                raise TimeoutError(f"{' '.join(command)} took more than {MOST_SECONDS} seconds")
            began = time.monotonic()
            peak = max(peak, memory_of(process.pid))
            wait = max(POLL_SECONDS, WAIT_FACTOR * (time.monotonic() - began))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return peak


def memory_of(pid: int) -> int:
    """Return the bytes of a process and its descendants; memory that several of them share counts once."""
    total = 0
    with suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total
