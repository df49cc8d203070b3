"""Snapshots at servers that are plain objects: ranks, servers and hosts die in any order; a restored snapshot is whole,
of one step, and on the rank's host."""

import asyncio
import os
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.ext.snapshots.peer_snapshots import PeerSnapshots
from titan_rl.ext.snapshots.snapshot_parts import HEAD, WRITING, peer_of
from titan_rl.ext.snapshots.snapshot_server import Parts
from titan_rl.ext.snapshots.snapshot_servers import Place, ServerHandle, SnapshotServers
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.wire.errors import RankDied
from titan_rl.wire.snapshot import Snapshot

BLOCK = 2500  # bytes: a part of one page has two blocks


@dataclass(eq=False)
class Home:
    """A host. It is lost with its server, and with the ranks on it."""

    name: str
    gone: bool = False

    def lost(self) -> bool:
        return self.gone


@dataclass(eq=False)
class FakeServer:
    """A server in this process, which reads another one's parts without messages."""

    host: Home
    killed: bool = False
    parts: Parts = field(default_factory=lambda: Parts(BLOCK))
    gate: asyncio.Event | None = None  # which a copy to this server waits for

    @property
    def alive(self) -> bool:
        return not self.killed and not self.host.gone

    def check(self) -> None:
        if not self.alive:
            raise RankDied(f"server of {self.host.name}", "is gone")

    async def hold(self, mesh: str) -> Place:
        self.check()
        return Place(cast(ServerHandle, self), os.getpid(), self.parts.hold(mesh))

    async def stamped(self, fds: list[int], serial: int) -> list[bool]:
        self.check()
        found = await self.parts.stamped(fds, serial, 0.0)
        await asyncio.sleep(0)
        return found

    async def fetch(self, fd: int, serial: int, source: Place, nbytes: int = 0, rate: float = 0.0) -> int:
        server, part = cast(FakeServer, source.server), self.parts.part(fd)
        server.check()

        async def read(number: int, block: memoryview) -> None:
            if self.gate is not None:
                await self.gate.wait()
            self.check()
            server.check()
            block[:] = server.parts.part(source.fd).blocks[number]

        return await self.parts.fetch(part, await server.parts.offer(source.fd, serial), read, rate)

    async def drop(self, fds: list[int]) -> None:
        self.check()
        self.parts.drop(fds)


class FakeServers:
    def __init__(self, homes: list[Home]) -> None:
        self.homes, self.every = homes, dict[str, FakeServer]()
        self.started: list[FakeServer] = []  # a dead one's memory is freed by the kernel, but this process is alive

    async def of(self, host: Home) -> FakeServer:
        found = self.every.get(host.name)
        if found is None or not found.alive:
            found = self.every[host.name] = FakeServer(host)
            self.started.append(found)
        return found

    def peer_of(self, host: Home) -> Home:
        peer = peer_of(self.homes.index(host), ["" if each.gone else each.name for each in self.homes])
        return host if peer is None else self.homes[peer]


class Ranks:
    """A mesh whose ranks copy their state, which names the step and the rank, when `finish` is called."""

    def __init__(self, name: str, homes: list[Home]) -> None:
        self.name, self.dp, self.row_ranks, self.near = name, len(homes), 1, False
        self.homes = homes
        self.copying: list[tuple[int, int, bytes]] = []  # memory, serial, state

    @property
    def hosts(self) -> dict[str, Host]:
        return {f"{self.name}[dp={i}]": cast(Host, home) for i, home in enumerate(self.homes)}

    async def snapshot(self, snapshot: Snapshot) -> list[int]:
        for rank, part in enumerate(snapshot.parts(self.name)):
            self.copying.append((os.open(part.path, os.O_RDWR), part.serial, state(snapshot.step, rank)))
            os.pwrite(self.copying[-1][0], HEAD.pack(WRITING, 0, 0), 0)
        return [8] * self.dp

    def finish(self, ranks: int | None = None) -> None:
        """Let the oldest copies become whole: all of them, or some."""
        for _ in range(len(self.copying) if ranks is None else min(ranks, len(self.copying))):
            fd, serial, held = self.copying.pop(0)
            os.pwrite(fd, held, HEAD.size)
            os.pwrite(fd, HEAD.pack(serial, HEAD.size, HEAD.size + len(held)), 0)
            os.close(fd)


