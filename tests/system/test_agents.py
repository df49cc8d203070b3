"""Whole runs whose rollouts are an agent's, which reaches the policy with the openai package only."""

from pathlib import Path

import pytest

from support.running import Runs
from titan_rl.tools.inspect.audit_rules import audit


def test_an_agent_that_uses_only_the_openai_package_is_trained_unchanged(runs: Runs, tmp_path: Path) -> None:
    run = runs.finish(
        tmp_path / "run",
        "calc_llama",
        task__agent="openai_agent:run",
        task__template="chat",
        environment__name="",
        environment__lockstep=False,
        environment__concurrency=16,
        cold_start__steps=0,
        training__steps=3,
        eval__size=8,
        eval__interval=0,
    )
    assert audit(run.folder)[0] == []
    steps, rollouts = run.lines("metrics.jsonl"), run.lines("rollouts.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert len(rollouts) == 3 * 16
    for line in rollouts:
        assert line["status"] == "completed", line
        assert [turn["sampled"] for turn in line["turns"]][1] <= 4
        assert len(line["turns"]) == 2
        assert sum(line["mask"]) == sum(turn["sampled"] for turn in line["turns"])
        assert len(line["tokens"]) == sum(turn["read"] + turn["sampled"] for turn in line["turns"]), "it branched"
    for line in steps:
        assert line["environment/requests"] == 2
        assert line["environment/requests/continued"] == 1
        assert line["tokens/trained"] == sum(sum(each["mask"]) for each in rollouts if each["step"] == line["step"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_agent_learns_to_use_its_calculator_over_the_endpoint(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", "calc_agent_llama", small=False)
    out = run.finish(timeout=1100)
    assert run.code == 0, out
    assert audit(run.folder)[0] == []
    assert run.summary()["final_eval"] >= 0.95, run.summary()
    first, *_, last = run.lines("metrics.jsonl")
    assert first["reward/mean"] <= 0.5
    assert last["reward/mean"] >= 0.8
    assert first["environment/calls"] <= 0.7
    assert last["environment/calls"] >= 0.9
    assert last["branches/mean"] == 1.0, "a turn was tokenized again"
