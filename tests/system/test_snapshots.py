"""State in memory that outlives its processes: what is kept, what is never taken for whole, and what comes of it."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from support.trainer_cases import LAYOUTS, batches, config, samples
from titan_rl.actors.titan.state_copy import StateCopy
from titan_rl.config.sections import (
    CheckpointSection,
    Config,
    CriticSection,
    LRSchedulerSection,
    OptimizerSection,
    ParallelismSection,
    TrainingSection,
)
from titan_rl.meshes import deaths
from titan_rl.meshes.model_mesh import TrainedMesh
from titan_rl.meshes.roles import CriticMesh
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.preflight.setup import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.errors import RankFailed
from titan_rl.wire.snapshot import HEAD, WRITING, Snapshot, SnapshotPart, head, snapshot_bytes
from titan_rl.wire.types import StepStats

ONE = ParallelismSection()
LARGE = {"dim": 512, "n_heads": 8, "n_kv_heads": 8, "hidden_dim": 2048, "n_layers": 4}  # 100 MB of state a rank of two
SECONDS = 60.0


def moving(folder: Path, parallelism: ParallelismSection, **optimizer: Any) -> Config:
    """Every part of the state changes at every step: the rate, too."""
    return replace(
        config(folder, parallelism),
        training=TrainingSection(steps=6, seq_len=64, local_batch_size=2),
        optimizer=OptimizerSection(lr=1e-3, weight_decay=0.01, **optimizer),
        lr_scheduler=LRSchedulerSection(warmup_steps=3, decay_ratio=0.5),
    )


@asynccontextmanager
async def trainers(config: Config) -> AsyncIterator[TrainerMesh]:
    from monarch.actor import this_host

    mesh = await TrainerMesh.spawn(this_host(), config, shape_of(config.model), {})
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def both(config: Config, weights: Path) -> AsyncIterator[tuple[TrainerMesh, CriticMesh]]:
    """A policy and a critic, begun."""
    from monarch.actor import this_host

    async with trainers(config) as policy:
        critic = await CriticMesh.spawn(this_host(), config, shape_of(config.model), {})
        try:
            await critic.start()
            assert await policy.begin("rl") == (0, "{}")
            await policy.export(str(weights))
            write_model_folder(weights, shape_of(config.model))
            await critic.begin(str(weights), 0)
            yield policy, critic
        finally:
            await critic.stop()


async def step(mesh: TrainedMesh, at: int) -> StepStats:
    stats = await mesh.step([batches(samples(at), mesh)])
    return replace(stats, seconds=0.0, busy=0.0, ranks={}, hardware={})


async def steps(mesh: TrainedMesh, first: int, last: int) -> list[StepStats]:
    return [await step(mesh, at) for at in range(first, last)]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        pass


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
    ("layout", "optimizer"),
    [
        (ONE, {"name": "Adam", "implementation": "for-loop"}),
        (LAYOUTS["fsdp2"], {"implementation": "foreach"}),
        (LAYOUTS["tp2"], {}),
    ],
    ids=["one", "fsdp2", "tp2"],
)
def test_a_killed_mesh_goes_on_from_a_snapshot_to_the_last_bit(
    layout: ParallelismSection, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    async def run() -> None:
        async with trainers(moving(tmp_path, layout, **optimizer)) as mesh:
            assert await mesh.begin("rl") == (0, "{}")
            snapshots = Snapshots(mesh, None)
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
            assert await mesh.begin("rl", snapshot) == (2, '{"next": 24}')
            assert await steps(mesh, 2, 6) == uninterrupted
            assert await mesh.begin("rl", snapshot) == (2, '{"next": 24}')  # and as often as one likes
            await mesh.accumulate(batches(samples(9), mesh))  # half a step, cut short by another mesh's death
            assert await mesh.begin("rl", snapshot) == (2, '{"next": 24}')
            assert await steps(mesh, 2, 6) == uninterrupted
            assert len({stats.loss for stats in uninterrupted}) == 4
            assert len({stats.lr for stats in uninterrupted}) > 1

    asyncio.run(run())


def test_a_checkpoint_that_is_written_anew_does_not_count_until_it_is_whole(tmp_path: Path) -> None:
    """After a rewind behind it. DCP itself would leave the old one's .metadata beside the new one's first files."""

    async def run() -> None:
        async with trainers(moving(tmp_path, LAYOUTS["fsdp2"])) as mesh:
            await mesh.begin("rl")
            snapshots = Snapshots(mesh, None)
            await snapshots.take("rl", 0, "{}")
            await steps(mesh, 0, 1)
            await mesh.save(1, "{}")
            counts = tmp_path / "checkpoint" / "step-1" / ".metadata"
            assert counts.exists()
            await mesh.begin("rl", snapshots.newest())
            await steps(mesh, 0, 1)
            late = deaths.alive()["trainer[dp=1 tp=0]"]
            stop(late)
            saving = asyncio.ensure_future(mesh.save(1, '{"again": true}'))
            await until(lambda: not counts.exists())
            os.kill(late, signal.SIGCONT)
            await saving
            assert counts.exists()
            assert await mesh.begin("rl") == (1, '{"again": true}')

    asyncio.run(run())


def test_a_snapshot_of_no_step_yet_changes_nothing(tmp_path: Path) -> None:
    """TorchTitan makes an optimizer's state when it is first asked for it, and counts that as a step."""

    async def run() -> None:
        async with trainers(moving(tmp_path, ONE)) as mesh:
            await mesh.begin("rl")
            snapshots = Snapshots(mesh, None)
            await snapshots.take("rl", 0, "{}")
            with_snapshot = await steps(mesh, 0, 2)
            await mesh.respawn()
            await mesh.begin("rl")
            assert await steps(mesh, 0, 2) == with_snapshot

    asyncio.run(run())


