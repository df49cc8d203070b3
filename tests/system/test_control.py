"""A real run that is controlled from outside."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.running import Run, Runs
from titan_rl.ext.control.server import ANNOUNCEMENT
from titan_rl.tools.inspect.audit_rules import audit


def ctl(folder: Path, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titan_rl.tools.ctl", str(folder), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def ask(run: Run, *argv: str) -> dict[str, Any]:
    done = ctl(run.folder, *argv, "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def checkpoints(run: Run) -> set[str]:
    return {path.parent.name for path in (run.folder / "checkpoint").glob("step-*/.metadata")}


def steps(run: Run) -> list[int]:
    return [line["step"] for line in run.lines("metrics.jsonl")]


def test_a_run_is_saved_paused_resumed_and_stopped(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint__keep_latest_k": 0, "algorithm__max_dead_steps": 0}
    run = runs.start(tmp_path / "run", training__steps=1000, checkpoint__interval=1000, **keys)
    run.wait_for_step(1)
    assert ask(run, "status")["run"]["state"] == "training"
    first = ask(run, "checkpoint")["saved"]
    assert f"step-{first}" in checkpoints(run)

    paused = ask(run, "pause")
    assert paused["state"] == "paused"
    assert steps(run)[-1] == paused["saved"] == ask(run, "checkpoint")["saved"] > first
    assert f"step-{paused['saved']}" in checkpoints(run)
    time.sleep(2)
    assert steps(run)[-1] == paused["saved"]
    assert paused.items() <= ask(run, "status")["run"].items()
    assert "paused" in ctl(run.folder, "status").stdout

    assert ask(run, "resume")["state"] == "training"
    run.wait_for_step(paused["saved"] + 1)
    refused = ctl(run.folder, "scale", "trainers=3")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1

    stopped = ctl(run.folder, "stop", "--wait")
    assert stopped.returncode == 0, stopped.stderr
    assert run.process.poll() is not None
    out = run.finish()
    assert run.code == 130, out
    assert f"paused after step {paused['saved']}, which is saved" in out
    for command in ("checkpoint", "pause", "resume", "stop"):
        assert f"asked to {command}" in out
    last = steps(run)[-1]
    assert f"RL step {last}" in out
    assert checkpoints(run) == {f"step-{step}" for step in (first, paused["saved"], last)}
    assert steps(run) == list(range(1, last + 1))
    assert audit(run.folder)[0] == []
    assert not run.processes()
    assert ctl(run.folder, "status").returncode == 2
    assert not (run.folder / ANNOUNCEMENT).exists()


def test_a_run_that_is_starting_answers_and_can_be_stopped(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    deadline = time.monotonic() + 120
    while not (run.folder / ANNOUNCEMENT).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(run, "status")["run"]["state"] == "starting"
    assert ask(run, "stop", "--wait")["state"] == "stopping"
    out = run.finish(timeout=120)
    assert run.code == 130, out
    assert not run.processes()
