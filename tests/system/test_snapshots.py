"""Snapshots of real trainer and critic meshes: their content, and the steps of a mesh restored from one."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from support.trainer_cases import LAYOUTS, batches, config, samples
from tests.support.signals import stop
from titan_rl.config.sections import (
    CheckpointSection,
    Config,
    CriticSection,
    LRSchedulerSection,
    OptimizerSection,
    ParallelismSection,
    TrainingSection,
)
from titan_rl.ext.snapshots.sizes import snapshot_bytes
from titan_rl.ext.snapshots.snapshot_parts import WRITING, head
from titan_rl.ext.snapshots.snapshot_store import SnapshotStore
from titan_rl.meshes import deaths
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.errors import RankFailed
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import Snapshot

ONE = ParallelismSection()
LARGE = {"dim": 512, "n_heads": 8, "n_kv_heads": 8, "hidden_dim": 2048, "n_layers": 4}  # 100 MB of state a rank of two
SECONDS = 60.0


def moving(folder: Path, parallelism: ParallelismSection) -> Config:
    """Return a config in which every part of the state changes at every step, the learning rate included."""
    return replace(
        config(folder, parallelism),
        training=TrainingSection(steps=6, seq_len=64, local_batch_size=2),
        optimizer=OptimizerSection(lr=1e-3, weight_decay=0.01),
        lr_scheduler=LRSchedulerSection(warmup_steps=3, decay_ratio=0.5),
    )


@asynccontextmanager
async def trainers(config: Config) -> AsyncIterator[ModelMesh]:
    from monarch.actor import this_host

    mesh = ModelMesh(this_host(), "trainer", config, shape_of(config.model), {})
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def both(config: Config, weights: Path) -> AsyncIterator[tuple[ModelMesh, ModelMesh]]:
    """Yield a policy and a critic that have begun."""
    from monarch.actor import this_host

    async with trainers(config) as policy:
        critic = ModelMesh(this_host(), "critic", config, shape_of(config.model).with_value_head(), {})
        try:
            await critic.start()
            assert await policy.begin_phase("rl", 0) == (0, "{}")
            await policy.export(str(weights))
            write_model_folder(weights, shape_of(config.model))
            await critic.load_weights(str(weights))
            await critic.begin_phase("rl", 0)
            yield policy, critic
        finally:
            await critic.stop()


async def step(mesh: ModelMesh, at: int) -> StepStats:
    stats = await mesh.step([batches(samples(at), mesh)])
    return replace(stats, seconds=0.0, busy=0.0, ranks={}, hardware={})


async def steps(mesh: ModelMesh, first: int, last: int) -> list[StepStats]:
    return [await step(mesh, at) for at in range(first, last)]


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def stamps(snapshot: Snapshot) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for mesh, paths in snapshot.paths.items():
        for path in paths:
            with open(path, "rb") as part:
                found.setdefault(mesh, []).append(head(part.fileno())[0])
    return found


@pytest.mark.parametrize(
    "layout",
    [ONE, LAYOUTS["fsdp2"], LAYOUTS["tp2"], LAYOUTS["cp2"]],
    ids=["one", "fsdp2", "tp2", "cp2"],
)
def test_a_killed_mesh_goes_on_from_a_snapshot_to_the_last_bit(layout: ParallelismSection, tmp_path: Path) -> None:
    async def run() -> None:
        async with trainers(moving(tmp_path, layout)) as mesh:
            assert await mesh.begin_phase("rl", 0) == (0, "{}")
            snapshots = SnapshotStore(mesh, None)
            assert snapshots.newest() is None
            await steps(mesh, 0, 2)
            await snapshots.take("rl", 2, '{"next": 24}')
            uninterrupted = await steps(mesh, 2, 6)
            snapshot = snapshots.newest()
            assert snapshot is not None
            assert (snapshot.phase, snapshot.step, snapshot.controller) == ("rl", 2, '{"next": 24}')
            for pid in deaths.alive().values():
                os.kill(pid, signal.SIGKILL)
            await mesh.respawn()
            assert await mesh.begin_phase("rl", snapshot) == (2, '{"next": 24}')
            assert await steps(mesh, 2, 6) == uninterrupted
            assert await mesh.begin_phase("rl", snapshot) == (2, '{"next": 24}')  # as often as needed
            await mesh.accumulate(batches(samples(9), mesh))  # half a step, interrupted by another mesh's death
            assert await mesh.begin_phase("rl", snapshot) == (2, '{"next": 24}')
            assert await steps(mesh, 2, 6) == uninterrupted
            assert len({stats.loss for stats in uninterrupted}) == 4
            assert len({stats.lr for stats in uninterrupted}) > 1

    asyncio.run(run())


def test_a_checkpoint_that_is_written_anew_does_not_count_until_it_is_whole(tmp_path: Path) -> None:
    """After a rewind to an earlier step. DCP itself would leave the old .metadata next to the first new files."""

    async def run() -> None:
        async with trainers(moving(tmp_path, LAYOUTS["fsdp2"])) as mesh:
            await mesh.begin_phase("rl", 0)
            snapshots = SnapshotStore(mesh, None)
            await snapshots.take("rl", 0, "{}")
            await steps(mesh, 0, 1)
            await mesh.save(1, "{}")
            counts = tmp_path / "checkpoint" / "step-1" / ".metadata"
            assert counts.exists()
            snapshot = snapshots.newest()
            assert snapshot is not None
            await mesh.begin_phase("rl", snapshot)
            await steps(mesh, 0, 1)
            late = deaths.alive()["trainer[dp=1 tp=0]"]
            stop(late)
            saving = asyncio.ensure_future(mesh.save(1, '{"again": true}'))
            await until(lambda: not counts.exists())
            os.kill(late, signal.SIGCONT)
            await saving
            assert counts.exists()
            assert await mesh.begin_phase("rl", 1) == (1, '{"again": true}')

    asyncio.run(run())


def test_a_snapshot_of_no_step_yet_changes_nothing(tmp_path: Path) -> None:
    """TorchTitan creates an optimizer's state at its first use, and counts that as a step."""

    async def run() -> None:
        async with trainers(moving(tmp_path, ONE)) as mesh:
            await mesh.begin_phase("rl", 0)
            snapshots = SnapshotStore(mesh, None)
            await snapshots.take("rl", 0, "{}")
            with_snapshot = await steps(mesh, 0, 2)
            await mesh.respawn()
            await mesh.begin_phase("rl", 0)
            assert await steps(mesh, 0, 2) == with_snapshot

    asyncio.run(run())


