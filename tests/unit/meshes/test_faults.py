"""Turn Monarch's own reports into errors that name the rank."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import Watch, ask, death_behind, failure, not_started
from titan_rl.meshes.starter import LAUNCHER
from titan_rl.wire.errors import RankDied, RankFailed, RunError

pytestmark = pytest.mark.usefixtures("no_ranks")

KILLED = (
    "The actor <root>.<titan_rl.actors.model_rank.ModelRank trainer{'dp': 1/2, 'tp': 0/1}> and all its descendants "
    "have failed:\n  the process this actor was running on failed: Killed(sig=9)"
)
OURS_TOO = KILLED.replace(
    "titan_rl.actors.model_rank.ModelRank trainer", "monarch._src.spmd.actor.SPMDActor _SPMDActor"
)


def test_a_death_is_named() -> None:
    error = failure(KILLED)
    assert isinstance(error, RankDied)
    assert str(error) == "trainer[dp=1 tp=0] died: its process was killed by signal 9"
    assert error.details == KILLED


def test_the_axis_of_hosts_is_no_part_of_a_name() -> None:
    on_a_worker = KILLED.replace("{'dp': 1/2, 'tp': 0/1}", "{'hosts': 0/1, 'dp': 1/2, 'tp': 0/1}")
    assert failure(on_a_worker).rank == "trainer[dp=1 tp=0]"


def test_an_actor_that_aborts_is_named_too() -> None:
    report = "The actor <root>.<titan_rl.x.Y y{'p': 0/1}> and all ...:\n  actor explicitly aborted due to: Traceback"
    assert str(failure(report)) == "y[p=0] failed"


def test_a_process_that_monarch_could_not_start_is_named_with_its_host_or_the_time_it_had() -> None:
    refused = "error creating proc 0 (host rank 0), agent host_agent.service@ipc:///tmp/h0/worker<hyper>: No space left"
    late = "error spawning proc mesh: statuses: Timeout(30.00119794s)=0..1"
    for report, what in (
        (refused, "generator1[tp=0] cannot be started on ipc:///tmp/h0/worker"),
        (late, "generator1[tp=0] was not started within 30 s"),
    ):
        failed = not_started("generator1[tp=0]", report)
        assert failed is not None
        assert (str(failed), failed.rank) == (what, "generator1[tp=0]")
        assert report in failed.details
    assert not_started("generator1[tp=0]", "expected a number") is None, "a bug of ours, which is not hidden"


def test_the_death_behind_an_error_is_its_cause() -> None:
    """A peer's collective breaks before supervision sees the death. The user must read about the death."""

    async def body() -> RunError:
        watch, loop = Watch(), asyncio.get_running_loop()
        loop.call_later(
            0.2, watch._hook, SimpleNamespace(report=lambda: OURS_TOO)
        )  # Monarch's own actor is reported first
        loop.call_later(0.3, watch._hook, SimpleNamespace(report=lambda: KILLED))
        broken = "trainer[dp=0 tp=0] failed in step: RuntimeError"
        try:
            return await watch.cause(RankFailed(broken, "gloo: closed", rank="trainer[dp=0 tp=0]"))
        finally:
            watch.close()

    assert str(asyncio.run(body())).startswith("trainer[dp=1 tp=0] died")


def test_a_peer_that_dies_is_the_cause_though_its_death_is_known_later() -> None:
    ranks, error = ["role[tp=0]", "role[tp=1]"], RankFailed("role[tp=0] failed in watch: RuntimeError")

    async def body() -> Exception:
        asyncio.get_running_loop().call_later(0.1, deaths._ends.__setitem__, ranks[1], "was killed by signal 9")
        return await death_behind(error, ranks)

    assert str(asyncio.run(body())) == "role[tp=1] died: its process was killed by signal 9"
    deaths._ends.clear()
    assert asyncio.run(death_behind(error, ranks)) is error, "none died"
    assert asyncio.run(death_behind(error, ranks[:1])) is error, "it has no peer"


