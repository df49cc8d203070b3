"""Workers on this machine that stand for hosts (hosts.kind = "processes").

Each has a folder of sockets, and a log in the run's folder.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from monarch.actor import attach_to_workers

from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host
from titan_rl.wire.errors import RunError

POLL_SECONDS = 0.02  # while a worker starts
LOG_LINES = 5  # shown when a worker fails


@asynccontextmanager
async def worker_processes(count: int, folder: Path, logs: Path, seconds: float) -> AsyncIterator[list[Host]]:
    """Start `count` workers on this machine, and kill them at the end. Their sockets are below `folder`."""
    logs.mkdir(parents=True, exist_ok=True)
    started: list[Worker] = []
    try:
        for number in range(count):
            worker = Worker(f"host{number}", folder / f"h{number}", logs / f"host{number}.log")
            started.append(worker)  # one by one, so that each started worker is killed
        deadline = time.monotonic() + seconds
        yield await asyncio.gather(*(worker.joined(deadline) for worker in started))
    finally:
        for worker in started:
            worker.end()


class Worker:
    """A worker on this machine, which ends with this process."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name, self._log, self._socket = name, log, folder / "worker"
        folder.mkdir(mode=0o700)
        command = [sys.executable, "-m", "titan_rl.worker", "--address", f"ipc://{self._socket}"]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [*command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C in the terminal reaches the controller only
                env={**os.environ, "TMPDIR": str(folder)},
            )
        self._loop, self._ended = asyncio.get_running_loop(), os.pidfd_open(self.process.pid)

    def _lost(self) -> None:
        self._loop.remove_reader(self._ended)
        deaths.host_lost(self.name, f"{deaths.GONE}: the worker of its host {self.name} has ended")

    def end(self) -> None:
        self._loop.remove_reader(self._ended)
        os.close(self._ended)
        self.process.kill()
        self.process.wait()

    async def joined(self, deadline: float) -> Host:
        while not self._socket.exists():
            if (code := self.process.poll()) is not None:
                raise RunError(f"the worker of {self.name} ended with exit code {code}", last_lines(self._log))
            if time.monotonic() > deadline:
                raise RunError(f"{self.name} did not join within hosts.join_seconds", last_lines(self._log))
            await asyncio.sleep(POLL_SECONDS)
        mesh = attach_to_workers(ca="trust_all_connections", workers=[f"ipc://{self._socket}"], name=self.name)
        self._loop.add_reader(self._ended, self._lost)
        return Host(mesh, self.name, self.process.pid, lost=lambda: self.process.poll() is not None)


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
