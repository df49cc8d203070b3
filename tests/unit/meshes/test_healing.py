"""Replicas for which there is no room, until there is."""

import asyncio
from pathlib import Path

import pytest

from support.fake_engines import FakeEngine, fake_mesh, fake_replica
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.replica import Replica
from titan_rl.wire.errors import RankDied, RankFailed, RunError

pytestmark = pytest.mark.usefixtures("no_ranks")


async def given_up(folder: Path) -> tuple[GeneratorMesh, list[bool]]:
    """Return a mesh that has given its second replica up, and a list that a test empties to make room."""
    engines, full = [FakeEngine(), FakeEngine()], [True]

    async def make(index: int, _: bool) -> Replica:
        if full:
            raise RunError(f"generator{index} cannot be started again: expected 1 more free slots")
        return fake_replica(index, FakeEngine(), mesh._policy)

    async def catch_up(_: Replica) -> None: ...

    mesh = fake_mesh(engines, folder, make=make, max_restarts=2)
    await mesh.start()
    mesh.tend(catch_up, lambda _: None)
    engines[1].dead.set_exception(RankDied("generator1[tp=0]", "is gone"))
    await settled(mesh)
    assert list(mesh.replicas) == [0]
    return mesh, full


async def settled(mesh: GeneratorMesh) -> None:
    async with asyncio.timeout(5):
        await asyncio.sleep(0.05)
        while mesh.coming:
            await asyncio.sleep(0.01)


async def test_a_replica_that_was_given_up_is_spawned_once_there_is_room(tmp_path: Path) -> None:
    mesh, full = await given_up(tmp_path)
    full.clear()
    mesh.regrow()
    await settled(mesh)
    assert sorted(mesh.replicas) == [0, 1]
    mesh.regrow()
    assert not mesh.coming, "nothing is missing any more"
    await mesh.close()


async def test_a_replica_that_does_not_start_is_tried_elsewhere(tmp_path: Path) -> None:
    engines, asked = [FakeEngine(), FakeEngine()], list[bool]()

    async def make(index: int, elsewhere: bool) -> Replica:
        asked.append(elsewhere)
        engines.append(Broken() if len(asked) == 1 else FakeEngine())
        replica = fake_replica(index, engines[-1], mesh._policy)
        replica.host = "host1" if elsewhere else "host0"
        return replica

    async def catch_up(_: Replica) -> None: ...

    mesh = fake_mesh(engines[:2], tmp_path, make=make, max_restarts=3)
    notes, incidents = list[str](), mesh._policy.incidents
    assert incidents is not None
    incidents.note = notes.append
    await mesh.start()
    mesh.tend(catch_up, lambda _: None)
    for asking in ([False, True], [False, True, False]):
        engines[-1].dead.set_exception(RankDied("generator1[tp=0]", "is gone"))
        await settled(mesh)
        assert asked == asking, "a replica that has served is tried where it was first"
    assert sorted(mesh.replicas) == [0, 1]
    assert notes.count("generator1 did not start on host0: it is tried on host1") == 1
    await mesh.close()


class Broken(FakeEngine):
    async def do_start(self) -> None:
        raise RankFailed("generator1[tp=0] failed in start: no GPU", rank="generator1[tp=0]")


async def test_a_replica_that_the_user_does_without_stays_away(tmp_path: Path) -> None:
    mesh, full = await given_up(tmp_path)
    assert await mesh.scale(1) == 1
    full.clear()
    mesh.regrow()
    assert not mesh.coming
    await mesh.close()
