"""Whole runs that lose ranks of every mesh, and continue."""

import json
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled, shared_memory
from support.running import Run, Runs
from titan_rl.record.config_history import cuts
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.run_files import RunFiles

ROLES: dict[str, Any] = {  # a policy, a critic, a reference and a generator, each on a separate mesh
    "task__reward": "dense_reward:digits",
    "task__eval_reward": "exact",
    "reference__mesh": "own",
    "algorithm__kl_coef": 0.01,
    "algorithm__max_dead_steps": 0,
    "cold_start__steps": 4,
    "checkpoint__interval": 8,
    "fault__snapshot_interval": 2,
    "training__steps": 16,
    "eval__interval": 0,
}


@pytest.fixture(scope="module")
def undisturbed(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runs.finish(tmp_path_factory.mktemp("undisturbed") / "run", "ppo_llama", **ROLES)


def faults(run: Run) -> list[dict[str, Any]]:
    """What was lost and is back."""
    return [line for line in run.written("faults.jsonl") if line["outcome"] == "back"]


def hit(run: Run, rank: str, number: int = signal.SIGKILL) -> float:
    os.kill(run.workers()[rank], number)
    return time.time()


def until(run: Run, what: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ends_well(run: Run, code: int = 0) -> str:
    out = run.finish()
    assert run.code == code, out
    problems, looked_at = audit(run.folder)
    assert not problems, (problems, looked_at, out)
    assert not run.processes()
    return out


def test_every_role_may_die_and_the_losses_are_those_of_an_undisturbed_run(
    runs: Runs, undisturbed: Run, tmp_path: Path
) -> None:
    shared = shared_memory()
    run = runs.start(tmp_path / "harmed", "ppo_llama", **ROLES)
    victims = {
        "trainer[dp=0 tp=0]": 3,
        "critic[dp=0 tp=0]": 5,
        "reference[dp=0 tp=0]": 7,
        "generator0[tp=0]": 9,
    }
    for count, (victim, step) in enumerate(victims.items()):
        run.wait_for_step(step)
        before = run.workers()
        began = hit(run, victim)
        until(run, lambda count=count: len(faults(run)) > count)
        fault = faults(run)[-1]
        assert f"{victim} died: its process" in fault["why"], "the kernel reports it; no deadline passed"
        assert fault["time"] - began < 60
        assert fault["redone"] <= 2
        others = {name for name in before if name.partition("[")[0] != victim.partition("[")[0]}
        assert {name: run.workers()[name] for name in others} == {name: before[name] for name in others}
    run.wait_for_step(12)
    for victim in (
        "trainer[dp=0 tp=0]",
        "generator0[tp=0]",
    ):  # both at once: no generator serves as the trainer is back
        hit(run, victim)
    until(run, lambda: len(faults(run)) == len(victims) + 2)
    ends_well(run)
    assert losses(run) == losses(undisturbed)
    assert sampled(run) == sampled(undisturbed)
    assert shared_memory() <= shared
    assert not list(Path(tempfile.gettempdir()).glob(f"titan_rl-{run.process.pid}-*")), "its sockets"


def test_a_critic_resumes_with_the_policy(runs: Runs, undisturbed: Run, tmp_path: Path) -> None:
    """From the checkpoint in the middle, in a copy of the folder: the end of the critic's newest one is missing."""
    folder = shutil.copytree(undisturbed.folder, tmp_path / "run")
    harmed = folder / "checkpoint/critic/step-16/__0_0.distcp"
    os.truncate(harmed, harmed.stat().st_size - 1)
    parts = runs.start(folder, "ppo_llama", **ROLES)
    out = " ".join(ends_well(parts).split())
    assert "the checkpoint of step 16 is damaged, and the checkpoint of step 8 is used instead" in out
    for model in ("checkpoint", "checkpoint/critic"):
        assert {path.name for path in (folder / model).glob("*-*")} == {"damaged-16.1", "step-8", "step-16"}, "kept"
    whole, again = (run.lines("metrics.jsonl") for run in (undisturbed, parts))
    assert [line["step"] for line in again] == list(range(1, 17))
    assert again[8]["time"] > whole[-1]["time"], "trained again from step 9 on"
    for name in ("loss", "value/loss", "value/explained_variance", "kl/k1", "grad_norm"):
        assert [line.get(name) for line in again] == [line.get(name) for line in whole], name


def test_a_lagging_run_survives_a_hang_a_full_disk_and_a_dead_replica(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "rollout__max_staleness_steps": 1,
        "generator__replicas": 2,
        "comm__train_timeout_seconds": 15,
        "fault__snapshot_interval": 2,
        "fault__hang_seconds": 4,
        "fault__max_failed_saves": 1000,
        "algorithm__max_dead_steps": 0,
        "checkpoint__interval": 5,
        "training__steps": 100_000,
        "eval__interval": 0,
    }
    run = runs.start(tmp_path / "run", **keys)
    run.wait_for_step(3)
    hit(run, "trainer[dp=1 tp=0]", signal.SIGSTOP)
    until(run, lambda: len(faults(run)) > 0)
    assert "did not answer within 15 s" in faults(run)[0]["why"]
    for victim, number in (("generator1[tp=0]", signal.SIGKILL), ("generator0[tp=0]", signal.SIGSTOP)):
        count = len(faults(run))
        hit(run, victim, number)
        until(run, lambda count=count: len(faults(run)) > count)
    pids = [pid for name, pid in run.workers().items() if name.startswith("trainer")]
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY)) for pid in pids]
    written = step_of(run)
    until(run, lambda: step_of(run) > written + 20)
    for pid, limits in zip(pids, before, strict=True):
        with suppress(ProcessLookupError):  # a loaded machine: it was replaced
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    written = step_of(run)
    until(run, lambda: step_of(run) > written + 5)
    run.process.send_signal(signal.SIGINT)
    out = ends_well(run, code=130)
    assert "controller waits on trainer[dp=1 tp=0] for" in out or "controller waits on trainer[dp=0 tp=0] for" in out
    assert "stopped by a signal" in out
    assert "failed, and is tried again after the next" in out
    assert (run.folder / "checkpoint" / f"step-{step_of(run)}" / ".metadata").exists()


