"""The controller's end of the keepers of snapshots (snapshot_keeper.py): one process per host, started when it is
needed first, and again after it has died."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from monarch.actor import this_host

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import ask, label
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.snapshot_keeper import Keeper
from titan_rl.meshes.spawn import spawn
from titan_rl.wire.cores import machine
from titan_rl.wire.errors import RankDied
from titan_rl.wire.snapshot import peer_of

MESH = "keeper"
STAMP_SECONDS = 1.0  # of one look for stamps


@dataclass(eq=False, slots=True)
class KeeperEnd:
    """What the controller asks of one keeper. A call raises a RunError if the keeper or its host has died."""

    host: Host
    name: str
    actor: Any
    seconds: float  # for a copy of a part at full speed

    @property
    def alive(self) -> bool:
        return deaths.ended(self.name) is None and not self.host.lost()

    async def transport(self, seconds: float) -> str:
        """Return how it reads from other hosts."""
        return await ask(self.actor.transport.call(), actor=self.name, verb="transport", seconds=seconds)

    async def hold(self, mesh: str, seconds: float) -> "Place":
        pid, fd = await ask(self.actor.hold.call(mesh), actor=self.name, verb="hold", seconds=seconds)
        return Place(self, pid, fd)

    async def stamped(self, fds: Sequence[int], serial: int) -> list[bool]:
        call = self.actor.stamped.call(list(fds), serial, STAMP_SECONDS)
        return await ask(call, actor=self.name, verb="stamped", seconds=self.seconds)

    async def fetch(self, fd: int, serial: int, source: "Place", nbytes: int = 0, rate: float = 0.0) -> int:
        """Let the keeper copy a part of another one; return the bytes that it read. `rate`: at most so many bytes a
        second, over all copies to it, which have `nbytes`; 0: no bound. Raise at once if either dies: the one that
        reads would wait."""
        seconds = self.seconds + (nbytes / rate if rate else 0.0)
        call = self.actor.fetch.call(fd, serial, source.keeper.actor, source.fd, seconds, rate)
        fetched = asyncio.ensure_future(ask(call, actor=self.name, verb="fetch", seconds=seconds))
        task, other = asyncio.current_task(), source.keeper.name
        with deaths.cancelled_by_death(other, fetched) as dying:
            try:
                return await fetched
            except asyncio.CancelledError:
                if dying.death is None or (task is not None and task.cancelling()):
                    raise  # the caller was cancelled
                raise RankDied(other, dying.death) from None

    async def drop(self, fds: Sequence[int]) -> None:
        await ask(self.actor.drop.call(list(fds)), actor=self.name, verb="drop", seconds=self.seconds)


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that a keeper holds for one part."""

    keeper: KeeperEnd
    pid: int
    fd: int

    @property
    def path(self) -> str:
        """Return where ranks of the keeper's host find it."""
        return f"/proc/{self.pid}/fd/{self.fd}"


class Keepers:
    """The keepers of a run, on its hosts; and on the controller's machine when only one host is left."""

    def __init__(self, hosts: Sequence[Host], init_seconds: float, seconds: float) -> None:
        """`init_seconds`: for a new keeper's first answer; `seconds`: for copying one part to a peer."""
        self._hosts, self._init_seconds, self._seconds = hosts, init_seconds, seconds
        self._here = Host(this_host(), "the controller's machine")
        self._numbers = count()
        self._ends: dict[str, KeeperEnd] = {}  # by host

    async def of(self, host: Host) -> KeeperEnd:
        """Return the keeper of a host. It may have just been asked to start."""
        end = self._ends.get(host.name)
        if end is None or not end.alive:
            number = next(self._numbers)  # no name is used twice: a dead keeper stays dead
            procs = await spawn(host, name=MESH, shape={"number": 1}, first=number, env={"CUDA_VISIBLE_DEVICES": ""})
            actor: Any = procs.spawn(MESH, Keeper)
            name = label(MESH, {"number": number})
            end = self._ends[host.name] = KeeperEnd(host, name, actor.slice(number=0), self._seconds)
        return end

    async def hold(self, keeper: KeeperEnd, mesh: str) -> Place:
        """Return new memory at a keeper."""
        return await keeper.hold(mesh, self._init_seconds)

    def peer_of(self, host: Host) -> Host:
        """Return the host that has copies of this host's parts."""
        number = [each.name for each in self._hosts].index(host.name)
        peer = peer_of(number, ["" if each.lost() else machine_of(each) for each in self._hosts])
        return self._here if peer is None else self._hosts[peer]

    async def start(self, hosts: Sequence[Host]) -> tuple[list[str], str]:
        """Start the keepers that ranks on these hosts need; return which keeps a copy of whose parts, and how they
        read them."""
        pairs = {host.name: (host, self.peer_of(host)) for host in hosts}
        every = {host.name: host for pair in pairs.values() for host in pair}
        ends = [await self.of(host) for host in every.values()]
        transports = await asyncio.gather(*(end.transport(self._init_seconds) for end in ends))
        copies = [f"{host.name}'s on {peer.name}" for host, peer in pairs.values()]
        return copies, ", ".join(sorted(set(transports)))


def machine_of(host: Host) -> str:
    return host.facts.machine if host.facts else machine()