def test_a_snapshot_holds_all_that_a_checkpoint_holds(tmp_path: Path) -> None:
    async def run() -> None:
        async with trainers(moving(tmp_path, ONE)) as mesh:
            await mesh.begin("rl")
            await steps(mesh, 0, 1)
            await mesh.save(1, "{}")
            snapshots = Snapshots(mesh, None)
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
            assert 2 * sum(ranks) == pytest.approx(snapshot_bytes(parameters, "float32", 1), rel=0.01)

    mesh_config = moving(tmp_path, ONE)
    asyncio.run(run())


def test_a_rank_killed_in_the_midst_of_a_copy_leaves_the_snapshot_before(tmp_path: Path) -> None:
    """Of every mesh, though the others' copies are whole. What a rank goes on writing does not touch what follows."""
    base = config(tmp_path, LAYOUTS["fsdp2"])
    large = replace(base, model=replace(base.model, **LARGE), critic=CriticSection(lr=1e-3))

    async def run() -> None:
        async with both(large, tmp_path / "weights") as (policy, critic):
            snapshots, at = Snapshots(policy, critic), 0

            async def advance() -> list[StepStats]:
                return list(await asyncio.gather(step(policy, at), step(critic, at)))

            async def interrupted(victims: list[int]) -> Snapshot:
                """The snapshot whose copying stands still in one of the victims, which are stopped."""
                nonlocal at
                for _ in range(20):
                    await advance()
                    at += 1
                    await snapshots.take("rl", at, json.dumps({"next": at}))
                    for victim in victims:
                        stop(victim)
                    torn = snapshots._taken[-1].snapshot
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
            assert await policy.begin("rl", before) == (at - 1, before.controller)
            await critic.begin("", at - 1, before)  # it lives, and goes back all the same
            snapshots.forget(but=before)
            assert snapshots.newest() is before
            at = before.step
            again = await advance()

            # The same from the same snapshot; this time all of it dies.
            await asyncio.gather(policy.respawn(), critic.respawn())
            await policy.begin("rl", before)
            await critic.begin("", at, before)
            assert await advance() == again

            # A stopped rank that goes on writes to parts that nobody reads any more.
            at += 1
            victims = [pid for name, pid in deaths.alive().items() if name.startswith("trainer")]
            await interrupted(victims)
            newest = snapshots.newest()
            assert newest is not None
            snapshots.forget(but=newest)
            kept = [Path(path).read_bytes() for path in newest.paths["trainer"]]
            for pid in victims:
                os.kill(pid, signal.SIGCONT)
            await policy.begin("rl", newest)
            assert [Path(path).read_bytes() for path in newest.paths["trainer"]] == kept

    asyncio.run(run())


