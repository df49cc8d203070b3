"""Replicas of one host share their reads from other hosts: one makes the memory, and reads first."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.fake_engines import FakeEngine, fake_mesh, fake_replica
from titan_rl.config.sections import WeightSyncSection
from titan_rl.meshes.replica import Replica
from titan_rl.wire.errors import RankDied
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.weight_source import Connection, HostCopy

pytestmark = pytest.mark.usefixtures("no_ranks")

SYNC = WeightSyncSection()


class Reader(FakeEngine):
    """Shares the memory of the first of its siblings, or makes one. The first that fetches into it reads 100 bytes."""

    made = 0
    full: set[int]  # memories

    def __init__(self, place: str, events: list[str], name: str) -> None:
        super().__init__()
        self.where, self.events, self.name, self.fails = place, events, name, False

    async def do_place(self) -> str:
        return self.where

    async def do_connect(self, sources: Any, sync: Any, siblings: Any, slot: int = 0) -> Connection:
        await super().do_connect(sources, sync, siblings)
        Reader.made += not siblings
        self.memory = siblings[0].inode if siblings else Reader.made
        return Connection(["a link"], HostCopy(self.where, 1, 1, self.memory))

    async def do_fetch_weights(self, manifests: Any, timeout: float, note: Any, slot: int = 0) -> ReaderCost:
        self.events.append(f"{self.name} begins")
        await asyncio.sleep(0.01)
        if self.fails:
            raise RankDied("generator0[tp=0]", "was killed by signal 9")
        self.events.append(f"{self.name} ends")
        missing = self.memory not in Reader.full
        Reader.full.add(self.memory)
        return ReaderCost(bytes=100, remote=100 * missing, blocks=1)


async def test_one_replica_of_each_host_reads_before_the_others_and_another_one_if_it_fails(tmp_path: Path) -> None:
    events, Reader.full, Reader.made = list[str](), set[int](), 0
    engines = [Reader(place, events, name) for place, name in zip("xxxy", "abcd", strict=True)]
    came: list[Replica] = []

    async def make(index: int, _: bool) -> Replica:
        came.append(fake_replica(index, Reader("x", events, "e"), mesh._policy))
        return came[0]

    mesh = fake_mesh(engines, tmp_path, make=make, max_restarts=1)
    await mesh.start()
    mesh.tend(lambda replica: mesh.connect_late(replica, [[]], SYNC, 5), lambda name: None)
    assert await mesh.connect([[]], SYNC) == ["a link"] * 4
    assert (Reader.made, sorted(mesh.sharers)) == (2, [1, 3])
    cost = await mesh.pull(1, [[]])
    assert (cost.bytes, cost.into_host) == (400, 100)
    assert max(map(events.index, ("a ends", "d begins"))) < min(map(events.index, ("b begins", "c begins")))

    events.clear()
    Reader.full = set()
    engines[0].fails = True
    cost = await mesh.pull(2, [[]])
    assert cost.bytes == 300
    assert events[0] == "a begins"
    assert events.index("b begins") > 0
    assert {"b ends", "c ends", "d ends"} < set(events)

    while mesh.coming:
        await asyncio.sleep(0.01)
    assert mesh.replicas[0] is came[0]
    assert came[0].memory == mesh.replicas[1].memory
    assert Reader.made == 2


async def test_a_replica_to_which_weights_are_sent_is_the_first_of_its_host(tmp_path: Path) -> None:
    """Others have joined since the trainers began to send."""
    events, Reader.full, Reader.made = list[str](), set[int](), 0
    mesh = fake_mesh([Reader("x", events, name) for name in "ab"], tmp_path)
    await mesh.start()
    await mesh.connect([[]], SYNC)
    await mesh.pull(1, [[]], notes={"generator1": ["a note"]})
    assert events == ["b begins", "b ends", "a begins", "a ends"]


async def test_workers_on_one_machine_share_reads_unless_links_between_them_are_pretended(tmp_path: Path) -> None:
    ways = {1: WeightSyncSection(), 2: WeightSyncSection(transport="rdma")}
    for memories, sync in ways.items():
        Reader.full, Reader.made = set[int](), 0
        mesh = fake_mesh([Reader("x", [], name) for name in "ab"], tmp_path)
        for index, replica in mesh.replicas.items():
            replica.host = f"host{index}"
        await mesh.connect([[]], sync)
        assert len(mesh.sharers) == memories