def state(step: int, rank: int) -> bytes:
    return f"the state of rank {rank} after step {step}".encode()


def restored(snapshot: Snapshot) -> list[bytes]:
    found: list[bytes] = []
    for part in snapshot.parts("trainer"):
        with open(part.path, "rb") as memory:
            serial, start, end = HEAD.unpack(memory.read(HEAD.size))
            assert serial == snapshot.serial
            memory.seek(start)
            found.append(memory.read(end - start))
    return found


@dataclass
class World:
    homes: list[Home]
    mesh: Ranks
    servers: FakeServers
    store: PeerSnapshots
    notes: list[str]

    @classmethod
    def of(cls, hosts: int, ranks: int) -> "World":
        homes = [Home(f"host{number}") for number in range(hosts)]
        mesh, servers, notes = Ranks("trainer", homes[:ranks]), FakeServers(homes), list[str]()
        store = PeerSnapshots(cast(ModelMesh, mesh), None, cast(SnapshotServers, servers), notes.append)
        return cls(homes, mesh, servers, store, notes)

    async def taken(self, step: int) -> None:
        """Take a snapshot, and wait until it is whole with its copies."""
        await self.store.take("rl", step, "{}")
        self.mesh.finish()
        await self.store.settle()

    async def half_taken(self, step: int, copier: str) -> asyncio.Event:
        """Take a snapshot whose parts are whole, and whose copy on one host waits for the event that is returned."""
        gate = self.servers.every[copier].gate = asyncio.Event()
        await self.store.take("rl", step, "{}")
        self.mesh.finish()
        for _ in range(100):
            await asyncio.sleep(0)
        return gate

    def newest(self) -> Snapshot:
        found = self.store.newest()
        assert found is not None
        return found

    def lose(self, home: Home) -> None:
        """Lose a host; its ranks move to the last host that is left."""
        home.gone = True
        left = [each for each in self.homes if not each.gone]
        self.mesh.homes = [left[-1] if each.gone else each for each in self.mesh.homes]


async def test_a_lost_host_costs_the_steps_since_the_snapshot() -> None:
    world = World.of(hosts=3, ranks=2)
    await world.taken(4)
    await world.taken(8)
    for lost in (0, 1):  # host 0's ranks move to host 2; then host 1's do
        world.lose(world.homes[lost])
        await world.store.settle()
        await world.store.bring()
        assert world.newest().step == 8
        assert restored(world.newest()) == [state(8, 0), state(8, 1)]
        await world.taken(8)  # the copies that were lost are made again
    assert world.notes == []


async def test_without_its_copies_a_snapshot_is_not_whole() -> None:
    world = World.of(hosts=2, ranks=1)
    await world.taken(1)
    gate = await world.half_taken(2, copier="host1")
    assert world.newest().step == 1, "the part is whole, its copy is not"
    await world.store.take("rl", 3, "{}")
    assert "no snapshot of step 3: step 2's is still being copied" in world.notes[0]
    await world.store.take("rl", 4, "{}")
    assert len(world.notes) == 1
    gate.set()
    await world.store.settle()
    assert world.newest().step == 2


async def test_a_host_that_is_lost_while_its_part_is_copied_leaves_the_snapshot_before() -> None:
    world = World.of(hosts=3, ranks=2)
    await world.taken(1)
    gate = await world.half_taken(2, copier="host1")
    world.lose(world.homes[0])
    gate.set()
    await world.store.settle()
    assert "the snapshot of step 2 has no copy on other hosts: server of host0 died" in world.notes[0]
    await world.store.bring()
    assert world.newest().step == 1
    assert restored(world.newest()) == [state(1, 0), state(1, 1)]


