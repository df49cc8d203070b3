"""Real runs as jobs of clusters that this machine stands in for: each is stopped, started again, and finishes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_kubernetes import FakeKubernetes
from support.fake_slurm import FakeSlurm, wait_until
from support.outputs import same
from support.running import SMALL, WHOLE, Run, RunFiles
from titan_rl.tools.inspect.audit_rules import audit


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    cluster = FakeSlurm(tmp_path, monkeypatch)
    yield cluster
    cluster.end()


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    cluster = FakeKubernetes(tmp_path, monkeypatch)
    yield cluster
    cluster.close()


def launch(on: str, folder: Path, *flags: str) -> Run:
    keys = SMALL | {key.replace("__", "."): value for key, value in WHOLE.items()}
    command = [sys.executable, "-m", "titan_rl", "launch", "--config", "grpo_llama", "--on", on, "--poll", "0.1"]
    own = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    return Run(
        folder,
        subprocess.Popen(
            [*command, f"--job.dump_folder={folder}", *own, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TITAN_RL_TEST_RUN": str(folder)},
        ),
    )


def sound(run: Run, other: RunFiles) -> bool:
    assert audit(run.folder)[0] == []
    return same(run, other)


def test_a_job_of_two_nodes_that_is_stopped_before_its_limit_continues_in_the_queue_bit_for_bit(
    slurm: FakeSlurm, whole: RunFiles, tmp_path: Path
) -> None:
    run = launch("slurm", tmp_path / "run", "--launch.minutes=60", "--hosts.count=2")
    run.wait_for_step(2)
    (job,) = slurm.jobs()
    slurm.warn_before_the_limit(job)
    out = run.finish()
    assert run.code == 0, out
    assert slurm.job(job)["restarts"] == 1
    assert out.index("stopped; the same command resumes from RL step") < out.index("back to the queue, to continue")
    assert "resume" in out[out.index("back to the queue") :]
    assert sound(run, whole)
    wait_until(lambda: not run.processes())


def test_an_evicted_pod_of_two_saves_and_the_next_one_continues_bit_for_bit_with_the_same_worker(
    kubernetes: FakeKubernetes, whole: RunFiles, tmp_path: Path
) -> None:
    """Each pod has an address and a worker; the second pod's worker serves both runs."""
    kubernetes.named = True
    mounts = f"--launch.mounts={tmp_path}:{tmp_path}"
    own = [f"--launch.python={sys.executable}", "--launch.image=rl:1", "--hosts.count=2"]
    run = launch("kubernetes", tmp_path / "run", mounts, *own)
    run.wait_for_step(2)
    kubernetes.disrupt(0)
    out = run.finish()
    assert run.code == 0, out
    assert "stopped; the same command resumes from RL step" in out
    assert sorted(pod.index for pod in kubernetes.pods) == [0, 0, 1], out
    assert sound(run, whole)
    wait_until(lambda: not run.processes())