def test_weights_are_exchanged_only_behind_the_copy(tmp_path: Path) -> None:
    """A reference's shards lie in the policy's tensors while it scores, and a step changes them."""
    base = config(tmp_path, LAYOUTS["fsdp2"])
    large = replace(base, model=replace(base.model, **LARGE))

    async def run() -> None:
        async with trainers(large) as mesh:
            await mesh.begin("rl")
            await mesh.export(str(tmp_path / "start"))
            await steps(mesh, 0, 1)
            snapshots = Snapshots(mesh, None)

            async def taken(then: Callable[[], Awaitable[Any]]) -> list[bytes]:
                snapshots.forget()
                await snapshots.take("rl", 1, "{}")
                await then()
                await until(lambda: snapshots.newest() is not None)
                newest = snapshots.newest()
                assert newest is not None
                return [Path(path).read_bytes()[4096:] for path in newest.paths["trainer"]]

            undisturbed = await taken(lambda: asyncio.sleep(0))
            assert await taken(lambda: mesh.freeze("reference", str(tmp_path / "start"))) == undisturbed
            asked = batches(samples(0), mesh)
            assert await taken(lambda: mesh.scores(asked, "reference", 1.0)) == undisturbed
            assert await taken(lambda: mesh.step([asked])) == undisturbed

    asyncio.run(run())


def test_a_snapshot_goes_back_to_its_own_phase_and_layout_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with trainers(replace(moving(tmp_path, ONE), checkpoint=CheckpointSection(enable=False))) as mesh:
            await mesh.begin("cold_start")
            await mesh.step([batches(samples(0), mesh)])
            snapshots = Snapshots(mesh, None)
            await snapshots.take("cold_start", 1, "{}")
            await until(lambda: snapshots.newest() is not None)
            snapshot = snapshots.newest()
            assert snapshot is not None
            with pytest.raises(ValueError, match="expected a snapshot of phase rl, found one of cold_start"):
                await mesh.begin("rl", snapshot)
            assert await mesh.begin("cold_start", snapshot) == (1, "{}")
            with pytest.raises(RankFailed) as stale:
                await mesh.begin("cold_start", replace(snapshot, serial=7))
            assert "expected snapshot 7, found the stamp 1" in stale.value.details
            snapshots.close()
            with pytest.raises(RankFailed) as gone:
                await mesh.begin("cold_start", snapshot)
            assert "expected the controller's memory for snapshots at /proc/" in gone.value.details

    asyncio.run(run())


# -- one rank's part ----------------------------------------------------------------------------------------------


