"""A cgroup v2 of a fork server: the kernel's bound on the memory of all processes of an execution together."""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_rl.ext.sandbox.execution import ExecutionLimits
from titan_rl.wire.errors import SandboxRefused

FORK_SERVER_MB = 64
FORK_SERVER_PROCESSES = 4
_numbers = itertools.count()


def problems(folder: str) -> Iterator[str]:
    """Yield why [sandbox] cgroup cannot be used."""
    path = Path(folder)
    try:
        enabled = (path / "cgroup.subtree_control").read_text().split()
    except OSError as error:
        yield f"sandbox.cgroup: expected the folder of a cgroup v2, found {folder!r} ({error.strerror})"
        return
    if absent := sorted({"memory", "pids"} - set(enabled)):
        wanted = " ".join(f"+{name}" for name in absent)
        command = f"echo {wanted} > {folder}/cgroup.subtree_control"
        yield f"sandbox.cgroup: expected memory and pids to be enabled for its children: {command}"
    if not os.access(path, os.W_OK):
        yield f"sandbox.cgroup: expected a folder that you may write to, found {folder!r}"


class OwnCgroup:
    def __init__(self, folder: str) -> None:
        if wrong := "; ".join(problems(folder)):
            raise SandboxRefused(wrong)
        self._path = Path(folder, f"titan_rl-{os.getpid()}-{next(_numbers)}")
        self._path.mkdir()
        self._limits: ExecutionLimits | None = None
        self._kills = 0

    def take(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, limits: ExecutionLimits) -> None:
        if limits == self._limits:
            return
        most = limits.memory_mb + limits.disk_mb + FORK_SERVER_MB
        (self._path / "memory.max").write_text(str(most << 20))
        with suppress(OSError):  # a kernel without swap
            (self._path / "memory.swap.max").write_text("0")
        (self._path / "pids.max").write_text(str(limits.processes + FORK_SERVER_PROCESSES))
        self._limits = limits

    def overflowed(self) -> bool:
        """Return True if the kernel has killed a process for its memory since the last call."""
        events = dict(line.split() for line in (self._path / "memory.events").read_text().splitlines())
        before, self._kills = self._kills, int(events.get("oom_kill", 0))
        return self._kills > before

    def remove(self) -> None:
        with suppress(OSError):
            self._path.rmdir()
