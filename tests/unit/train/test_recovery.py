"""Meshes that a loss replaces, how the weight sync learns of it, and how many steps are counted as repeated."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.running import RunFiles
from titan_rl.config.sections import Config, FaultSection
from titan_rl.record.incidents import Incidents
from titan_rl.train.recovery import Recovery
from titan_rl.wire.errors import RankDied, RunError


class Mesh:
    dp, size = 2, ""

    def __init__(self, name: str, respawn: Any) -> None:
        self.name, self.respawn = name, respawn


class World:
    """A run whose meshes are names, and which lists the calls to them."""

    def __init__(self, folder: Path, *, weights: bool = True, **fault: Any) -> None:
        self.happened: list[str] = []
        self.said: list[str] = []
        self.found = SimpleNamespace(nothing=False)
        self.stop = SimpleNamespace(requested=False, step=0)
        self.meshes = {name: self.mesh(name) for name in ("trainer", "critic")}
        self.incidents = Incidents(folder, FaultSection(**fault), self.said.append)
        self.run: Any = SimpleNamespace(
            setup=SimpleNamespace(shape=None, folder=folder, resume=self.found),
            config=Config(),
            watch=SimpleNamespace(drive=self.drive),
            meshes=SimpleNamespace(
                trainers=self.meshes["trainer"],
                critic=self.meshes["critic"],
                named=self.meshes.get,
                turn_of_trainers=self.noting("trainers' turn"),
                leave_gpus_to_trainers=self.noting("engines leave"),
            ),
            snapshots=SimpleNamespace(
                settle=self.noting("settled"), bring=self.bring, newest=lambda: None, forget=self.noted("forgotten")
            ),
            weights=SimpleNamespace(abandon=self.abandon, connect=self.noting("connected")) if weights else None,
            stop=self.stop,
            incidents=self.incidents,
            terminal=SimpleNamespace(phase=lambda name: nullcontext()),
            regrowth=SimpleNamespace(shrank=self.noted("shrank"), failed=lambda *_: False),
        )
        self.lost_while_bringing = False

    def mesh(self, name: str) -> Any:
        return Mesh(name, self.noting(f"{name} respawned"))

    def noted(self, what: str) -> Any:
        return lambda *_, **__: self.happened.append(what)

    def noting(self, what: str) -> Any:
        async def note(*_: Any, **__: Any) -> None:
            self.happened.append(what)

        return note

    async def drive(self, work: Any) -> Any:
        return await work

    async def abandon(self, *, trainers_lost: bool) -> None:
        self.happened.append(f"sync abandoned, trainers lost: {trainers_lost}")

    async def bring(self) -> None:
        self.happened.append("brought")
        if self.lost_while_bringing:
            self.found.nothing = True

    def recovered(self, *attempts: tuple[int, RunError | None, int]) -> None:
        """Make attempts: the step that each resumes after, its outcome, and the step that runs when it ends."""
        world, left = self, list(attempts)

        class Resuming(Recovery):
            resume: Any = self.found

            async def _sound_resume(self) -> Any:
                return world.found

        recovery = Resuming(self.run)

        async def attempt(resume: Any) -> None:
            after, outcome, reached = left.pop(0)
            recovery.began(after)
            self.stop.step = reached
            if outcome is not None:
                raise outcome

        asyncio.run(recovery.drive(attempt))


def died(name: str) -> RankDied:
    return RankDied(f"{name}[dp=0 tp=0]", "was killed by signal 9")


def test_lost_trainers_are_replaced_and_the_generators_connected_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.recovered((0, died("trainer"), 5), (4, None, 8))
    assert world.happened == [
        "settled",
        *("sync abandoned, trainers lost: True", "engines leave", "trainers' turn"),
        *("trainer respawned", "brought", "connected"),
    ]


def test_a_lost_critic_leaves_the_trainers_and_their_engines_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.recovered((0, died("critic"), 5), (4, None, 8))
    assert world.happened == [
        *("settled", "sync abandoned, trainers lost: False", "trainers' turn", "critic respawned", "brought")
    ]


@pytest.mark.parametrize(("reached", "after", "repeated"), [(5, 4, 0), (5, 3, 1), (9, 4, 4), (1, 0, 0)])
def test_steps_that_were_finished_after_the_state_are_repeated(
    tmp_path: Path, reached: int, after: int, repeated: int
) -> None:
    """The step that was running when the mesh was lost had not been finished."""
    world = World(tmp_path)
    world.recovered((0, died("trainer"), reached), (after, None, reached))
    (incident,) = world.incidents.all
    assert (incident.outcome, incident.redone) == ("back", repeated)
    lines = RunFiles(tmp_path).written("faults.jsonl")
    assert [line["redone"] for line in lines if line["outcome"] == "back"] == [repeated]


def test_a_second_loss_before_the_first_is_mended_keeps_the_furthest_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.recovered((0, died("trainer"), 9), (6, died("critic"), 7), (6, None, 9))
    assert [incident.redone for incident in world.incidents.all] == [2, 0]


def test_without_any_state_living_trainers_are_replaced_too(tmp_path: Path) -> None:
    """Only new ones have the initial weights."""
    world = World(tmp_path, weights=False)
    world.found.nothing = True
    world.recovered((0, died("critic"), 3), (0, None, 3))
    assert sorted(world.happened) == [
        *("brought", "critic respawned", "engines leave", "settled", "trainer respawned", "trainers' turn")
    ]


def test_snapshots_that_are_lost_on_the_way_cost_the_living_trainers(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.lost_while_bringing = True
    world.recovered((0, died("critic"), 3), (0, None, 3))
    assert world.happened[-4:] == [
        *("brought", "sync abandoned, trainers lost: True", "trainer respawned", "connected")
    ]


@pytest.mark.parametrize(("rows", "expected"), [(2, []), (1, ["forgotten", "shrank"]), (3, ["forgotten"])])
def test_snapshots_of_another_number_of_rows_are_forgotten(tmp_path: Path, rows: int, expected: list[str]) -> None:
    world = World(tmp_path)
    trainers = world.meshes["trainer"]

    async def respawn() -> None:
        trainers.dp = rows

    trainers.respawn = respawn
    world.recovered((0, died("trainer"), 3), (2, None, 3))
    assert [what for what in world.happened if what in ("forgotten", "shrank")] == expected
