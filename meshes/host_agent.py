"""A process of the run on another host: it passes on the reports of the rank launchers there, and kills ranks.

    launchers ── AF_UNIX ──> HostAgent ── take ──> the controller (remote_host.py)

When its last answer that the controller has received is `orphan_seconds` old, it ends all processes of the run there.

A host is one run's at a time, whose agent holds a lock in the worker's folder. Another run's agent waits for it only if
that run's controller is silent; then the worker is handed over instead of ended.
"""

import asyncio
import fcntl
import json
import os
import platform
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import NamedTuple

from monarch.actor import Actor, concurrent_endpoint

import titan_rl
from titan_rl.actors.meeting import HOST, PORTS
from titan_rl.meshes.fork_servers import OFF, VARIABLE
from titan_rl.wire.cores import here, machine, usable_cores
from titan_rl.wire.gpus import visible_devices
from titan_rl.wire.worker_address import RUN, Holder, holder_in, listener, port_range

WATCHES = 10  # looks at the clock within orphan_seconds
NEXT = "next"  # another one, which an agent that waits for the host locks
LATE_SECONDS = 2.0  # a controller that asks later than it said is silent
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host has, and what must be equal on all hosts of a run. The first two are read of any version."""

    versions: str
    folder: str  # current folder: relative paths of the config start here
    private: str  # folder that only this user can open, until the agent ends
    report: str  # socket to which launchers report
    fork_servers: str  # folder of their sockets; empty: ranks start cold
    parent: int  # process of the worker, which starts ranks
    machine: str
    place: str  # equal for processes that can map each other's memory: two containers on one machine cannot
    cores: int
    gpus: list[str]
    address: str  # by which other hosts reach this one
    port: int  # of the agent: the kernel refuses a connection once it has ended


class Refusal(NamedTuple):
    """Why a host cannot be had: for good, or perhaps not for long."""

    why: str
    final: bool
    seconds: float = 0.0  # until the agent of a silent run ends that run's processes; 0: unknown


def own_versions() -> str:
    return (
        f"titan_rl {titan_rl.__version__}, Python {platform.python_version()}, torchmonarch {version('torchmonarch')}"
    )


class Lease:
    """How long the processes of a run may live on: `seconds` after the last answer that the controller has received.

    A question shows that the answer before it was received. One that was long on its way is no sign of life itself, so
    the controller knows when the lease is over, although it cannot reach the host."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._answered = self._received = clock()

    def asked(self) -> None:
        self._received = self._answered

    def answered(self) -> None:
        self._answered = self._clock()

    @property
    def left(self) -> float:
        """Return the seconds until it is over."""
        return self._received + self._seconds - self._clock()

    @property
    def over(self) -> bool:
        return self.left <= 0


class HostAgent(Actor):
    def __init__(self, orphan_seconds: float) -> None:
        self._orphan_seconds, self._lease = orphan_seconds, Lease(orphan_seconds)
        self._alive: socket.socket | None = None  # nobody talks over it
        self._private = tempfile.TemporaryDirectory(prefix="agent-")
        self._connections = count()
        self._heard: list[tuple[int, bytes]] = []
        self._news = asyncio.Event()
        self._pids: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._claim: int | None = None  # the locked file, while the host is this run's
        self._waiting: int | None = None  # the locked file, while this run waits for the host, also between two claims
        self._run = ""
        self._seen = 0.0  # of the run that has the host
        self._told = False  # that its controller is silent

    @concurrent_endpoint
    async def facts(self) -> HostFacts:
        if not self._tasks:
            await asyncio.start_unix_server(self._listen, f"{self._private.name}/report")
            self._tasks.append(asyncio.create_task(self._end_with_the_run()))
        if self._alive is None:
            self._alive = listener(os.environ[HOST], port_range(os.environ.get(PORTS, "")))
        return HostFacts(
            own_versions(),
            os.getcwd(),
            self._private.name,
            f"{self._private.name}/report",
            servers if (servers := os.environ.get(VARIABLE, OFF)) != OFF else "",
            os.getppid(),
            machine(),
            here(),
            usable_cores(),
            visible_devices(),
            os.environ.get(HOST, ""),
            self._alive.getsockname()[1],
        )

    @concurrent_endpoint
    async def claim(self, run: str, within: float) -> Refusal | None:
        """Make the host this run's, or return why not. Another run that is alive keeps it; for one whose controller is
        silent this waits, at most `within` seconds: its agent ends it. The first time this is told at once."""
        return await self.claimed(run, within)

    async def claimed(self, run: str, within: float) -> Refusal | None:
        self._lease.asked()
        began, self._run, folder = time.monotonic(), run, worker_folder()
        try:
            if self._waiting is None:
                self._waiting = _locked(folder / NEXT)
            while (claimed := _locked(folder / RUN)) is None:
                holder = holder_in(folder)
                self._seen = self._seen or holder.again
                if holder.again > self._seen:  # its controller has asked meanwhile
                    self._wait_no_more()
                    why = f"it is busy with {holder.run}: wait for its end, stop it, or use another host"
                    return Refusal(why, True)
                if time.monotonic() - began > within or (holder.silent and not self._told):
                    self._told = self._told or holder.silent
                    why = f"it is busy with {holder.run}, whose controller {holder.how_silent}"
                    return Refusal(why, False, max(0.0, holder.ends - time.monotonic()))
                await asyncio.sleep(LOOK_SECONDS)
            self._claim = claimed
            os.ftruncate(claimed, 0)
            self._tell_when(0.0)
            self._wait_no_more()
        except OSError as error:
            return Refusal(f"its folder {folder} cannot be written to: {error.strerror}", True)
        finally:
            self._lease.answered()
        return None

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            os.close(self._waiting)
            self._waiting = None

    def _tell_when(self, within: float) -> None:
        """Write whose the host is, when the run's controller will have asked again if it is alive, and when its
        processes here end if it is not."""
        assert self._claim is not None
        now = time.monotonic()
        ends = now + self._lease.left + self._orphan_seconds / WATCHES
        found = Holder(self._run, round(now + within + LATE_SECONDS, 3), round(ends, 3))
        text = json.dumps(found._asdict())
        os.pwrite(self._claim, f"{text:<{len(text) + 16}}".encode(), 0)

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this agent alone: the host is another run's."""
        os._exit(0)

    @concurrent_endpoint
    async def take(self, within: float) -> list[tuple[int, bytes]]:
        """Wait at most `within` seconds. Return the reports of launchers, by connection; nothing: one has ended."""
        self._lease.asked()
        if self._claim is not None:
            with suppress(OSError):  # a full disk: what it says is old
                self._tell_when(within)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), within)
        self._news.clear()
        heard, self._heard = self._heard, []
        self._lease.answered()
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
        while not self._lease.over:
            await asyncio.sleep(self._orphan_seconds / WATCHES)
        self._end()

    def _end(self) -> None:
        worker = [] if self._claim is None or self._awaited() else [os.getppid()]
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(OSError):  # a rank that is about to end may have made a file there meanwhile
            self._private.cleanup()
        for pid in worker:  # its death is that of all its children, this one too
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _awaited(self) -> bool:
        """Return True if another run waits for this host: it has joined this worker, which must live on."""
        with suppress(OSError):
            return _locked(worker_folder() / NEXT) is None
        return False


def worker_folder() -> Path:
    """Return the folder of this host's worker, also if it cannot be written to: tempfile takes another one then."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def _locked(path: Path) -> int | None:
    """Return the open and locked file; None if another process has it locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
