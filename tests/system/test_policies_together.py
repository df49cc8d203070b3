"""Two policies that play the same episodes: each learns what it would learn alone against the other."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled
from support.running import Run, RunFiles, Runs
from support.slow_cases import slow_except
from titan_rl.tools.inspect.audit_rules import audit

NAMES = ("first", "second")
FEW: dict[str, Any] = {
    "training__steps": 8,
    "rollout__groups_per_step": 6,
    "rollout__group_size": 4,
    "environment__concurrency": 24,
    "generator__max_num_seqs": 24,
    "lora__rank": 8,
    "lora__sync": "adapter",
    "fault__snapshot_interval": 0,
    "placement__kind": "disaggregated",
}
STILL = 1e-30
"""A learning rate that changes no log-prob, so that a policy stays what it began as."""


def together(runs: Runs, folder: Path, rates: tuple[float, float], **keys: Any) -> Run:
    config = folder.with_suffix(".toml")
    tables = (f"[policies.{name}.optimizer]\nlr = {rate}" for name, rate in zip(NAMES, rates, strict=True))
    config.write_text('base = "kuhn_llama"\n' + "\n".join(tables) + "\n")
    return runs.start(folder, str(config), small=False, **FEW, **keys)


def finished(run: Run) -> dict[str, RunFiles]:
    out = run.finish()
    assert run.code == 0, out
    found = {name: RunFiles(run.folder / "policies" / name) for name in NAMES}
    for name, of in found.items():
        assert audit(of.folder)[0] == []
        own = [t["sampled"] for line in of.lines("rollouts.jsonl") for t in line["turns"] if t["seat"] == name]
        assert sum(own) == sum(line["tokens/trained"] for line in of.lines("metrics.jsonl"))
    assert sampled(found["first"]) == sampled(found["second"])  # the same episodes
    return found


@pytest.mark.parametrize("learner", slow_except(NAMES, 1))
def test_a_policy_beside_one_that_stands_still_learns_as_against_the_start(
    runs: Runs, tmp_path: Path, learner: str
) -> None:
    (other,) = {*NAMES} - {learner}
    rates = (1e-2, STILL) if learner == "first" else (STILL, 1e-2)
    both = finished(together(runs, tmp_path / "both", rates))
    keys: dict[str, Any] = {
        "optimizer__lr": 1e-2,
        "opponents__pool": '["start"]',
        "opponents__seats": json.dumps([other]),
        "environment__frozen_seats": json.dumps([other]),
    }
    alone = runs.finish(tmp_path / "alone", "kuhn_llama", small=False, **FEW, **keys)
    assert losses(both[learner]) == losses(alone)
    assert sampled(both[learner]) == sampled(alone)
    assert len(set(losses(alone))) == FEW["training__steps"]


def test_policies_that_lose_a_generator_and_are_stopped_and_killed_make_the_same_steps(
    runs: Runs, tmp_path: Path
) -> None:
    keys = {"checkpoint__interval": 1}
    whole = finished(together(runs, tmp_path / "whole", (1e-2, 5e-3), **keys))
    run = together(runs, tmp_path / "part", (1e-2, 5e-3), **keys)
    second = Run(run.folder / "policies" / "second", run.process)
    second.wait_for_step(2)
    os.kill(run.workers()["generator0[tp=0]"], signal.SIGKILL)
    second.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    run = together(runs, tmp_path / "part", (1e-2, 5e-3), **keys)
    Run(run.folder / "policies" / "second", run.process).wait_for_step(6)
    run.process.kill()
    run.finish()
    checkpoints = run.folder / "policies" / "second" / "checkpoint"
    newest = max(checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    shutil.rmtree(newest)  # as if the kill had come before it
    resumed = finished(together(runs, tmp_path / "part", (1e-2, 5e-3), **keys))
    for name in NAMES:
        assert losses(resumed[name]) == losses(whole[name])
        assert sampled(resumed[name]) == sampled(whole[name])


def test_policies_play_together_in_16_bits_with_a_lag(runs: Runs, tmp_path: Path) -> None:
    keys = {"generator__dtype": "bfloat16", "rollout__max_staleness_steps": 2, "environment__lockstep": False}
    found = finished(together(runs, tmp_path / "run", (1e-2, 5e-3), **keys, generator__replicas=2))
    for of in found.values():
        assert max(line["policy_age/max"] for line in of.lines("metrics.jsonl")) <= 2
