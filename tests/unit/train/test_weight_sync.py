"""Replicas that come back while the trainers are gone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.fake_trainers import FakeTrainers, running
from support.weight_layouts import TINY
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RankDied
from titan_rl.wire.manifest import Publication
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.spans import Clock

pytestmark = pytest.mark.usefixtures("no_ranks")


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


async def test_new_trainers_connect_while_no_replica_lives(tmp_path: Path) -> None:
    mesh, weights, _ = await running(FakeTrainers(), tmp_path)
    mesh.replicas.clear()
    assert (await weights.connect(c.Config(), TINY)).readers == 1


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
