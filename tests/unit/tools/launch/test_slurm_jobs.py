"""Scripts of Slurm jobs, really run: `launch.python` is a stand-in for Python with behaviour chosen by the test."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_slurm import FakeSlurm, wait_until
from support.launched import Launched
from titan_rl.tools.launch.job import REQUEUES

# What runs instead of titan_rl.run and titan_rl.worker: exits with the next code of `codes`; "wait" waits for SIGTERM.
STAND_IN = """#!/bin/bash
here=$(dirname "$0")
echo "$SLURMD_NODENAME $*" >> "$here/calls"
case "$2 $3" in
"titan_rl.worker --init-tls")
    mkdir -p "$4" ;;
titan_rl.worker*)
    echo "a worker on $SLURMD_NODENAME"
    [ ! -e "$here/broken" ] || exit 1
    touch "$here/up-$SLURMD_NODENAME"
    exec cat ;;
*)
    code=$(head -1 "$here/codes"); sed -i 1d "$here/codes"
    until [[ "$*" != *=attach* || -e "$here/up-127.0.0.3" && -e "$here/up-127.0.0.2" ]]; do sleep 0.05; done
    [ "$code" != wait ] || trap 'echo stopped; exit 130' TERM
    echo "the run is up"
    if [ "$code" = wait ]; then
        while :; do sleep 0.05; done
    fi
    exit "$code" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    cluster = FakeSlurm(tmp_path, monkeypatch)
    yield cluster
    cluster.end()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path, "run", STAND_IN, "--on=slurm")
    yield launched
    launched.end()


def test_a_job_is_followed_from_the_queue_to_the_runs_exit_code(slurm: FakeSlurm, launched: Launched) -> None:
    slurm.busy()
    process = launched.start([0])
    wait_until(slurm.jobs)
    assert process.stdout is not None
    (job,) = slurm.jobs()
    assert f"Slurm job {job}: pending (Priority)" in process.stdout.readline()
    slurm.free()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the run is up" in out
    assert f"Slurm job {job} ended with exit code 0" in out
    (call,) = launched.calls()
    assert call == f"127.0.0.2 -m titan_rl.run --config {launched.run}/launch/grpo_llama.toml"
    assert (launched.run / f"launch/job-{job}.log").read_text() == "the run is up\n"


def test_before_the_time_limit_the_run_stops_and_the_requeued_job_continues_it(
    slurm: FakeSlurm, launched: Launched
) -> None:
    process = launched.start(["wait", 0], "--launch.minutes=60")
    log = launched.run / "launch"
    wait_until(lambda: any("the run is up" in path.read_text() for path in log.glob("job-*.log")))
    (job,) = slurm.jobs()
    slurm.warn_before_the_limit(job)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert out.index("stopped") < out.index("back to the queue, to continue (at most 100 times)")
    assert out.count("the run is up") == 2
    assert slurm.job(job)["restarts"] == 1
    first, second = launched.calls()
    assert first == second


def test_the_requeues_of_a_job_end(slurm: FakeSlurm, launched: Launched) -> None:
    slurm.restarted(REQUEUES - 1)
    process = launched.start(["wait", "wait"])
    for starts in (1, 2):
        wait_until(lambda at=starts: len(launched.calls()) == at)
        (job,) = slurm.jobs()
        log = launched.run / f"launch/job-{job}.log"
        wait_until(lambda at=starts, log=log: log.read_text().count("the run is up") == at)
        slurm.warn_before_the_limit(job)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert slurm.job(job)["restarts"] == REQUEUES


def test_a_failed_run_is_retried_and_bad_input_is_not(slurm: FakeSlurm, launched: Launched) -> None:
    code, out = launched.finish([1, 1])
    assert code == 1
    assert "the run failed; retry 1 of at most 1" in out
    assert len(launched.calls()) == 2
    for starts, code in enumerate((2, 3), start=3):
        assert launched.finish([code])[0] == code
        assert len(launched.calls()) == starts


