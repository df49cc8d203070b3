"""Runs of several policies over one base: each computes as a run of its config alone; resumed, stopped, audited.

Engines batch the policies' requests together, which may change the last bits of log-probs on a CPU. So tokens are
compared exactly, log-probs and losses within 1e-5.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.running import SMALL, Run, RunFiles, Runs

POLICIES = """
lora.rank = 8
lora.sync = "adapter"
task.reward = "dense_reward:digits"

[policies.fast.optimizer]
lr = 2e-2

[policies.slow.optimizer]
lr = 5e-3

[policies.slow.algorithm]
name = "gspo"

[policies.slow.rollout]
groups_per_step = 6
temperature = 0.8

[policies.slow.training]
steps = 12
max_norm = 0.1
"""
LAST = {"fast": 6, "slow": 12}
SHARED: dict[str, Any] = SMALL | {"cold_start.steps": 0, "training.steps": LAST["fast"]}


def started(runs: Runs, folder: Path) -> Run:
    """Start them on two trainer ranks: test_policies.py trains policies on one."""
    config, tables = folder.with_suffix(".toml"), dict[str, dict[str, Any]]()
    for key, value in SHARED.items():
        tables.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
    shared = [f"{section}.{key} = {value}" for section, table in tables.items() for key, value in table.items()]
    config.write_text('base = "grpo_llama"\n' + "\n".join(shared) + POLICIES)
    return runs.start(folder, str(config), small=False)


def policies(folder: Path) -> dict[str, RunFiles]:
    return {name: RunFiles(folder / "policies" / name) for name in LAST}


def tokens(run: RunFiles) -> list[Any]:
    return [(line["step"], line["prompt_id"], line["tokens"]) for line in run.lines("rollouts.jsonl")]


def logprobs(run: RunFiles) -> list[float]:
    return [p for line in run.lines("rollouts.jsonl") for p in line["logprobs"]]


def losses(run: RunFiles) -> list[float]:
    return [line["loss"] for line in run.lines("metrics.jsonl")]


def alike(run: RunFiles, other: RunFiles) -> None:
    assert tokens(run) == tokens(other)
    assert logprobs(run) == pytest.approx(logprobs(other), abs=1e-5)
    assert losses(run) == pytest.approx(losses(other), abs=1e-5)


def audited(folder: Path) -> str:
    command = [sys.executable, "-m", "titan_rl", "audit", str(folder), "--all-bytes"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def together(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder."""
    run = started(runs, tmp_path_factory.mktemp("together") / "run")
    out = run.finish()
    assert run.code == 0, out
    assert "fast: finished: 6 steps" in out
    assert "slow: finished: 12 steps" in out
    return run.folder


def test_each_policy_is_as_if_it_trained_alone(runs: Runs, together: Path, tmp_path: Path) -> None:
    """Alone: the policy's own config.toml, in another folder."""
    for name, run in policies(together).items():
        alone = runs.finish(tmp_path / name, str(run.folder / "config.toml"), small=False)
        alike(run, alone)
        assert run.lines("metrics.jsonl")[-1]["step"] == LAST[name]
        assert len({round(loss, 6) for loss in losses(run)}) == LAST[name]
        assert max(line["logprob_gap/mean"] for line in run.lines("metrics.jsonl")) < 1e-5
        assert "nothing lost, nothing twice, nothing stale" in audited(run.folder)
        assert (run.folder / "hf" / "adapter" / "adapter_model.safetensors").exists()


def test_a_lost_trainer_ends_the_run_and_the_same_command_resumes_every_policy(
    runs: Runs, together: Path, tmp_path: Path
) -> None:
    """A rank dies; then Ctrl-C; then a generator dies, and the run is killed. Each policy makes the same steps."""
    folder = tmp_path / "run"
    run = started(runs, folder)
    run_of(run, "slow").wait_for_step(3)
    os.kill(run.workers()["trainer[dp=1 tp=0]"], signal.SIGKILL)
    out = run.finish()
    assert run.code == 1
    assert "trainer[dp=1 tp=0] died" in out
    assert f"slow: the same command resumes from RL step 2 in {folder / 'policies' / 'slow'}" in out

    run = started(runs, folder)
    run_of(run, "slow").wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    out = run.finish()
    assert run.code == 130, out
    for name, policy in policies(folder).items():
        step = policy.lines("metrics.jsonl")[-1]["step"]
        assert f"{name}: the same command resumes from RL step {step}" in out or (policy.folder / "hf").exists()

    run = started(runs, folder)
    reached = run_of(run, "slow").lines("metrics.jsonl")[-1]["step"]
    run_of(run, "slow").wait_for_step(reached + 1)
    os.kill(run.workers()["generator0[tp=0]"], signal.SIGKILL)
    run_of(run, "slow").wait_for_step(reached + 2)
    assert run.written("faults.jsonl")[-1]["outcome"] == "back"
    run.process.kill()
    run.finish()
    run = started(runs, folder)
    out = run.finish()
    assert run.code == 0, out
    for name, policy in policies(folder).items():
        alike(policy, policies(together)[name])
        assert "nothing lost, nothing twice, nothing stale" in audited(policy.folder)


def run_of(run: Run, name: str) -> Run:
    """Return the run as one of its policies' folders has it."""
    return Run(run.folder / "policies" / name, run.process)


def test_a_finished_run_of_policies_trains_nothing(runs: Runs, together: Path) -> None:
    run = started(runs, together)
    assert "nothing is left to train" in run.finish()
    assert run.code == 0
