"""When trainers with fewer dp rows are started again with more, and what follows if that fails."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config.sections import CheckpointSection, Config, FaultSection
from titan_rl.record.incidents import Incidents
from titan_rl.train.recovery import Recovery
from titan_rl.train.regrowth import STEADY, Regrow, Regrowth
from titan_rl.wire.errors import RankDied, RankFailed

DIED = RankDied("trainer[dp=0 tp=0]", "was killed by signal 9")


class Trainers:
    """Two dp rows, of which there may be one."""

    name = "trainer"
    dp = 1

    def __init__(self) -> None:
        self.starts: list[Any] = []  # the outcome of each start: a number of rows, or an error

    @property
    def size(self) -> str:
        return "" if self.dp == 2 else " with 1 of 2 dp rows"

    async def respawn(self) -> None:
        found = self.starts.pop(0)
        if isinstance(found, Exception):
            raise found
        self.dp = found


class Room:
    """Has room for both rows, on hosts that came back `age` seconds ago."""

    def __init__(self, age: float = 1e9) -> None:
        self.age, self.left_out = age, list[str]()

    def rows(self, seconds: float = 0) -> int:
        return 2 if self.age >= seconds and not self.left_out else 1

    def leave_out(self) -> list[str]:
        self.left_out = ["node1"]
        return self.left_out


class World:
    def __init__(self, folder: Path, room: Room | None = None, *, checkpoints: bool = True, **fault: Any) -> None:
        self.said: list[str] = []
        config = Config(fault=FaultSection(**fault), checkpoint=CheckpointSection(enable=checkpoints))
        self.trainers: Any = Trainers()
        self.incidents = Incidents(folder, config.fault, self.said.append)
        rank_places: Any = room or Room()
        self.growth = Regrowth(self.trainers, rank_places, config, self.incidents)


def test_a_host_must_stay_longer_each_time_that_rows_were_lost(tmp_path: Path) -> None:
    room = Room(STEADY * 2.0)
    world = World(tmp_path, room, detect_seconds=2.0)
    assert world.growth.due
    world.growth.shrank()
    assert world.growth.due
    world.growth.shrank()
    assert not world.growth.due, "twice as long"
    room.age *= 2
    assert world.growth.due
    world.trainers.dp = 2
    assert not world.growth.due, "all rows are there"


@pytest.mark.parametrize(("restarts", "losses"), [(1, 0), (2, 0), (3, 1), (5, 3)])
def test_growing_leaves_what_losses_may_still_cost(tmp_path: Path, restarts: int, losses: int) -> None:
    world = World(tmp_path, max_restarts=restarts)
    for _ in range(losses):
        assert world.incidents.may_respawn("trainer")
    assert world.growth.due
    assert world.incidents.may_respawn("trainer")
    assert not world.growth.due


def test_without_checkpoints_there_is_nothing_to_grow_from(tmp_path: Path) -> None:
    assert not World(tmp_path, checkpoints=False).growth.due


def recovered(world: World, starts: list[Any], *attempts: Any) -> list[str]:
    """Make attempts with these outcomes, errors or None; return the events."""
    happened: list[str] = []
    world.trainers.starts = starts

    async def nothing(*_: Any) -> None: ...

    async def driven(work: Any) -> Any:
        return await work

    def phase(name: str) -> Any:
        happened.append(name)
        return nullcontext()

    meshes = SimpleNamespace(
        trainers=world.trainers,
        critic=None,
        turn_of_trainers=nothing,
        leave_gpus_to_trainers=nothing,
        named=lambda name: world.trainers if name == "trainer" else None,
    )
    snapshots = SimpleNamespace(
        settle=nothing, bring=nothing, newest=lambda: None, forget=lambda: happened.append("snapshots are forgotten")
    )
    found = SimpleNamespace(nothing=False)
    run: Any = SimpleNamespace(
        watch=SimpleNamespace(drive=driven),
        meshes=meshes,
        snapshots=snapshots,
        weights=None,
        stop=SimpleNamespace(requested=False, step=4),
        incidents=world.incidents,
        terminal=SimpleNamespace(phase=phase),
        regrowth=world.growth,
    )

    class Resuming(Recovery):
        resume: Any = found

        async def _sound_resume(self) -> Any:
            return found

    recovery, outcomes = Resuming(run), list(attempts)

    async def attempt(resume: Any) -> None:
        happened.append(f"{world.trainers.dp} rows")
        recovery.began(4)
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    asyncio.run(recovery.drive(attempt))
    return happened


def test_trainers_shrink_and_grow_and_only_the_loss_is_an_incident(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainers.dp = 2
    happened = recovered(world, [1, 2], DIED, Regrow("grows"), None)
    respawned = ["trainer: respawned", "snapshots are forgotten"]
    assert happened == ["2 rows", *respawned, "1 rows", "grows", "snapshots are forgotten", "2 rows"]
    assert [incident.outcome for incident in world.incidents.all] == ["back"]
    assert world.incidents.left("trainer") == 2


def test_trainers_that_do_not_start_with_more_rows_continue_with_those_of_before(tmp_path: Path) -> None:
    world = World(tmp_path, max_restarts=1)
    full = RankFailed("trainer[dp=1 tp=0] cannot be started on node1", rank="trainer[dp=1 tp=0]")
    assert recovered(world, [full, 1], Regrow("grows"), None) == ["1 rows", "grows", "trainer: respawned", "1 rows"]
    assert world.said == [f"{full}; the trainer does without node1 until its worker is started again"]
    assert not world.incidents.all
    assert not world.growth.due