def step_of(run: Run) -> int:
    return max(line["step"] for line in run.lines("metrics.jsonl"))


def test_beyond_its_budget_a_run_ends_by_name_and_can_be_resumed(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"algorithm__max_dead_steps": 0, "fault__max_restarts": 1, "checkpoint__interval": 2}
    run = runs.start(tmp_path / "run", training__steps=1000, **keys)
    run.wait_for_step(3)
    hit(run, "trainer[dp=0 tp=0]")
    until(run, lambda: len(faults(run)) > 0)
    hit(run, "trainer[dp=1 tp=0]")
    out = run.finish(timeout=120)
    assert run.code == 1, out
    assert "trainer[dp=1 tp=0] died" in out
    assert "trainer was respawned 1 time within 600 s already" in out
    assert "the same command resumes from RL step" in out
    assert not run.processes()
    runs.finish(run.folder, training__steps=step_of(run) + 1, **keys)
    assert not audit(run.folder)[0]


def test_steps_without_a_finite_gradient_are_rolled_back_and_change_no_weight(runs: Runs, tmp_path: Path) -> None:
    huge = {"task__reward": "dense_reward:huge", "task__eval_reward": "exact", "algorithm__normalize": "none"}
    keys: dict[str, Any] = {"cold_start__steps": 0, "training__steps": 50, "eval__interval": 0}
    run = runs.start(
        tmp_path / "run", **huge, **keys, fault__on_bad_steps="rollback", fault__max_restarts=1, checkpoint__interval=1
    )
    out = run.finish()
    assert run.code == 1, out
    assert out.count("steps in a row had a gradient that is not finite") == 2, out
    assert "the run went back 1 time within 600 s already" in out
    assert list((run.folder / "checkpoint").glob("undone-*"))
    lines = run.lines("metrics.jsonl")
    assert [line["updates/skipped"] for line in lines[-3:]] == [1, 1, 1]
    # The weights are good: another reward continues from the checkpoint, and its log-probs are the generator's.
    dense = {"task__reward": "dense_reward:digits", "task__eval_reward": "exact", "optimizer__lr": 1e-3}
    keys |= {"training__steps": lines[-1]["step"] + 1, "job__resume_changed": True}
    resumed = runs.finish(run.folder, **keys, **dense)
    assert resumed.lines("metrics.jsonl")[-1]["logprob_gap/mean"] <= 1e-5
    (cut,) = cuts(run.folder)
    assert cut.changed["task.reward"] == ('"dense_reward:huge"', '"dense_reward:digits"')
    begun = [event for event in RunFiles(run.folder).ledger() if event["event"] == "begun"]
    assert begun[-1]["changed"] == {key: list(values) for key, values in cut.changed.items()}
    assert not audit(run.folder)[0]


def test_a_bad_step_that_its_prompts_cause_is_not_made_again(runs: Runs, tmp_path: Path) -> None:
    some = {"task__reward": "dense_reward:huge_for_some", "task__eval_reward": "exact", "algorithm__normalize": "none"}
    keys: dict[str, Any] = {"fault__on_bad_steps": "rollback", "fault__max_bad_steps": 1, "fault__max_restarts": 20}
    run = runs.start(tmp_path / "run", training__steps=16, eval__interval=0, checkpoint__interval=4, **some, **keys)
    out = ends_well(run)
    rolled_back = [e["prompt"] for e in RunFiles(run.folder).ledger() if e.get("reason") == "rolled back"]
    assert rolled_back, out
    assert all(line["updates/skipped"] == 0 for line in run.lines("metrics.jsonl"))


@pytest.mark.parametrize("victim", ["generator1[tp=0]"])
def test_a_run_grows_shrinks_and_says_how_it_is(runs: Runs, tmp_path: Path, victim: str) -> None:
    import subprocess
    import sys

    def ctl(*arguments: str) -> Any:
        command = [sys.executable, "-m", "titan_rl.tools.ctl", str(run.folder), *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run = runs.start(tmp_path / "run", training__steps=1000, algorithm__max_dead_steps=0)
    run.wait_for_step(1)
    assert ctl("scale", "generators=2") == {"generators": 2}
    status = ctl("status")
    (rank,) = [rank for rank in status["ranks"] if rank["rank"] == victim]
    assert rank["pid"] == run.workers()[victim]
    assert rank["state"] == "serving"
    assert ctl("scale", "generators=1") == {"generators": 1}
    assert victim not in run.workers()
    ctl("stop", "--wait")
    run.finish()
    assert run.code == 130
    assert not audit(run.folder)[0]
