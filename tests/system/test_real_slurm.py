"""What docs/clusters.md promises of jobs on Slurm, on a real Slurm cluster of three hosts."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.real_slurm import KILL_WAIT, RealSlurm, SlurmRun, why_no_slurm
from titan_rl.tools.inspect.audit_rules import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BACK = "back to the queue, to continue"
STOPPED = "stopped; the same command resumes from RL step"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSlurm]:
    if why := why_no_slurm():
        pytest.skip(why)
    with ExitStack() as stack:
        yield RealSlurm(stack, tmp_path_factory.mktemp("slurm"))


def finished(run: SlurmRun, restarts: int) -> None:
    assert run.finish() == 0, run.out
    assert run.facts["Restarts"] == str(restarts), run.out
    assert audit(run.folder)[0] == []
    left_nothing(run)


def left_nothing(run: SlurmRun) -> None:
    assert not list(run.launched.glob("tls-*")), "keys"
    assert "srun: error: Unable" not in run.out
    assert "srun: Warning" not in run.out


def test_a_job_of_one_node_finishes(slurm: RealSlurm, tmp_path: Path) -> None:
    finished(slurm.launch(tmp_path / "a run"), restarts=0)


def test_a_job_of_two_nodes_with_gpus_outlives_a_suspension(slurm: RealSlurm, tmp_path: Path) -> None:
    run = slurm.launch(tmp_path / "run", "--hosts.count=2", "--hosts.slots=2", "--hosts.orphan_seconds=4")
    run.hold_after(2)
    assert run.facts["TresPerNode"] == "gres:gpu:2"
    slurm.ask("scontrol", "suspend", run.job)
    time.sleep(8)  # longer than the hosts wait for the controller
    slurm.ask("scontrol", "resume", run.job)
    run.release()
    finished(run, restarts=0)
    assert not run.written("faults.jsonl")


def test_an_allocation_runs_a_job_here(slurm: RealSlurm, tmp_path: Path) -> None:
    """Ctrl-C saves; the same command continues."""
    allocated = slurm.launch(tmp_path / "run", "--hosts.count=2", "--here", within=["salloc", "-N2", "--exclusive"])
    allocated.hold_after(2)
    allocated.launcher.send_signal(signal.SIGINT)
    allocated.release()
    assert allocated.finish() == 130, allocated.out
    assert allocated.out.count(STOPPED) == 1
    again = slurm.launch(tmp_path / "run", "--hosts.count=2", "--here", within=["salloc", "-N2", "--exclusive"])
    assert again.finish() == 0, again.out
    assert audit(again.folder)[0] == []
    left_nothing(again)


def test_a_job_continues_after_its_time_limit_a_requeue_and_pre_emption(slurm: RealSlurm, tmp_path: Path) -> None:
    run = slurm.launch(tmp_path / "run", "--hosts.count=2", "--launch.partition=low", "--training.steps=20")
    run.hold_after(2)
    run.limit_soon()
    run.wait_for_out("SIGTERM: step", "it is warned")
    run.release()
    run.hurry(1)
    slurm.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")
    run.hold_after(run.last_step + 1)
    slurm.ask("scontrol", "requeue", run.job)
    run.release()
    run.hurry(2)
    assert run.out.count(BACK) == 1, "Slurm itself has requeued it the second time"
    run.hold_after(run.last_step + 1)
    with slurm.urgent_job():
        run.wait_for(lambda: run.facts["PreemptTime"] != "None", "it is pre-empted")
        run.release()
        run.wait_for(lambda: run.out.count(BACK) == 2, "it has saved within the grace")
    run.hurry(3)
    finished(run, restarts=3)
    assert run.out.count(STOPPED) == 3


def test_a_job_without_grace_is_requeued_and_a_cancelled_one_ends_at_once(slurm: RealSlurm, tmp_path: Path) -> None:
    run = slurm.launch(tmp_path / "run", "--hosts.count=2", "--launch.partition=lowest", "--training.steps=1000")
    run.hold_after(2)
    with slurm.urgent_job():
        run.wait_for(lambda: run.facts["Restarts"] == "1", "it is pre-empted")
        run.release()
        run.wait_for(lambda: run.out.count(STOPPED) == 1, "it has saved")
    run.hurry(1)
    run.wait_for_step(run.last_step + 2)
    assert not list(run.launched.glob("tls-*/ca.key")), "nothing needs it any more"
    slurm.ask("scancel", run.job)
    began = time.monotonic()
    assert run.finish() == 130, run.out
    slurm.wait_for_idle()
    assert time.monotonic() - began < KILL_WAIT
    assert run.out.count(STOPPED) == 2
    assert (run.launched / f"exit-{run.job}").read_text() == "130\n"
    assert audit(run.folder)[0] == []
    left_nothing(run)


def test_a_job_waits_for_a_late_node_and_outlives_a_lost_one_while_there_is_a_spare(
    slurm: RealSlurm, tmp_path: Path
) -> None:
    """Without a spare it is back in the queue, and starts on three nodes again."""
    late = '[ "$SLURMD_NODENAME$SLURM_RESTART_COUNT" != node2 ] || sleep 65  # more than hosts.join_seconds elsewhere'
    place = '--placement.hosts={trainer = "0", generator = "1"}'
    keys = ["--generator.replicas=2", "--hosts.slots=2", "--hosts.device=cpu", "--training.steps=40", place]
    run = slurm.launch(tmp_path / "run", "--hosts.count=3", f"--launch.setup={late}", *keys)
    run.hold_after(2)
    began = time.monotonic()
    slurm.kill_node("node2")
    run.wait_for(lambda: run.back == 2, "its replicas are back")
    print(f"replicas back {time.monotonic() - began:.1f} s after a node was killed")
    assert set(slurm.switch.hosts["node3"].ranks()) == {"generator0[tp=0]", "generator1[tp=0]"}
    run.wait_for(lambda: run.facts["NodeList"] == "node[1,3]", "Slurm has noticed it")
    run.release()
    run.wait_for_step(4)
    slurm.ask("scontrol", "update", "nodename=node3", "state=down", "reason=test")
    run.wait_for_out("the run failed; retry 1 of at most 1", "there is no spare")
    slurm.boot_node("node2")  # node3 is back by itself
    run.hurry(1)
    finished(run, restarts=1)
    slurm.wait_for_idle()


def test_a_job_that_could_not_start_is_retried_and_one_that_learns_nothing_is_not(
    slurm: RealSlurm, tmp_path: Path
) -> None:
    fails = '[ -n "$SLURM_RESTART_COUNT" ] || exit 1'
    dead = ["--cold_start.steps=0", "--algorithm.max_dead_steps=2", "--training.steps=50"]
    run = slurm.launch(tmp_path / "run", "--hosts.count=2", f"--launch.setup={fails}", *dead)
    run.wait_for_out("the run failed; retry 1 of at most 1", "its certificates are not made")
    run.hurry(1)
    assert run.finish() == 3, run.out
    assert run.out.count("the run failed; retry 1 of at most 1") == 1
    assert "2 steps in a row had no learning signal" in run.out
    assert run.facts["Restarts"] == "1"
    left_nothing(run)
