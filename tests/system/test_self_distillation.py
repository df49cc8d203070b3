"""Self-distillation in whole runs: the teacher is the policy with another prompt, with every source of its weights."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.outputs import same, sampled
from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.tools.inspect.audit_rules import audit

FEW: dict[str, Any] = {"training__steps": 3, "checkpoint__interval": 100, "eval__interval": 3}
SIBLING: dict[str, Any] = {
    "algorithm__name": "sdpo",
    "teacher__template": "{context}. {prompt}",
    "task__reward": "dense_reward:digits",
    "task__eval_reward": "exact",
    "curriculum__correct_at": 0.3,  # so that some answers of an unskilled policy count
    "optimizer__lr": 1e-3,
    "fault__snapshot_interval": 2,
    "training__steps": 8,
}


def distilled(run: Run) -> list[dict[str, float]]:
    lines = [line for line in run.lines("metrics.jsonl") if "loss" in line]
    assert audit(run.folder)[0] == []
    assert all(line["distill/too_long"] == 0 for line in lines)
    return lines


@pytest.fixture(scope="module")
def averaged(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runs.finish(tmp_path_factory.mktemp("averaged") / "run", **SIBLING)


def test_answers_with_a_right_sibling_are_distilled(averaged: Run) -> None:
    """A group whose answers earn too little has no context, and its answers no advantage."""
    lines = distilled(averaged)
    assert len(lines) == 8
    assert any(0 < line["distill/covered"] < 1 for line in lines)
    for line in lines:
        rollouts = [each for each in averaged.lines("rollouts.jsonl") if each["step"] == line["step"]]
        groups = {each["prompt_id"]: [r for r in rollouts if r["prompt_id"] == each["prompt_id"]] for each in rollouts}
        right = {id: [r["reward"] >= 0.3 for r in group] for id, group in groups.items()}
        covered = [sum(right[id]) - own >= 1 for id, group in groups.items() for own in right[id]]
        assert line["distill/covered"] == pytest.approx(sum(covered) / len(rollouts))
        advantages = [r["advantage"] != 0 for group in groups.values() for r in group]
        assert advantages == covered


def test_the_moving_average_is_resumed_to_the_last_bit(runs: Runs, averaged: Run, tmp_path: Path) -> None:
    """A trainer rank dies, and is restored from a snapshot; then the whole run is killed, and resumed."""
    run = runs.start(tmp_path / "killed", **SIBLING)
    run.wait_for_step(3)
    os.kill(run.workers()["trainer[dp=0 tp=0]"], signal.SIGKILL)
    run.wait_for_step(5)
    assert run.written("faults.jsonl")[-1]["outcome"] == "back"
    run.process.kill()
    run.finish(60)
    resumed = runs.finish(tmp_path / "killed", **SIBLING)
    assert same(resumed, averaged)


def test_a_checkpoint_has_the_average(averaged: Run) -> None:
    from titan_rl.actors.titan.phase import AVERAGE
    from titan_rl.actors.titan.summed_writer import PlainMetadata

    folder = averaged.folder / "checkpoint"
    newest = max(Checkpoints((folder,)).whole_steps())
    keys = set(PlainMetadata(folder / f"step-{newest}").read_metadata().state_dict_metadata)
    names = {key.removeprefix(f"{AVERAGE}.") for key in keys if key.startswith(AVERAGE)}
    assert "tok_embeddings.weight" in names
    assert names == {key for key in keys if key.partition(".")[0] in ("layers", "tok_embeddings", "norm", "lm_head")}


@pytest.mark.parametrize("weights", slow_except(["reference", "policy", "average"], 2))
def test_a_demonstration_over_several_turns(runs: Runs, tmp_path: Path, weights: str) -> None:
    keys: dict[str, Any] = {"algorithm__teacher_weights": weights, "environment__concurrency": 16}
    if weights == "average":  # it has the adapters alone
        keys |= {"lora__rank": 4, "fault__snapshot_interval": 1}
    run = runs.finish(tmp_path / "run", "sdft_calc_llama", **FEW, **keys)
    lines = distilled(run)
    assert [line["distill/covered"] for line in lines] == [1.0] * 3
    assert all(line["distill/gain"] != 0 for line in lines)
    assert sampled(run)


def test_the_teachers_signal_is_added_to_that_of_rewards(runs: Runs, tmp_path: Path) -> None:
    keys = {**SIBLING, "algorithm__advantage": "group", "algorithm__teacher_coef": 0.5, **FEW}
    both = distilled(runs.finish(tmp_path / "run", **keys))
    assert any(0 < line["distill/covered"] < 1 for line in both)
    assert all(line["advantage/min"] < 0 < line["advantage/max"] for line in both)


@pytest.mark.slow
def test_a_divergence_is_of_covered_answers(runs: Runs, tmp_path: Path) -> None:
    keys = {**SIBLING, "algorithm__distill_top_k": 4, "algorithm__distill_beta": 0.0, **FEW}
    lines = distilled(runs.finish(tmp_path / "run", **keys))
    assert any(0 < line["distill/covered"] < 1 for line in lines)
    for line in lines:
        assert (line["distill/divergence"] > 0) == (line["distill/covered"] > 0)
        assert 0 < line.get("distill/teacher_mass", 0.5) < 1
