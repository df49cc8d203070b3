"""The weights with the highest value of a metric: which are kept, through resumes, kills and failed writes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_rl.config.toml import find, load
from titan_rl.preflight.plan import prepare
from titan_rl.record.checkpoints import METADATA, Checkpoints
from titan_rl.record.evaluation import Answer, Evaluation
from titan_rl.train.best_weights import MEASURED, BestWeights, best_folders
from titan_rl.wire.errors import RankDied, RankFailed, RunError
from titan_rl.wire.spans import Clock


class Trainers:
    """Writes its step as the weights, or fails."""

    def __init__(self) -> None:
        self.weights, self.error = "", cast(Exception | None, None)

    async def export(self, folder: str) -> None:
        Path(folder, "model.safetensors").write_text(self.weights)
        if self.error is not None:
            raise self.error


class World:
    """A run that is evaluated: `offer(step, score)`."""

    def __init__(self, folder: Path) -> None:
        config = load(find("grpo_llama"), [("eval.keep_best", "eval/score"), ("job.dump_folder", str(folder))])
        folder.mkdir(exist_ok=True)
        self.setup = replace(prepare("x", config, device="cpu", scratch=folder / "model"), folder=folder)
        self.folder, self.trainers, self.said = folder, Trainers(), list[str]()
        self.begin()

    def begin(self) -> None:
        """Start a process of the run."""
        terminal = SimpleNamespace(note=self.said.append, warn=self.said.append)
        meshes = SimpleNamespace(trainers=self.trainers)
        run = SimpleNamespace(
            setup=self.setup, config=self.setup.config, meshes=meshes, terminal=terminal, clock=Clock()
        )
        self.best = BestWeights(cast(Any, run))

    def offer(self, step: int, score: float) -> None:
        self.trainers.weights = f"weights of step {step}"
        asyncio.run(self.best.offer(step, [Evaluation("", {0: [Answer(score)], 1: [Answer(score)]})]))

    @property
    def kept(self) -> dict[str, str]:
        """Return the weights that are kept, by the name of their folder."""
        folders = sorted((self.folder / "best").glob("*")) if (self.folder / "best").exists() else []
        return {path.name: (path / "model.safetensors").read_text() for path in folders}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "run")


def test_only_a_higher_value_replaces_the_best(world: World) -> None:
    for step, score in ((0, 0.25), (2, 0.5), (4, 0.5), (6, 0.125)):
        world.offer(step, score)
    assert world.kept == {"step-2": "weights of step 2"}
    assert world.said == [
        f"kept {world.folder}/best/step-0: eval/score 0.25",
        f"kept {world.folder}/best/step-2: eval/score 0.5 (before: 0.25, of step 0)",
    ]
    folder = world.folder / "best" / "step-2"
    measured = json.loads((folder / MEASURED).read_text())
    assert (measured["step"], measured["metric"], measured["value"]) == (2, "eval/score", 0.5)
    assert measured["metrics"]["eval/failed"] == 0
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_resumed_run_has_to_exceed_what_is_kept(world: World) -> None:
    world.offer(2, 0.5)
    world.begin()
    world.offer(1, 0.25)
    world.offer(2, 0.5)
    assert world.kept == {"step-2": "weights of step 2"}
    world.trainers.weights = "other"
    world.offer(2, 0.75)  # a run with a lag does not repeat itself
    assert world.kept == {"step-2.1": "weights of step 2"}


def test_retention_leaves_it_alone(world: World) -> None:
    world.offer(2, 0.5)
    checkpoints = world.folder / "checkpoint"
    for step in (2, 4, 6, 8):
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / METADATA).write_bytes(b"x")
    Checkpoints.of(world.folder, world.setup.config).purge(2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-6", "step-8"]
    assert world.kept == {"step-2": "weights of step 2"}


def test_a_failed_write_keeps_the_older_folder_and_is_tried_again(world: World) -> None:
    world.offer(2, 0.5)
    for error in (RankFailed("trainer[dp=0].export: OSError", "No space left", kind="OSError"), RunError("not finite")):
        world.trainers.error = error
        world.offer(4, 0.75)
        assert world.kept == {"step-2": "weights of step 2"}
        assert f"{error}; {world.folder}/best/step-2 stays the best" in world.said[-1]
    world.trainers.error = None
    world.offer(6, 0.75)
    assert world.kept == {"step-6": "weights of step 6"}


def test_a_dead_trainer_is_not_a_failed_write(world: World) -> None:
    world.trainers.error = RankDied("trainer[dp=0]", "was killed by signal 9")
    with pytest.raises(RankDied):
        world.offer(2, 0.5)
    assert world.kept == {}
    assert not list(world.folder.glob(".best*"))


@pytest.mark.parametrize("at", ["iterdir", "rename", "rmtree"])
def test_a_kill_at_any_moment_leaves_a_whole_folder(world: World, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    world.offer(2, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", kill) if at == "rmtree" else patch.setattr(Path, at, kill)
        with pytest.raises(Killed):
            world.offer(4, 0.75)
    found = best_folders(world.folder / "best")
    assert found
    for best in found:
        assert (best.folder / "model.safetensors").read_text() == f"weights of step {best.step}"
    world.begin()  # the next process of the run
    assert len(world.kept) == 1
    assert list(world.kept) == [found[0].folder.name]
    world.offer(6, 0.875)
    assert world.kept == {"step-6": "weights of step 6"}


def test_values_of_another_metric_are_not_compared(world: World) -> None:
    world.offer(2, 0.9)
    kept = world.folder / "best" / "step-2" / MEASURED
    kept.write_text(kept.read_text().replace('"metric": "eval/score"', '"metric": "eval/hard/pass@4"'))
    world.begin()
    world.offer(4, 0.5)
    assert set(world.kept) == {"step-2", "step-4"}


def test_without_the_key_nothing_is_kept(world: World) -> None:
    config = replace(world.setup.config, eval=replace(world.setup.config.eval, keep_best=""))
    world.setup = replace(world.setup, config=config)
    world.begin()
    world.offer(2, 0.5)
    assert world.kept == {}