def test_a_snapshot_holds_all_that_a_checkpoint_holds(tmp_path: Path) -> None:
    async def run() -> None:
        async with trainers(moving(tmp_path, ONE)) as mesh:
            await mesh.begin_phase("rl", 0)
            await steps(mesh, 0, 1)
            await mesh.save(1, "{}")
            snapshots = SnapshotStore(mesh, None)
            await snapshots.take("rl", 1, "{}")
            await until(lambda: snapshots.newest() is not None)
            snapshot = snapshots.newest()
            assert snapshot is not None
            with open(snapshot.paths["trainer"][0], "rb") as part:
                _, start, end = head(part.fileno())
                rest = json.loads(os.pread(part.fileno(), end - start, start))
            kept = {name.removeprefix("model/").replace("/", ".") for name in {**rest["layout"], **rest["values"]}}
            metadata = FileSystemReader(tmp_path / "checkpoint" / "step-1").read_metadata()
            assert kept == metadata.state_dict_metadata.keys() - {"dataloader"}  # there is none
            parameters = shape_of(mesh_config.model).parameters
            ranks = snapshots.nbytes["trainer"]
            assert 2 * sum(ranks) == pytest.approx(snapshot_bytes(parameters, 12, 1), rel=0.01)

    mesh_config = moving(tmp_path, ONE)
    asyncio.run(run())


