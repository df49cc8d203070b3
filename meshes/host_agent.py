"""A process of the run on another host: what the shims of the ranks there report, it passes on; and it kills.

    shims ── AF_UNIX ──> HostAgent ── take ──> the controller (remote_host.py)

When it has not been asked for `orphan_seconds`, the controller is gone: it ends all processes of the run there.
"""

import asyncio
import os
import platform
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count

from monarch.actor import Actor, concurrent_endpoint

import titan_rl
from titan_rl.actors.meeting import HOST
from titan_rl.wire.cores import machine, usable_cores
from titan_rl.wire.gpus import visible_devices

WATCHES = 10  # looks at the clock within orphan_seconds


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host has, and what must be equal on all hosts of a run."""

    versions: str
    folder: str  # current folder: relative paths of the config start here
    private: str  # folder that only this user can open, until the agent ends
    report: str  # socket to which shims report
    zygotes: str  # folder of the zygotes' sockets; empty: ranks start cold
    parent: int  # process of the worker, which starts ranks
    machine: str
    cores: int
    gpus: list[str]
    address: str  # by which other hosts reach this one


def own_versions() -> str:
    return (
        f"titan_rl {titan_rl.__version__}, Python {platform.python_version()}, torchmonarch {version('torchmonarch')}"
    )


class HostAgent(Actor):
    def __init__(self, orphan_seconds: float) -> None:
        self._orphan_seconds, self._asked = orphan_seconds, time.monotonic()
        self._private = tempfile.TemporaryDirectory(prefix="agent-")
        self._connections = count()
        self._heard: list[tuple[int, bytes]] = []
        self._news = asyncio.Event()
        self._pids: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @concurrent_endpoint
    async def facts(self) -> HostFacts:
        if not self._tasks:
            await asyncio.start_unix_server(self._listen, f"{self._private.name}/report")
            self._tasks.append(asyncio.create_task(self._end_with_the_run()))
        return HostFacts(
            own_versions(),
            os.getcwd(),
            self._private.name,
            f"{self._private.name}/report",
            zygotes if (zygotes := os.environ.get("TITAN_RL_ZYGOTES", "off")) != "off" else "",
            os.getppid(),
            machine(),
            usable_cores(),
            visible_devices(),
            os.environ.get(HOST, ""),
        )

    @concurrent_endpoint
    async def take(self, within: float) -> list[tuple[int, bytes]]:
        """Wait at most `within` seconds. Return what shims have said, by connection; nothing: one has ended."""
        self._asked = time.monotonic()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), within)
        self._news.clear()
        heard, self._heard = self._heard, []
        self._asked = time.monotonic()
        return heard

    @concurrent_endpoint
    async def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            if pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @concurrent_endpoint
    async def end(self) -> None:
        """End all processes of the run on this host. Its worker waits for the next run."""
        self._end()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, pid = next(self._connections), 0
        while line := await reader.readline():
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word == "pid":
                pid = int(rest)
                self._pids.add(pid)
            self._say(connection, line)
        self._pids.discard(pid)
        writer.close()
        self._say(connection, b"")

    def _say(self, connection: int, line: bytes) -> None:
        self._heard.append((connection, line))
        self._news.set()

    async def _end_with_the_run(self) -> None:
        while time.monotonic() - self._asked < self._orphan_seconds:
            await asyncio.sleep(self._orphan_seconds / WATCHES)
        self._end()

    def _end(self) -> None:
        self._private.cleanup()
        for pid in (*self._pids, os.getppid()):  # the worker's death is that of all its children
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)
