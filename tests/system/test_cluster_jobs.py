"""A real run as a Slurm job, on programs that stand in for Slurm's: stopped before its limit, requeued, finished."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_slurm import FakeSlurm, wait_until
from support.outputs import losses, sampled
from support.running import SMALL, WHOLE, Run
from titan_rl.record.history import audit


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    cluster = FakeSlurm(tmp_path, monkeypatch)
    yield cluster
    cluster.end()


def launch(folder: Path, *flags: str) -> Run:
    keys = SMALL | {key.replace("__", "."): value for key, value in WHOLE.items()}
    command = [sys.executable, "-m", "titan_rl.launch", "--config", "grpo_llama", "--on", "slurm", "--poll", "0.1"]
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


def test_a_job_that_is_stopped_before_its_limit_continues_in_the_queue_bit_for_bit(
    slurm: FakeSlurm, whole: Run, tmp_path: Path
) -> None:
    run = launch(tmp_path / "run", "--launch.minutes=60")
    run.wait_for_step(2)
    (job,) = slurm.jobs()
    slurm.warn_before_the_limit(job)
    out = run.finish()
    assert run.code == 0, out
    assert slurm.job(job)["restarts"] == 1
    assert out.index("stopped; the same command resumes from RL step") < out.index("back to the queue, to continue")
    assert "resume" in out[out.index("back to the queue") :]
    for kind in ("cold_start", "rl"):
        assert losses(run, kind) == losses(whole, kind)
    assert sampled(run) == sampled(whole)
    assert audit(run.folder)[0] == []
    wait_until(lambda: not run.processes())
