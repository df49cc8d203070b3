"""Replicas that are lost or slow at awkward moments."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.fake_engines import FakeEngine, fake_mesh
from support.weight_layouts import TINY
from titan_rl.actors.vllm.engine import Done
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import Replica
from titan_rl.wire.errors import DeadlinePassed, RankDied, RequestRefused, RunError
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.types import Completion, Request, Sampling

pytestmark = pytest.mark.usefixtures("no_ranks")

DIED = RankDied("generator1[tp=0]", "was killed by signal 9")


async def serving(mesh: GeneratorMesh) -> None:
    async def catch_up(_: object) -> None: ...

    await mesh.start()
    mesh.tend(catch_up, lambda _: None)
    await mesh.pull(0)


async def cancelled_groups(mesh: GeneratorMesh, engines: list[FakeEngine], count: int = 6) -> None:
    """Issue groups and give them up while every engine is amid a step."""
    asked = [asyncio.create_task(mesh.generate(Request(f"r{i}", [1], [1, 2], Sampling(8)))) for i in range(count)]
    await asyncio.sleep(0.02)
    for engine in engines:
        engine.steps.clear()
    for task in asked:
        task.cancel()
    await asyncio.sleep(0.02)


def test_a_replica_lost_with_withdrawals_queued_holds_up_no_pull(tmp_path: Path) -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        mesh = fake_mesh(engines, tmp_path, max_restarts=0, seconds=60, hang_seconds=60)
        await serving(mesh)
        await cancelled_groups(mesh, engines)
        engines[1].dead.set_exception(DIED)
        await asyncio.sleep(0.02)
        engines[0].steps.set()
        stats = await asyncio.wait_for(mesh.pull(1), 5)
        assert list(stats.engines) == ["generator0"]
        assert sum(map(len, engines[0].withdrawn)) == 3

    asyncio.run(body())


def test_withdrawals_that_wait_are_one_call(tmp_path: Path) -> None:
    """Each call takes a step of the engine, which may be long."""

    async def body() -> None:
        engines = [FakeEngine()]
        mesh = fake_mesh(engines, tmp_path)
        await serving(mesh)
        await cancelled_groups(mesh, engines, 9)
        engines[0].steps.set()
        await asyncio.wait_for(mesh.pull(1), 5)
        assert [sorted(ids) for ids in engines[0].withdrawn] == [[f"r{i}" for i in range(9)]]

    asyncio.run(body())


def test_what_a_retiring_replica_gives_back_enters_another_engine_before_that_switches(tmp_path: Path) -> None:
    """An engine that drains finishes it on the old weights."""

    class Ordered(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[str] = []

        async def do_submit(self, requests: list[Request], withdrawn: Sequence[str]) -> None:
            await super().do_submit(requests, withdrawn)
            self.events += [request.id for request in requests]

        async def do_switch(self, version: int, timeout: float, slot: int = 0) -> ReaderCost:
            self.events.append(f"switch to {version}")
            return await super().do_switch(version, timeout)

    async def body() -> None:
        engines = [Ordered(), FakeEngine()]
        mesh = fake_mesh(engines, tmp_path, make=no_room)
        await serving(mesh)
        asked = [asyncio.create_task(mesh.generate(Request(f"r{i}", [1], [1, 2], Sampling(8)))) for i in range(2)]
        await asyncio.sleep(0.02)
        engines[1].steps.clear()
        scaling, pulling = asyncio.create_task(mesh.scale(1)), asyncio.create_task(mesh.pull(1))
        await asyncio.sleep(0.1)
        assert engines[0].events == ["switch to 0", "r0"]
        engines[1].steps.set()
        await asyncio.gather(scaling, pulling)
        assert engines[0].events == ["switch to 0", "r0", "r1~1", "switch to 1"]
        assert list(mesh.replicas) == [0]
        for task in asked:
            task.cancel()

    asyncio.run(asyncio.wait_for(body(), 30))


async def no_room(index: int, _: bool) -> Replica:
    raise RunError(f"generator{index} cannot be started")


def test_a_replica_that_never_gives_back_is_lost_by_name(tmp_path: Path) -> None:
    """Its engine steps for ever, and its calls have longer deadlines."""

    async def body() -> None:
        engines = [FakeEngine(), FakeEngine()]
        mesh = fake_mesh(engines, tmp_path, make=no_room, seconds=0.3, hang_seconds=60)
        await serving(mesh)
        asked = [asyncio.create_task(mesh.generate(Request(f"r{i}", [1], [1, 2], Sampling(8)))) for i in range(2)]
        await asyncio.sleep(0.02)
        engines[1].steps.clear()
        scaling = asyncio.create_task(mesh.scale(1))
        await asyncio.sleep(0.02)
        stats = await asyncio.wait_for(mesh.pull(1), 5)
        assert list(stats.engines) == ["generator0"]
        (incident,) = mesh._policy.incidents.all  # type: ignore[union-attr]
        assert incident.reason == "generator1 did not give back its samples within 0.3 s"
        assert await scaling == 1
        await asyncio.sleep(0.02)
        assert [request.id for request in engines[0].requests] == ["r0", "r1~1"]
        for task in asked:
            task.cancel()

    asyncio.run(body())


def test_a_replica_that_still_imports_is_not_hung(tmp_path: Path) -> None:
    """Until it serves its first weights, its calls have the start-up deadline; then the deadline of a hang applies."""

    async def body() -> None:
        engines = [FakeEngine()]
        mesh = fake_mesh(engines, tmp_path, init_seconds=30, hang_seconds=0.1)
        await mesh.start()
        mesh.tend(lambda _: asyncio.sleep(0), lambda _: None)
        engines[0].steps.clear()
        await asyncio.sleep(0.5)
        assert mesh.replicas[0].error is None
        engines[0].steps.set()
        await mesh.pull(0)
        await asyncio.sleep(0.2)  # the call that was made before is answered
        assert mesh.replicas[0].error is None
        replica = mesh.replicas[0]
        engines[0].steps.clear()
        await asyncio.sleep(0.5)
        assert "generator0[tp=0].take did not answer within" in str(replica.error)

    asyncio.run(body())


def test_the_first_weights_have_the_start_up_deadline_too(tmp_path: Path) -> None:
    class Importing(FakeEngine):
        async def do_switch(self, version: int, timeout: float, slot: int = 0) -> ReaderCost:
            await asyncio.sleep(0.3 if version == 0 else 0)
            return await super().do_switch(version, timeout)

    async def body() -> None:
        mesh = fake_mesh([Importing()], tmp_path, init_seconds=30, seconds=0.05)
        await mesh.start()
        for version in (0, 1):
            assert list((await mesh.pull(version)).engines) == ["generator0"]

    asyncio.run(body())


def test_the_first_call_of_a_verb_to_a_model_has_the_start_up_deadline() -> None:
    """It imports, compiles and allocates; so does the first one after a respawn."""

    class Importing(FakeEngine):
        async def do_shards(self) -> list[object]:
            await asyncio.sleep(1.5)
            return []

    async def body() -> None:
        config = c.Config(comm=c.CommSection(init_timeout_seconds=30, train_timeout_seconds=1))
        mesh = ModelMesh(None, "trainer", config, TINY, {})  # type: ignore[arg-type]
        mesh._ranks = {"trainer[dp=0 tp=0]": Importing()}
        assert await mesh.shards() == [[]]
        with pytest.raises(DeadlinePassed, match=r"shards did not answer within 1 s"):
            await mesh.shards()

    asyncio.run(body())


def test_a_request_that_cannot_be_sampled_is_its_own_failure(tmp_path: Path) -> None:
    async def body() -> None:
        engine = FakeEngine()
        mesh = fake_mesh([engine], tmp_path)
        await serving(mesh)
        asked = [asyncio.create_task(mesh.generate(Request(id, [1], [1], Sampling(8)))) for id in ("long", "fine")]
        await asyncio.sleep(0.02)
        engine.done.put_nowait(Done("long", [], "69 tokens and 4 new ones exceed 32"))
        with pytest.raises(RequestRefused, match="request long: 69 tokens and 4 new ones exceed 32"):
            await asked[0]
        engine.done.put_nowait(Done("fine", [Completion([1], [0.0], [0], "stop")]))
        assert [completion.tokens for completion in await asked[1]] == [[1]]
        assert mesh.replicas[0].error is None
        assert (await asyncio.wait_for(mesh.pull(1), 5)).refused == ()

    asyncio.run(body())


def test_engines_switch_after_all_have_fetched(tmp_path: Path) -> None:
    called: list[str] = []

    class Counting(FakeEngine):
        def __getattr__(self, verb: str) -> Any:
            endpoint = super().__getattr__(verb)
            called.append(verb)
            return endpoint

    async def body() -> None:
        mesh = fake_mesh([Counting(), Counting()], tmp_path)
        await mesh.start()
        called.clear()
        assert len((await mesh.pull(3)).engines) == 2
        pulling = [verb for verb in called if verb in ("fetch_weights", "switch")]
        assert pulling == ["fetch_weights"] * 2 + ["switch"] * 2

    asyncio.run(body())
