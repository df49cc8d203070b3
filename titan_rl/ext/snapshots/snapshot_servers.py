"""The controller's handles of the snapshot servers (snapshot_server.py): one process per host, started when it is first
needed, and again after its death."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from monarch.actor import this_host

from titan_rl.ext.snapshots.snapshot_parts import peer_of
from titan_rl.ext.snapshots.snapshot_server import SnapshotServer
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import ask, label
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.spawn import spawn
from titan_rl.wire.cores import machine
from titan_rl.wire.errors import RankDied

MESH = "snapshots"  # train/bring_up.py lets this extension handle its deaths
STAMP_SECONDS = 1.0  # how long one call waits for stamps


@dataclass(eq=False, slots=True)
class ServerHandle:
    """Calls to one server. A call raises a RunError if the server or its host has died."""

    host: Host
    name: str
    actor: Any
    init_seconds: float  # limit of calls that may be a new server's first
    seconds: float  # limit of copying a part at full speed

    @property
    def alive(self) -> bool:
        return deaths.ended(self.name) is None and not self.host.lost()

    async def transport(self) -> str:
        """Return how it reads from other hosts."""
        return await ask(self.actor.transport.call(), actor=self.name, verb="transport", seconds=self.init_seconds)

    async def hold(self, mesh: str) -> "Place":
        """Return new memory there."""
        pid, fd = await ask(self.actor.hold.call(mesh), actor=self.name, verb="hold", seconds=self.init_seconds)
        return Place(self, pid, fd)

    async def stamped(self, fds: Sequence[int], serial: int) -> list[bool]:
        call = self.actor.stamped.call(list(fds), serial, STAMP_SECONDS)
        return await ask(call, actor=self.name, verb="stamped", seconds=self.seconds)

    async def fetch(self, fd: int, serial: int, source: "Place", nbytes: int = 0, rate: float = 0.0) -> int:
        """Make the server copy a part of another one; return the number of bytes. `rate` bounds the bytes a second
        over all copies to it, which have `nbytes`; 0: no bound. Raise at once if either dies: a read from a dead server
        would wait."""
        seconds = self.seconds + (nbytes / rate if rate else 0.0)
        call = self.actor.fetch.call(fd, serial, source.server.actor, source.fd, seconds, rate)
        fetching = asyncio.ensure_future(ask(call, actor=self.name, verb="fetch", seconds=seconds))
        task, other = asyncio.current_task(), source.server.name
        with deaths.cancelled_by_death(other, fetching) as dying:
            try:
                return await fetching
            except asyncio.CancelledError:
                if dying.death is None or (task is not None and task.cancelling()):
                    raise  # the caller was cancelled
                raise RankDied(other, dying.death) from None

    async def drop(self, fds: Sequence[int]) -> None:
        await ask(self.actor.drop.call(list(fds)), actor=self.name, verb="drop", seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Place:
    """Memory for one part at a server."""

    server: ServerHandle
    pid: int
    fd: int

    @property
    def path(self) -> str:
        """Return its path for ranks of the server's host."""
        return f"/proc/{self.pid}/fd/{self.fd}"


class SnapshotServers:
    """The servers of a run, on its hosts; and on the controller's machine when only one host is left."""

    def __init__(self, hosts: Sequence[Host], init_seconds: float, seconds: float) -> None:
        """`init_seconds`: limit of a new server's first answer; `seconds`: limit of copying one part."""
        self._hosts, self._limits = hosts, (init_seconds, seconds)
        self._here = Host(this_host(), "the controller's machine")
        self._numbers = count()
        self._handles: dict[str, ServerHandle] = {}  # by host

    async def of(self, host: Host) -> ServerHandle:
        """Return the server of a host. It may still be starting."""
        handle = self._handles.get(host.name)
        if handle is None or not handle.alive:
            number = next(self._numbers)  # no name is used twice: a dead server stays dead
            procs = await spawn(host, name=MESH, shape={"number": 1}, first=number, env={"CUDA_VISIBLE_DEVICES": ""})
            actor: Any = procs.spawn(MESH, SnapshotServer)
            name = label(MESH, {"number": number})
            handle = self._handles[host.name] = ServerHandle(host, name, actor.slice(number=0), *self._limits)
        return handle

    def peer_of(self, host: Host) -> Host:
        """Return the host that has copies of this host's parts."""
        number = [each.name for each in self._hosts].index(host.name)
        machines = [each.facts.machine if each.facts else machine() for each in self._hosts]
        peer = peer_of(number, ["" if each.lost() else at for each, at in zip(self._hosts, machines, strict=True)])
        return self._here if peer is None else self._hosts[peer]

    async def start(self, hosts: Sequence[Host]) -> tuple[list[str], str]:
        """Start the servers that ranks on these hosts need; return whose parts are copied where, and by which
        transport."""
        pairs = {host.name: (host, self.peer_of(host)) for host in hosts}
        every = {host.name: host for pair in pairs.values() for host in pair}
        handles = [await self.of(host) for host in every.values()]
        transports = await asyncio.gather(*(handle.transport() for handle in handles))
        copies = [f"{host.name}'s on {peer.name}" for host, peer in pairs.values()]
        return copies, ", ".join(sorted(set(transports)))
