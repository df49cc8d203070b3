"""Real runs under chaos."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import running
from support.running import SMALL
from titan_rl.config.sections import FaultSection

PATIENCE = 90
AGENTS = str(Path(running.__file__).parent)
AGENT_STEPS = 12
FAULTS = ("kill:generator", "kill:trainer", "error:generator", "corrupt:generator", "disk:trainer")


def under_chaos(
    folder: Path, *faults: str, config: str = "grpo_llama", **overrides: object
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """These faults, once each."""
    keys = {**SMALL, "generator.replicas": 2, "eval.interval": 0}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "titan_rl", "chaos", "--config", config, "--run", str(folder)),
            *("--kills", str(len(faults)), "--seed", "5", "--only", ",".join(faults), "--pace", "0.1"),
            *("--patience", str(PATIENCE), "--csv", str(folder.with_suffix(".csv"))),
            *(part for key, value in keys.items() for part in (f"--{key}", str(value))),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": AGENTS},
    )
    return run, json.loads((folder / "chaos.json").read_text()) if run.returncode in (0, 1) else None


def test_a_run_comes_through_five_faults(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", *FAULTS, training__steps=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["problems"] == []
    assert all(problems == [] for problems in found["audits"].values())
    assert len(found["audits"]) == 7
    assert sorted(f"{row['fault']}:{row['role']}" for row in found["classes"]) == sorted(FAULTS)
    for outcome in found["faults"]:
        kind, mesh = outcome["fault"]["kind"], outcome["fault"]["victim"].partition("[")[0]
        assert outcome["blamed"] == ("" if kind == "corrupt" else mesh)
        assert (outcome["detected"] is None) == (kind == "corrupt")
        assert 0 < outcome["recovered"] < PATIENCE
        if kind == "kill":
            assert outcome["detected"] < FaultSection().hang_seconds, "before any deadline"
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 6


def test_a_run_that_does_not_come_through_is_named(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", "kill:trainer", training__steps=60, fault__max_restarts=0)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "expected exit code 0, found 1" in found["problems"]
    assert "died: its process was killed by signal 9" in run.stdout


@pytest.mark.slow
def test_an_agent_and_its_endpoint_may_be_killed_in_mid_rollout(tmp_path: Path) -> None:
    """The turns that were sampled are trained once, whichever process played their rollouts to the end."""
    run, found = under_chaos(
        tmp_path / "run",
        "kill:environment",
        "error:environment",
        config="calc_agent_llama",
        task__agent="slow_agent:run",
        environment__concurrency=16,
        generator__replicas=1,
        training__steps=AGENT_STEPS,
        fault__hang_seconds=30,  # no deadline finds these faults; a busy machine starved a process for the default's 5
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["problems"] == []
    assert all(problems == [] for problems in found["audits"].values())
    assert sorted(outcome["fault"]["kind"] for outcome in found["faults"]) == ["error", "kill"]
    assert all(outcome["blamed"].startswith("environment") for outcome in found["faults"])
    again = re.findall(
        r"environment\d is back after .*: (\d+) rollouts? to play again", (tmp_path / "run" / "chaos.log").read_text()
    )
    assert len(again) == 2
    assert max(map(int, again)) > 0, "no rollout was running"
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rl"]
    assert len(rollouts) == AGENT_STEPS * 16
    assert {line["status"] for line in rollouts} == {"completed"}
    assert all(len(line["turns"]) == 2 for line in rollouts)