def test_an_error_of_no_rank_waits_for_no_death() -> None:
    async def body() -> tuple[RunError, float]:
        watch, began = Watch(), time.monotonic()
        found = await watch.cause(RunError("hopeless"))
        watch.close()
        return found, time.monotonic() - began

    found, took = asyncio.run(body())
    assert str(found) == "hopeless"
    assert took < 1


def driven(watch_tends: list[str], report: str) -> str:
    """Drive work that is interrupted by a report, and other work after it. Return the first error."""

    async def body() -> str:
        watch, loop = Watch(watch_tends), asyncio.get_running_loop()
        loop.call_later(0.1, watch._hook, SimpleNamespace(report=lambda: report))
        try:
            await watch.drive(asyncio.sleep(0.5))
        except RunError as error:
            await watch.drive(asyncio.sleep(0))
            return str(error)
        finally:
            watch.close()
        return "undisturbed"

    return asyncio.run(body())


def test_a_death_ends_what_is_driven_though_it_waits_for_something_else() -> None:
    assert driven([], KILLED) == "trainer[dp=1 tp=0] died: its process was killed by signal 9"


def test_a_death_of_a_rank_that_is_tended_disturbs_no_other() -> None:
    assert driven(["generator"], KILLED.replace("trainer{", "generator0{")) == "undisturbed"


async def test_a_driver_that_is_cancelled_cancels_what_it_drives() -> None:
    watch, over = Watch(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            over.set()

    task = asyncio.create_task(watch.drive(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    watch.close()
    assert over.is_set()


def test_a_call_that_does_not_answer_is_named() -> None:
    async def body() -> None:
        never: Any = SimpleNamespace(as_asyncio=lambda: asyncio.Event().wait())
        await ask(never, actor="trainer[dp=0 tp=0]", verb="step", seconds=0.05)

    with pytest.raises(RunError, match=r"trainer\[dp=0 tp=0\]\.step did not answer within 0\.05 s"):
        asyncio.run(body())


def test_a_killed_child_is_known_at_once_and_its_calls_end() -> None:
    """The kernel reports it, independently of Monarch; a later process of the same name starts without it."""

    def child() -> subprocess.Popen[bytes]:
        """Start a rank, whose parent is its launcher."""
        env = deaths.follow(["role[dp=0 tp=0]"])["role[dp=0 tp=0]"] | {"TITAN_RL_CONTROLLER": str(os.getpid())}
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        made = subprocess.Popen([sys.executable, "-I", "-S", LAUNCHER, *command], env=env)
        while "role[dp=0 tp=0]" not in deaths.alive():
            time.sleep(0.01)
        return made

    async def body() -> float:
        loop = asyncio.get_running_loop()
        never: Any = SimpleNamespace(as_asyncio=lambda: asyncio.Event().wait())
        task = asyncio.create_task(ask(never, actor="role[dp=0 tp=0]", verb="step", seconds=60))
        other = asyncio.create_task(ask(never, actor="role[dp=1 tp=0]", verb="step", seconds=60))
        await asyncio.sleep(0.05)
        os.kill(deaths.alive()["role[dp=0 tp=0]"], signal.SIGKILL)
        began = loop.time()
        with pytest.raises(RankDied, match=r"role\[dp=0 tp=0\] died: its process was killed by signal 9"):
            await task
        with pytest.raises(RankDied):  # a later call does not wait either
            await ask(never, actor="role[dp=0 tp=0]", verb="step", seconds=60)
        took = loop.time() - began
        assert not other.done()
        other.cancel()
        return took

    for _ in range(2):
        before = time.monotonic()
        made = child()
        assert before < deaths.begun()["role[dp=0 tp=0]"] < time.monotonic(), "the newest process's"
        assert asyncio.run(body()) < 30, "far below the calls' deadline"
        made.wait()


async def test_a_cancelled_caller_is_no_death() -> None:
    never: Any = SimpleNamespace(as_asyncio=lambda: asyncio.Event().wait())
    task = asyncio.create_task(ask(never, actor="role[tp=0]", verb="step", seconds=60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
