"""Whole runs whose rollouts have several turns."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled
from support.running import Run, Runs
from titan_rl.tools.inspect.audit_rules import audit

FEW: dict[str, Any] = {"cold_start__steps": 6, "training__steps": 6, "environment__concurrency": 16}


def kill(run: Run, rank: str) -> None:
    """Kill a process, whether it is the first of its name or a later one."""
    deadline = time.monotonic() + 60
    while rank not in (workers := run.workers()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(workers[rank], signal.SIGKILL)


def test_a_run_in_which_environments_die_has_the_losses_of_one_in_which_none_does(runs: Runs, tmp_path: Path) -> None:
    quiet = runs.finish(tmp_path / "quiet", "hunt_llama", **FEW)
    shaken = runs.start(tmp_path / "shaken", "hunt_llama", **FEW)
    shaken.wait_for_step(1)
    kill(shaken, "environment0[env=0]")
    shaken.wait_for_step(3)
    kill(shaken, "environment1[env=0]")
    out = shaken.finish()
    assert shaken.code == 0, out
    faults = [json.loads(line) for line in (shaken.folder / "faults.jsonl").read_text().splitlines()]
    assert {line["who"] for line in faults if line["outcome"] == "back"} == {"environment0", "environment1"}, out
    assert losses(shaken) == losses(quiet)
    assert sampled(shaken) == sampled(quiet)
    assert audit(shaken.folder)[0] == []
    for line in shaken.lines("rollouts.jsonl"):
        observed = [turn["read"] for turn in line["turns"]]
        spoken = [turn["sampled"] for turn in line["turns"]]
        assert len(observed) <= 8
        assert sum(line["mask"]) == sum(spoken) == len(line["versions"])
        assert len(line["tokens"]) == sum(observed) + sum(spoken)


def test_an_environment_that_raises_is_dropped_and_never_a_reward_of_zero(runs: Runs, tmp_path: Path) -> None:
    run = runs.finish(
        tmp_path / "run", "hunt_llama", **FEW, environment__name="odd_environments:falling_hunt", eval__size=0
    )
    assert audit(run.folder)[0] == []
    failed = [line for line in run.lines("rollouts.jsonl") if line["status"] == "error"]
    assert failed, "no board fell over"
    for line in failed:
        assert line["reward"] is None
        assert "RuntimeError: the board fell over" in line["error"]
        assert "odd_environments.py:" in line["error"]
    steps = run.lines("metrics.jsonl")
    assert sum(line["rollouts/failed"] for line in steps) > 0
    kept = [line for line in run.lines("rollouts.jsonl") if line["status"] != "error"]
    for line in steps:
        assert line["tokens/trained"] == sum(sum(each["mask"]) for each in kept if each["step"] == line["step"])


@pytest.mark.slow
def test_calc_learns_to_use_its_tool_and_only_with_a_tool_that_works(runs: Runs, tmp_path: Path) -> None:
    with_tool = runs.finish(tmp_path / "tool", "calc_llama", small=False)
    assert with_tool.summary()["final_eval"] >= 0.95, with_tool.summary()
    without = runs.finish(
        tmp_path / "zeros",
        "calc_llama",
        small=False,
        environment__name="odd_environments:zeros",
        cold_start__steps=120,
        training__steps=15,
    )
    assert without.summary()["final_eval"] <= 0.02, without.summary()