def test_a_cancelled_job_saves_and_is_not_started_again(slurm: FakeSlurm, launched: Launched) -> None:
    process = launched.start(["wait", 0])
    wait_until(lambda: any("up" in path.read_text() for path in launched.run.glob("launch/job-*.log")))
    (job,) = slurm.jobs()
    subprocess.run(["scancel", job], check=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "stopped" in out
    assert len(launched.calls()) == 1


def test_ctrl_c_leaves_the_job_and_the_same_command_follows_it_again(slurm: FakeSlurm, launched: Launched) -> None:
    process = launched.start(["wait", 0])
    wait_until(lambda: any("up" in path.read_text() for path in launched.run.glob("launch/job-*.log")))
    (job,) = slurm.jobs()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"Slurm job {job} continues; the same command follows it again, scancel {job} ends it" in out
    assert slurm.job(job)["state"] == "RUNNING"
    again = launched.start(["wait", 0])
    assert again.stdout is not None
    assert f"Slurm job {job} runs this already" in again.stdout.readline()
    assert slurm.jobs() == [job]
    slurm.warn_before_the_limit(job)
    (launched.folder / "codes").write_text("0\n")
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0, out


def test_workers_run_on_every_node_and_end_with_the_run(
    slurm: FakeSlurm, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of another job the launching shell is in."""
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "500")
    code, out = launched.finish([0], "--hosts.count=2", "--hosts.slots=2")
    assert code == 0, out
    assert "srun: " not in out
    (job,) = slurm.jobs()
    port = 20000 + int(job) % 10000
    certificates, *others = launched.calls()
    tls = launched.run / f"launch/tls-{job}"
    assert certificates == f"127.0.0.2 -m titan_rl.worker --init-tls {tls} --hosts 127.0.0.2,127.0.0.3"
    assert sorted(call for call in others if "titan_rl.worker" in call) == [
        f"{node} -m titan_rl.worker --address tls://{node}:{port} --tls {tls}/{node} --until-eof"
        for node in ("127.0.0.2", "127.0.0.3")
    ]
    (run,) = [call for call in others if "titan_rl.run" in call]
    assert f"--hosts.addresses=tls://127.0.0.2:{port},tls://127.0.0.3:{port}" in run
    assert f"--hosts.tls={tls}/127.0.0.2" in run
    assert not tls.exists()
    for node in ("127.0.0.2", "127.0.0.3"):
        assert (launched.run / f"launch/{node}.log").read_text() == f"a worker on {node}\n"


def test_a_run_does_not_wait_for_workers_that_have_ended(slurm: FakeSlurm, launched: Launched) -> None:
    """It is retried, at another port."""
    (launched.folder / "broken").touch()
    code, out = launched.finish([0, 0], "--hosts.count=2", "--hosts.slots=2")
    assert code == 1, out
    assert out.count("the workers ended before the run; their logs:") == 2
    assert out.count("the run failed; retry 1 of at most 1") == 1
    (job,) = slurm.jobs()
    assert not (launched.run / f"launch/tls-{job}").exists()
    ports = {call.partition("--address tls://127.0.0.2:")[2].partition(" ")[0] for call in launched.calls()} - {""}
    assert len(ports) == 2


def test_a_warning_that_comes_before_the_run_is_kept_for_it(slurm: FakeSlurm, launched: Launched) -> None:
    """The setup takes long, as the import of an image does. Slurm signals the script once."""
    slow = launched.folder / "slow"
    process = launched.start(
        [0], f'--launch.setup=[ "$SLURM_RESTART_COUNT" != 0 ] || {{ touch {slow}; exec sleep 60; }}'
    )
    wait_until(slow.exists)
    (job,) = slurm.jobs()
    slurm.warn_before_the_limit(job)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert out.count("back to the queue, to continue") == 1


def test_the_words_of_a_scheduler_that_refuses_are_shown(slurm: FakeSlurm, launched: Launched) -> None:
    (slurm.folder / "refuses").touch()
    code, out = launched.finish([0], "--launch.account=unknown")
    assert code == 1
    assert "Invalid account or account/partition combination specified" in " ".join(out.split())


def test_an_old_run_is_moved_once_and_not_when_the_job_starts_again(slurm: FakeSlurm, launched: Launched) -> None:
    launched.run.mkdir()
    (launched.run / "old").touch()
    code, out = launched.finish([1, 0], "--job.fresh")
    assert code == 0, out
    assert sorted(path.name for path in launched.folder.glob("run*")) == ["run", "run.1"]
    assert (launched.folder / "run.1/old").exists()
    assert "fresh" not in (launched.run / "launch/grpo_llama.toml").read_text()


def test_ctrl_c_while_a_job_is_submitted_is_heard_once_it_is_recorded(slurm: FakeSlurm, launched: Launched) -> None:
    """Or else the same command would submit it again."""
    (slurm.folder / "slow").touch()
    process = launched.start(["wait"])
    wait_until((slurm.folder / "submitting").exists)
    process.send_signal(signal.SIGINT)
    (slurm.folder / "slow").unlink()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    (job,) = slurm.jobs()
    assert f"Slurm job {job} continues" in out
    assert str(json.loads((launched.run / "launch/job.json").read_text())["slurm"]) == job
    wait_until(
        lambda: any("up" in path.read_text() for path in launched.run.glob("launch/job-*.log"))
    )  # it can be ended