def test_a_rank_killed_in_the_midst_of_a_copy_leaves_the_snapshot_before(tmp_path: Path) -> None:
    """For every mesh, though the others' copies are whole. What a rank still writes does not touch later snapshots."""
    base = config(tmp_path, LAYOUTS["fsdp2"])
    large = replace(base, model=replace(base.model, **LARGE), critic=CriticSection(lr=1e-3))

    async def run() -> None:
        async with both(large, tmp_path / "weights") as (policy, critic):
            snapshots, at = SnapshotStore(policy, critic), 0

            async def advance() -> list[StepStats]:
                return list(await asyncio.gather(step(policy, at), step(critic, at)))

            async def interrupted(victims: list[int]) -> Snapshot:
                """Stop the victims while one of them copies; return that snapshot."""
                nonlocal at
                for _ in range(20):
                    await advance()
                    at += 1
                    await snapshots.take("rl", at, json.dumps({"next": at}))
                    for victim in victims:
                        stop(victim)
                    torn = snapshots._entries[-1].snapshot
                    if WRITING in stamps(torn)["trainer"]:
                        return torn
                    for victim in victims:
                        os.kill(victim, signal.SIGCONT)
                    await until(lambda at=at: whole(at))
                raise AssertionError("no rank was stopped while it copied")

            def whole(at: int) -> bool:
                newest = snapshots.newest()
                return newest is not None and newest.step == at

            await advance()
            at = 1
            await snapshots.take("rl", at, '{"next": 1}')
            await until(lambda: whole(1))

            victim = deaths.alive()["trainer[dp=1 tp=0]"]
            torn = await interrupted([victim])
            await until(lambda: set(stamps(torn)["critic"]) == {torn.serial})
            before = snapshots.newest()
            assert before is not None
            assert (before.step, before.controller) == (at - 1, json.dumps({"next": at - 1}))
            assert {serial for each in stamps(before).values() for serial in each} == {before.serial}
            os.kill(victim, signal.SIGKILL)
            await policy.respawn()
            assert await policy.begin_phase("rl", before) == (at - 1, before.controller)
            await critic.begin_phase("rl", before)  # it is alive, and is restored all the same
            snapshots.forget(but=before)
            assert snapshots.newest() is before
            at = before.step
            again = await advance()

            # The same from the same snapshot; this time every rank dies.
            await asyncio.gather(policy.respawn(), critic.respawn())
            await policy.begin_phase("rl", before)
            await critic.begin_phase("rl", before)
            assert await advance() == again

            # A stopped rank that continues writes to parts that are not read any more.
            at += 1
            victims = [pid for name, pid in deaths.alive().items() if name.startswith("trainer")]
            await interrupted(victims)
            newest = snapshots.newest()
            assert newest is not None
            snapshots.forget(but=newest)
            kept = [Path(path).read_bytes() for path in newest.paths["trainer"]]
            for pid in victims:
                os.kill(pid, signal.SIGCONT)
            await policy.begin_phase("rl", newest)
            assert [Path(path).read_bytes() for path in newest.paths["trainer"]] == kept

    asyncio.run(run())


def test_weights_are_exchanged_only_behind_the_copy(tmp_path: Path) -> None:
    """A reference's shards are in the policy's tensors while it scores, and a step changes those."""
    base = config(tmp_path, LAYOUTS["fsdp2"])
    large = replace(base, model=replace(base.model, **LARGE))

    async def run() -> None:
        async with trainers(large) as mesh:
            await mesh.begin_phase("rl", 0)
            await mesh.export(str(tmp_path / "start"))
            await steps(mesh, 0, 1)
            snapshots = SnapshotStore(mesh, None)

            async def taken(then: Callable[[], Awaitable[Any]]) -> list[bytes]:
                snapshots.forget()
                await snapshots.take("rl", 1, "{}")
                await then()
                await until(lambda: snapshots.newest() is not None)
                newest = snapshots.newest()
                assert newest is not None
                return [Path(path).read_bytes()[4096:] for path in newest.paths["trainer"]]

            undisturbed = await taken(lambda: asyncio.sleep(0))
            assert await taken(lambda: mesh.load_weights(str(tmp_path / "start"), "reference")) == undisturbed
            asked = batches(samples(0), mesh)
            assert await taken(lambda: mesh.scores(asked, 1.0, "reference")) == undisturbed
            assert await taken(lambda: mesh.step([asked])) == undisturbed

    asyncio.run(run())


def test_a_snapshot_goes_back_to_its_own_phase_and_layout_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with trainers(replace(moving(tmp_path, ONE), checkpoint=CheckpointSection(enable=False))) as mesh:
            await mesh.begin_phase("cold_start", 0)
            await mesh.step([batches(samples(0), mesh)])
            snapshots = SnapshotStore(mesh, None)
            await snapshots.take("cold_start", 1, "{}")
            await until(lambda: snapshots.newest() is not None)
            snapshot = snapshots.newest()
            assert snapshot is not None
            with pytest.raises(ValueError, match="expected a snapshot of phase rl, found one of cold_start"):
                await mesh.begin_phase("rl", snapshot)
            assert await mesh.begin_phase("cold_start", snapshot) == (1, "{}")
            with pytest.raises(RankFailed) as stale:
                await mesh.begin_phase("cold_start", replace(snapshot, serial=7))
            assert "expected snapshot 7, found the stamp 1" in stale.value.details
            snapshots.forget()
            with pytest.raises(RankFailed) as gone:
                await mesh.begin_phase("cold_start", snapshot)
            assert "expected memory for snapshots at /proc/" in gone.value.details

    asyncio.run(run())