async def test_the_first_copy_that_fails_ends_the_others_and_leaves_no_memory() -> None:
    world = World.of(hosts=3, ranks=2)
    await world.taken(1)
    world.servers.every["host2"].gate = asyncio.Event()  # which is never set
    gate = await world.half_taken(2, copier="host1")
    assert len(world.servers.every["host2"].parts._parts) == 2
    world.lose(world.homes[0])
    gate.set()
    await world.store.settle()
    assert "the snapshot of step 2 has no copy on other hosts: server of host0 died" in world.notes[0]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(world.servers.every["host2"].parts._parts) == 1, "the copy of step 1"
    assert world.newest().step == 1


async def test_a_rank_that_dies_while_it_copies_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.of(hosts=2, ranks=2)
    await world.taken(1)
    await world.store.take("rl", 2, "{}")
    world.mesh.finish(ranks=1)
    monkeypatch.setattr(deaths, "_ends", {"trainer[dp=1]": "was killed by signal 9"})
    await world.store.settle()
    assert world.notes == ["the snapshot of step 2 has no copy on other hosts: trainer[dp=1] did not finish copying"]
    assert world.newest().step == 1
    monkeypatch.setattr(deaths, "_ends", {})
    await world.taken(3)  # into new memory: the dead rank's copy might still be written
    world.mesh.finish()
    assert restored(world.newest()) == [state(3, 0), state(3, 1)]


async def test_a_dead_server_is_replaced_and_both_dead_lose_the_snapshot() -> None:
    world = World.of(hosts=2, ranks=1)
    await world.taken(1)
    world.servers.every["host0"].killed = True
    assert world.store.newest() is not None, "its copy is alive"
    await world.store.bring()
    assert restored(world.newest()) == [state(1, 0)]
    await world.taken(2)
    for server in world.servers.every.values():
        server.killed = True
    assert world.store.newest() is None
    await world.store.bring()
    await world.taken(3)
    assert restored(world.newest()) == [state(3, 0)]


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("turns"), st.integers(1, 30)),
    st.tuples(st.just("snapshots"), st.integers(0, 3)),
    st.tuples(st.just("host"), st.integers(0, 3)),
    st.tuples(st.just("rewind"), st.just(0)),
)


@given(st.lists(EVENTS, max_size=25))
@settings(max_examples=3 * settings().max_examples)
def test_a_restored_snapshot_is_whole_after_any_deaths(events: list[tuple[str, int]]) -> None:
    async def run() -> None:
        world, step = World.of(hosts=4, ranks=3), 0
        for event, number in events:
            if event == "take":
                step += 1
                await world.store.take("rl", step, "{}")
            elif event == "finish":
                world.mesh.finish(number)
            elif event == "turns":
                for _ in range(number):
                    await asyncio.sleep(0)
            elif event == "snapshots" and f"host{number}" in world.servers.every:
                world.servers.every[f"host{number}"].killed = True
            elif event == "host" and sum(not home.gone for home in world.homes) > 2:
                world.lose(world.homes[number])
            if event in ("host", "rewind"):
                before = world.store.newest()
                world.mesh.finish()
                await world.store.settle()
                await world.store.bring()
                newest = world.store.newest()
                assert before is None or (newest is not None and newest.serial >= before.serial)
                if newest is not None:
                    assert restored(newest) == [state(newest.step, rank) for rank in range(3)]
                    world.store.forget(but=newest)
        world.mesh.finish()
        await world.store.settle()
        for server in world.servers.started:
            server.parts.drop(list(server.parts._parts))

    asyncio.run(run())


def test_the_peer_is_the_next_host_on_another_machine() -> None:
    assert [peer_of(host, ["a", "b", "c"]) for host in range(3)] == [1, 2, 0]
    assert [peer_of(host, ["a", "a", "b"]) for host in range(3)] == [2, 2, 0]
    assert [peer_of(host, ["a", "a", ""]) for host in range(2)] == [1, 0]
    assert peer_of(0, ["a", ""]) is None
    assert peer_of(0, ["a"]) is None