class Values:
    """A state that is no module's."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


@pytest.fixture
def part() -> Iterator[SnapshotPart]:
    fd = os.memfd_create("titan_rl test")
    yield SnapshotPart(f"/proc/{os.getpid()}/fd/{fd}", 1)
    os.close(fd)


def test_values_of_every_kind_come_back_as_they_were(part: SnapshotPart) -> None:
    kinds = {
        "float32": torch.randn(3, 5),
        "transposed": torch.randn(4, 3).t(),
        "float16": torch.randn(7).half(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    values = {"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "off": None, "on": True, "text": '{"é": [1]}', "inf": float("inf")}
    state = Values(**kinds, **values)
    copies = StateCopy({"state": state})
    assert copies.begin(part) == sum(t.nbytes for t in kinds.values())
    copies.wait()
    new = Values(
        **{name: torch.zeros_like(t) for name, t in kinds.items()}, **{**values, "lr": 0.0, "betas": (0.0, 0.0)}
    )
    StateCopy({"state": new}).restore(part)
    for name, tensor in kinds.items():
        assert new.values[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name
    assert {name: new.values[name] for name in values} == values
    copies.close()


def test_another_layout_is_refused_by_the_name_of_the_tensor(part: SnapshotPart) -> None:
    copies = StateCopy({"model": Values(weight=torch.ones(3, 4), bias=torch.ones(3))})
    copies.begin(part)
    copies.wait()
    with pytest.raises(RuntimeError, match=r"expected model/weight as \['torch.float32', 3, 2\].*, 3, 4\]: a snapshot"):
        StateCopy({"model": Values(weight=torch.ones(3, 2), bias=torch.ones(3))}).restore(part)
    with pytest.raises(RuntimeError, match="expected model/bias as no tensor"):
        StateCopy({"model": Values(weight=torch.ones(3, 4))}).restore(part)
    copies.close()


def test_a_snapshot_that_fails_says_so_and_is_none(part: SnapshotPart, capfd: pytest.CaptureFixture[str]) -> None:
    copies = StateCopy({"state": Values(weights=torch.ones(2), other=object())})
    copies.begin(part)
    copies.wait()
    assert "a snapshot failed: TypeError: Object of type object is not JSON serializable" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="expected snapshot 1, found the stamp 0"):
        StateCopy({"state": Values(weights=torch.ones(2), other=None)}).restore(part)
    copies.close()


# -- any course of events -----------------------------------------------------------------------------------------


class Ranks:
    """A mesh whose ranks copy their state, which is the step, when they are let: late, never, or after their time."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.dp, self.tp = name, count, 1
        self.copying: list[tuple[int, int, int]] = []  # (memory, serial, step)

    async def snapshot(self, snapshot: Snapshot) -> list[int]:
        for part in snapshot.parts(self.name):
            self.copying.append((os.open(part.path, os.O_RDWR), part.serial, snapshot.step))
            os.pwrite(self.copying[-1][0], HEAD.pack(WRITING, 0, 0), 0)
        return [8] * self.dp

    def finish(self, *, rank: int | None = None, serial: int | None = None) -> None:
        for at, (fd, own, step) in list(enumerate(self.copying))[::-1]:
            if rank in (None, at) and serial in (None, own):
                os.pwrite(fd, step.to_bytes(8, "little"), HEAD.size)
                os.pwrite(fd, HEAD.pack(own, 0, 0), 0)
                os.close(fd)
                del self.copying[at]


EVENTS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from(["cold_start", "rl"])),
    st.tuples(st.just("finish"), st.sampled_from(["newest", "all", 0, 1, 2])),
    st.tuples(st.just("rewind"), st.just(None)),
)


@given(st.lists(EVENTS, max_size=20))
@settings(max_examples=300)
def test_what_was_whole_stays_whole_whatever_happens(events: list[tuple[str, Any]]) -> None:
    """Ranks finish in any order, even copies of snapshots that were given up long ago."""
    meshes = Ranks("trainer", 2), Ranks("critic", 1)
    snapshots, step = Snapshots(cast(TrainerMesh, meshes[0]), cast(CriticMesh, meshes[1])), 0
    for event, what in events:
        before = snapshots.newest()
        if event == "take":
            step += 1
            asyncio.run(snapshots.take(what, step, str(step)))
        elif event == "finish":
            for mesh in meshes:
                mesh.finish(rank=what if isinstance(what, int) else None, serial=step if what == "newest" else None)
        elif before is not None:
            snapshots.forget(but=before)
        newest = snapshots.newest()
        if before is not None:
            assert newest is not None
            assert newest.serial >= before.serial
        if newest is not None:
            assert set(newest.paths) == ({"trainer", "critic"} if newest.phase == "rl" else {"trainer"})
            assert newest.controller == str(newest.step)
            for path in (path for paths in newest.paths.values() for path in paths):
                with open(path, "rb") as part:
                    assert int.from_bytes(os.pread(part.fileno(), 8, HEAD.size), "little") == newest.step
    snapshots.close()
    for mesh in meshes:
        mesh.finish()


def test_an_older_snapshot_can_be_gone_back_to() -> None:
    policy = Ranks("trainer", 2)
    snapshots = Snapshots(cast(TrainerMesh, policy), None)
    for step in (5, 10):
        asyncio.run(snapshots.take("rl", step, "{}"))
        policy.finish()
    newest, older = snapshots.newest(), snapshots.newest(before=10)
    assert newest is not None
    assert older is not None
    assert (newest.step, older.step) == (10, 5)
    assert snapshots.newest(before=5) is None
    snapshots.forget(but=older)
    assert snapshots.newest() is older
    asyncio.run(snapshots.take("rl", 6, "{}"))
    assert snapshots.newest() is older  # not yet
    policy.finish()
    assert [found.step for found in (snapshots.newest(), snapshots.newest(before=6)) if found] == [6, 5]
    snapshots.close()
