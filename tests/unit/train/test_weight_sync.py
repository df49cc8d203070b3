"""Replicas that come back while the trainers are gone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.fake_engines import FakeEngine, fake_mesh, fake_replica
from support.weight_layouts import TINY, hf_sizes
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.replica import Replica
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RankDied, RankFailed
from titan_rl.wire.manifest import Publication
from titan_rl.wire.reports import ReaderCost, SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.weight_plan import Shard
from titan_rl.wire.weight_source import Connection, HostCopy

pytestmark = pytest.mark.usefixtures("no_ranks")


class FakeTrainers:
    """A mesh of one rank, which offers nothing but its generation."""

    def __init__(self) -> None:
        self.alive = 1  # the generation that can be read from; 0: none
        self.rosters: list[Any] = []
        self.places: Any = ()  # the readers' places, from `stage`

    async def shards(self) -> list[list[Shard]]:
        return [[Shard(name, 0, rows, 0, cols) for name, (rows, cols) in hf_sizes(TINY).items()]]

    async def stage(self, copies: Any, places: Any, sync: Any) -> list[Any]:
        self.places = places
        return [{0: self.alive}]

    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, roster: Any = None
    ) -> Publication:
        self.rosters.append(roster)
        return Publication(version, slot, [{}], 0.0, roster)


class Reader(FakeEngine):
    """Connects to trainers that are alive, and fails to open the memory of dead ones."""

    def __init__(self, trainers: FakeTrainers) -> None:
        super().__init__()
        self.trainers = trainers
        self.connects: Connection | None = None
        self.fell_back, self.gatherings = "", list[Any]()

    async def do_connect(self, sources: Any, sync: Any, siblings: Any, slot: int = 0) -> Connection:
        if [source.offer for source in sources] != [self.trainers.alive]:
            raise RankFailed("generator0[tp=0] failed in connect: FileNotFoundError", rank="generator0[tp=0]")
        return self.connects or await super().do_connect(sources, sync, siblings)

    async def do_fetch_weights(self, manifests: Any, timeout: float, gathering: Any, slot: int = 0) -> ReaderCost:
        self.gatherings.append(gathering)
        return ReaderCost(blocks=1, fell_back=self.fell_back)


async def running(trainers: FakeTrainers, folder: Path) -> tuple[GeneratorMesh, WeightSync, list[Reader]]:
    made = [Reader(trainers)]

    async def make(index: int, _: bool) -> Replica:
        made.append(Reader(trainers))
        return fake_replica(index, made[-1], mesh._policy)

    mesh = fake_mesh(made[:1], folder, make=make, max_restarts=1)
    await mesh.start()
    weights = WeightSync(trainers, mesh, Clock())  # type: ignore[arg-type]
    await weights.connect(c.Config(), TINY)
    await weights.sync(0)
    return mesh, weights, made


async def back(mesh: GeneratorMesh) -> None:
    while mesh.coming:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("known", [True, False])
async def test_a_replica_that_comes_back_before_the_trainers_costs_one_restart(tmp_path: Path, known: bool) -> None:
    """Whether the loss of the trainers is known when the replica connects, or only afterwards."""

    trainers = FakeTrainers()
    mesh, weights, made = await running(trainers, tmp_path)
    trainers.alive = 0
    if known:
        await weights.abandon(trainers_lost=True)
    made[0].dead.set_exception(RankDied("generator0[tp=0]", "was killed by signal 9"))
    await asyncio.sleep(0.1)
    await weights.abandon(trainers_lost=True)
    await asyncio.wait_for(back(mesh), 5)
    trainers.alive = 2
    await weights.connect(c.Config(), TINY)
    await weights.sync(0)
    assert mesh._policy.incidents is not None
    assert [incident.outcome for incident in mesh._policy.incidents.all] == ["back"]
    assert len(made) == 2
    assert [source.offer for source in made[1].connected[-1]] == [2]


@pytest.mark.parametrize(
    ("hosts", "sync", "places"),
    [
        (c.HostsSection(), c.WeightSyncSection(), ["here"]),
        (c.HostsSection(kind="attach", count=2), c.WeightSyncSection(), ["any host of the run", "here"]),
        (c.HostsSection(kind="attach", count=2), c.WeightSyncSection(transport="shm"), ["here"]),
    ],
)
async def test_trainers_can_be_read_from_hosts_that_have_no_replica_yet(
    tmp_path: Path, hosts: c.HostsSection, sync: c.WeightSyncSection, places: list[str]
) -> None:
    trainers = FakeTrainers()
    _, weights, _ = await running(trainers, tmp_path)
    await weights.connect(c.Config(hosts=hosts, weight_sync=sync), TINY)
    assert trainers.places == places


async def test_broadcasts_reach_another_roster_after_one_has_failed(tmp_path: Path) -> None:
    """The replica that receives them is another one then, or has another address."""
    trainers, warnings = FakeTrainers(), list[str]()
    mesh, weights, (reader,) = await running(trainers, tmp_path)
    weights._warn = warnings.append
    reader.connects = Connection(["broadcast (gloo)"], HostCopy("here", 1, 1, 1), broadcasts=(0,))
    await weights.connect(c.Config(), TINY)
    for failure in ("", "", "generator0[tp=0]: a socket closed", ""):
        reader.fell_back = failure
        await weights.sync(1)
    assert [roster and roster.epoch for roster in trainers.rosters] == [None, 1, 1, 1, 2]
    assert trainers.rosters[-1].replicas == {(0, 0): ("generator0",)}
    assert [gathering and gathering.epoch for gathering in reader.gatherings] == [None, 1, 1, 1, 2]
    (warning,) = warnings
    assert warning.endswith("read them one-sided, as their broadcast failed; generator0[tp=0]: a socket closed")
    publication = await weights.publish(2)
    mesh.replicas[0].name = "generator1"  # as if the other one had died since
    await weights.pull(publication)
    assert reader.gatherings[-1] is None, "its group would wait for the dead one"
    repacked = await weights.publish_again()
    assert repacked is not None
    assert repacked.roster is None


async def test_a_replica_that_cannot_connect_to_live_trainers_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_rl.train.weight_sync.LOSS_SECONDS", 0.05)

    trainers = FakeTrainers()
    mesh, _, made = await running(trainers, tmp_path)
    trainers.alive = 3  # its memory is not the one that was announced
    made[0].dead.set_exception(RankDied("generator0[tp=0]", "was killed by signal 9"))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(back(mesh), 5)
    assert mesh._policy.incidents is not None
    assert [incident.outcome for incident in mesh._policy.incidents.all] == ["given up"]


def test_the_frozen_weights_come_before_other_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first policy's sync moves them, and another policy may be ready earlier."""
    order = list[str]()

    async def pulled(sync: WeightSync, publication: Publication, *, forgives: bool = False) -> SyncStats:
        order.append(sync._generators.policy_name)
        return SyncStats(publication.version)

    monkeypatch.setattr(WeightSync, "_pull", pulled)

    async def work() -> None:
        trainers: Any = FakeTrainers()
        mesh, _, _ = await running(trainers, tmp_path)
        order.clear()
        first = WeightSync(trainers, mesh.of("a", 0), Clock())
        second = WeightSync(trainers, mesh.of("b", 1), Clock(), beside=[first])
        early = asyncio.create_task(second.pull(await trainers.publish(0, 0, 1)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not order
        await first.pull(await trainers.publish(0, 0, 1))
        await early
        assert order == ["a", "b"]

    asyncio.run(work())
