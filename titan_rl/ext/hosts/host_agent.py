"""A process of the run on another host: it forwards reports of the rank launchers there, and kills ranks.

    launchers ── AF_UNIX ──> HostAgent ── take ──> the controller (remote_host.py)

When the last answer that the controller has received is `orphan_seconds` old, it ends all processes of the run there.
If the agent itself was stopped for a while, as in a suspended job, so may the controller have been: it stops the ranks,
and ends them only if the controller does not call it again.

A host belongs to one run at a time, whose agent has a file locked in the worker's folder. Another run's agent waits for
the lock only while the first run's controller is silent; then the worker is handed over instead of ended.
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
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import NamedTuple

from monarch.actor import Actor, concurrent_endpoint

import titan_rl
from titan_rl.actors.meeting import HOST, PORTS
from titan_rl.ext.hosts.worker_address import RUN, Holder, holder_in
from titan_rl.meshes.hosts import HostFacts
from titan_rl.meshes.starter import starter
from titan_rl.wire.cores import here, machine, usable_cores
from titan_rl.wire.gpus import visible_devices
from titan_rl.wire.ports import listener, port_range

CHECKS = 10  # checks of the lease within orphan_seconds
NEXT = "next"  # file that is locked by an agent which waits for the host
LATE_SECONDS = 2.0  # a controller whose next call is later than announced is silent
POLL_SECONDS = 0.1


class Refusal(NamedTuple):
    """Why a host cannot be claimed: for good, or perhaps not for long."""

    why: str
    final: bool
    seconds: float = 0.0  # until a silent run's agent ends its processes; 0: unknown


def own_versions() -> str:
    return (
        f"titan_rl {titan_rl.__version__}, Python {platform.python_version()}, torchmonarch {version('torchmonarch')}"
    )


class Lease:
    """Limits how long a run's processes may live: `seconds` after the last answer that the controller has received.

    A call shows that the answer before it was received. A call that was long on its way does not prolong the lease, so
    the controller knows when the lease of a host that it cannot reach is over."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._answered = self._received = clock()

    def on_call(self) -> None:
        self._received = self._answered

    def on_answer(self) -> None:
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
        self._alive: socket.socket | None = None  # open as long as this process lives
        self._private = tempfile.TemporaryDirectory(prefix="agent-")
        self._connections = count()
        self._reports: list[tuple[int, bytes]] = []
        self._reported = asyncio.Event()
        self._pids: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._claim: int | None = None  # descriptor of the locked file RUN, while the host is this run's
        self._waiting: int | None = None  # descriptor of the locked file NEXT, from the first claim to success
        self._run = ""
        self._holder_again = 0.0  # `again` of the run that has the host, at the first claim
        self._reported_silence = False  # a claim has returned that its controller is silent

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
            starter().folder,
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
        """Make the host this run's, or return the reason. A live run keeps it. If its controller is silent, wait at
        most `within` seconds for its agent to end it; return at once the first time that it is silent."""
        return await self.claimed(run, within)

    async def claimed(self, run: str, within: float) -> Refusal | None:
        self._lease.on_call()
        began, self._run, folder = time.monotonic(), run, worker_folder()
        try:
            if self._waiting is None:
                self._waiting = _locked(folder / NEXT)
            while (claimed := _locked(folder / RUN)) is None:
                holder = holder_in(folder)
                self._holder_again = self._holder_again or holder.again
                if holder.again > self._holder_again:  # its controller has called meanwhile
                    self._stop_waiting()
                    reason = f"it is busy with {holder.run}: wait for its end, stop it, or use another host"
                    return Refusal(reason, True)
                if time.monotonic() - began > within or (holder.silent and not self._reported_silence):
                    self._reported_silence = self._reported_silence or holder.silent
                    reason = f"it is busy with {holder.run}, whose controller {holder.how_silent}"
                    return Refusal(reason, False, max(0.0, holder.ends - time.monotonic()))
                await asyncio.sleep(POLL_SECONDS)
            self._claim = claimed
            os.ftruncate(claimed, 0)
            self._write_holder(0.0)
            self._stop_waiting()
        except OSError as error:
            return Refusal(f"its folder {folder} cannot be written to: {error.strerror}", True)
        finally:
            self._lease.on_answer()
        return None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            os.close(self._waiting)
            self._waiting = None

    def _write_holder(self, within: float) -> None:
        """Record that the host is this run's, for agents and workers that wait for it."""
        assert self._claim is not None
        now = time.monotonic()
        ends = now + self._lease.left + self._orphan_seconds / CHECKS
        holder = Holder(self._run, round(now + within + LATE_SECONDS, 3), round(ends, 3))
        text = json.dumps(holder._asdict())
        os.pwrite(self._claim, f"{text:<{len(text) + 16}}".encode(), 0)

    @concurrent_endpoint
    async def quit(self) -> None:
        """End this agent alone: the host is another run's."""
        os._exit(0)

    @concurrent_endpoint
    async def take(self, within: float) -> list[tuple[int, bytes]]:
        """Wait at most `within` seconds. Return launchers' reports, by connection; b"": that launcher has ended."""
        self._lease.on_call()
        if self._claim is not None:
            with suppress(OSError):  # a full disk: the record is outdated
                self._write_holder(within)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reported.wait(), within)
        self._reported.clear()
        reports, self._reports = self._reports, []
        self._lease.on_answer()
        return reports

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
            self._report(connection, line)
        self._pids.discard(pid)
        writer.close()
        self._report(connection, b"")

    def _report(self, connection: int, line: bytes) -> None:
        self._reports.append((connection, line))
        self._reported.set()

    async def _end_with_the_run(self) -> None:
        interval = self._orphan_seconds / CHECKS
        while not self._lease.over:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            if self._lease.over and time.monotonic() - due > interval:
                await self._renewed()
        self._end()

    async def _renewed(self) -> None:
        """Wait at most `orphan_seconds` for calls of the controller that renew the lease. Meanwhile no rank runs:
        another may have taken its place."""
        deadline = time.monotonic() + self._orphan_seconds
        self._signal_ranks(signal.SIGSTOP)
        while self._lease.over and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if not self._lease.over:
            self._signal_ranks(signal.SIGCONT)

    def _signal_ranks(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self) -> None:
        worker = [] if self._claim is None or self._awaited() else [os.getppid()]
        self._signal_ranks(signal.SIGKILL)
        with suppress(OSError):  # a rank may have just made a file there
            self._private.cleanup()
        for pid in worker:  # all its children die with it, this process too
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _awaited(self) -> bool:
        """Return True if another run waits for this host: it is attached to this worker, which must stay."""
        with suppress(OSError):
            return _locked(worker_folder() / NEXT) is None
        return False


def worker_folder() -> Path:
    """Return the folder of this host's worker. tempfile alone would return another one if it cannot be written to."""
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
