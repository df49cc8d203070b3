"""Which workers a run does not join, and how an agent's reports become deaths."""

import asyncio
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from monarch.actor import HostMesh

from titan_rl.ext.hosts import remote_host
from titan_rl.ext.hosts.host_agent import HostAgent, Lease, Refusal, own_versions
from titan_rl.ext.hosts.remote_host import Joined, Joining, Remote, _while_served, mismatch
from titan_rl.ext.hosts.worker_address import address_of, answer_lookups
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import HostFacts

FACTS = HostFacts(
    own_versions(), os.getcwd(), "/tmp/agent", "/tmp/agent/report", "", 1, "boot", "boot pid:[1]", 2, [], "node1", 1
)


def test_a_worker_of_another_version_or_folder_is_refused() -> None:
    assert mismatch(FACTS) == ""
    assert "expected this run's versions, titan_rl" in mismatch(replace(FACTS, versions="titan_rl 0.0.1"))
    assert "found titan_rl 0.0.1; start its worker" in mismatch(replace(FACTS, versions="titan_rl 0.0.1"))
    assert "expected this run's current folder" in mismatch(replace(FACTS, folder="/elsewhere"))


def test_a_call_that_was_long_on_its_way_does_not_prolong_the_lease() -> None:
    """The controller counts from the last answer that it received, and the agent never counts from a later moment."""
    now = [0.0]
    lease = Lease(10, lambda: now[0])
    for now[0] in (1.0, 2.0):
        lease.on_call()
        lease.on_answer()
    now[0] = 11.5
    lease.on_call()  # sent at 2.1, to a host that was cut off until now
    lease.on_answer()
    assert not lease.over
    now[0] = 12.0
    assert lease.over, "10 s after the answer at 2.0"


@pytest.fixture
def reported(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Returns the deaths that listeners are called with; there are no earlier ranks."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(deaths, "_listeners", [lambda name, how: found.append((name, how))])
    return found


def test_ranks_of_another_host_live_and_die_by_the_reports_of_its_agent(reported: list[tuple[str, str]]) -> None:
    killed: list[int] = []
    env = deaths.follow(["trainer[dp=1 tp=0]"], "/tmp/agent/report")["trainer[dp=1 tp=0]"]
    assert env["TITAN_RL_REPORT"] == "/tmp/agent/report"
    launcher = deaths.Launcher(kill=killed.append)
    launcher.receive(f"name {env['TITAN_RL_RANK']}\n".encode())
    launcher.receive(b"pid 41\n")
    assert deaths.living() == ["trainer[dp=1 tp=0]"]
    assert deaths.alive() == {}, "its pid means nothing on this machine"
    launcher.receive(b"end 9\n")
    assert reported == [("trainer[dp=1 tp=0]", "was killed by signal 9")]
    assert deaths.living() == []
    assert not launcher.receive(b""), "the launcher has ended"
    assert reported == [("trainer[dp=1 tp=0]", "was killed by signal 9")]
    assert killed == []


def test_ranks_of_a_lost_host_are_dead(reported: list[tuple[str, str]]) -> None:
    env = deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")["generator0[tp=0]"]
    launcher = deaths.Launcher(kill=lambda _: None)
    launcher.receive(f"name {env['TITAN_RL_RANK']}\npid 41\n".encode())
    launcher.end("is gone: its host tls://node1:26600 does not answer")
    assert reported == [("generator0[tp=0]", "is gone: its host tls://node1:26600 does not answer")]
    assert deaths.living() == []


def test_ranks_that_are_expected_on_a_lost_host_are_dead_though_no_launcher_reported_them(
    reported: list[tuple[str, str]],
) -> None:
    deaths.follow(["generator0[tp=0]"], host="host2")  # moved on to host1:
    deaths.follow(["generator0[tp=0]"], host="host1")
    expected = deaths.follow(["trainer[dp=0 tp=0]"], host="host2")["trainer[dp=0 tp=0]"]
    deaths.Launcher(host="host2").receive(f"name {expected['TITAN_RL_RANK']}\n".encode())
    deaths.follow(["generator1[tp=0]"], host="host2")
    deaths.host_lost("host2", "is gone: the worker of its host host2 has ended")
    assert reported == [("generator1[tp=0]", "is gone: the worker of its host host2 has ended")]
    deaths.host_lost("host2", "again")
    assert len(reported) == 1
    assert deaths.ended("generator1[tp=0]") is not None, "calls to it end at once"


async def test_a_host_is_lost_with_its_agent_although_its_worker_lives_and_monarch_fails_no_call() -> None:
    class Unanswered:
        def call(self, *_: object) -> "Unanswered":
            return self

        async def as_asyncio(self) -> None:
            await asyncio.Event().wait()

    agent = SimpleNamespace(take=Unanswered(), end=Unanswered())
    with socket.create_server(("127.0.0.1", 0)) as worker, socket.create_server(("127.0.0.1", 0)) as lives:
        served, facts = address_of("tcp", *worker.getsockname()), replace(FACTS, port=lives.getsockname()[1])
        remote = Remote("host1", served, cast(HostMesh, None), agent, facts, Joining(9, 9, detect_seconds=0.2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.lost.wait(), 1)
        lives.close()
        await asyncio.wait_for(remote.lost.wait(), 10)


def test_a_rank_that_was_killed_before_it_was_started_is_killed_on_its_host(reported: list[tuple[str, str]]) -> None:
    killed: list[int] = []
    env = deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")["generator0[tp=0]"]
    deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")  # its successor
    launcher = deaths.Launcher(kill=killed.append)
    launcher.receive(f"name {env['TITAN_RL_RANK']}\npid 41\n".encode())
    assert killed == [41]
    assert reported == []
    assert deaths.living() == []


def test_a_host_is_one_runs_until_its_agent_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run's agent is refused while the first run's controller calls, and waits while it is silent. A folder
    that cannot be written to is named."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def claim(agent: HostAgent, run: str, within: float = 0.2) -> Refusal | None:
        return asyncio.run(agent.claimed(run, within))

    first, second, third = (HostAgent(30) for _ in range(3))
    assert claim(first, "the run in /a") is None
    unsure = claim(second, "the run in /b")
    assert unsure is not None
    assert unsure[:2] == ("it is busy with the run in /a, whose controller may be silent", False)
    assert 30 < unsure.seconds < 34, "its agent ends it then"
    assert first._awaited(), "the second asks again"
    first._write_holder(1.0)
    busy = claim(second, "the run in /b")
    assert busy is not None
    assert busy.final
    assert not first._awaited()
    assert busy.why.startswith("it is busy with the run in /a: wait")
    first._write_holder(-10.0)  # a while ago: its controller was killed
    waits = HostAgent(30)
    began = time.monotonic()
    refused = claim(waits, "the run in /d", within=60)
    assert refused is not None
    assert refused[:2] == ("it is busy with the run in /a, whose controller is silent", False)
    assert time.monotonic() - began < 30, "at once"
    began = time.monotonic()
    assert claim(waits, "the run in /d", within=0.5) is not None
    assert time.monotonic() - began >= 0.5, "and only once"
    assert first._awaited(), "also between two claims"
    os.close(cast(int, first._claim))  # it has ended
    assert claim(third, "the run in /c") is None
    os.close(cast(int, third._claim))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert claim(second, "the run in /b") == Refusal(
        f"its folder {tmp_path}/gone cannot be written to: No such file or directory", True
    )


async def test_an_agent_that_was_stopped_lets_no_rank_run_until_its_controller_calls_again() -> None:
    """As in a job that was suspended. Whoever was stopped alone may have been replaced."""
    agent, rank = HostAgent(2), psutil.Popen(["sleep", "600"])
    agent._pids.add(rank.pid)

    async def becomes(stopped: bool) -> None:
        async with asyncio.timeout(30):
            while (rank.status() == psutil.STATUS_STOPPED) != stopped:
                await asyncio.sleep(0.01)

    ends = asyncio.create_task(agent._end_with_the_run())
    try:
        await asyncio.sleep(0.01)
        time.sleep(2.5)  # the agent, too
        await becomes(stopped=True)
        agent._lease.on_call()  # sent before
        agent._lease.on_answer()
        assert agent._lease.over
        agent._lease.on_call()
        await becomes(stopped=False)
        assert rank.is_running()
        assert not ends.done()
    finally:
        ends.cancel()
        rank.kill()
        rank.wait()


async def test_a_claim_that_a_dead_worker_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a run that was killed ends with that run, also while another run waits for the host."""
    monkeypatch.setattr(remote_host, "CHECK_SECONDS", 0.05)
    serves = ["tcp://127.0.0.1:1001"]
    door = socket.create_server(("127.0.0.1", 0))
    answer_lookups(door, lambda: serves[-1], print)
    address = address_of("tcp", "127.0.0.1", door.getsockname()[1])

    async def never() -> Joined:
        await asyncio.Event().wait()
        raise AssertionError

    async def fails() -> Joined:
        raise ConnectionError("gone")

    asked = asyncio.create_task(_while_served(address, serves[0], never()))
    await asyncio.sleep(0.3)
    assert not asked.done(), "as long as it serves there, its answer may come"
    with pytest.raises(ConnectionError, match="gone"):
        await _while_served(address, serves[0], fails())
    serves.append("")  # it starts the next one
    await asyncio.sleep(0.3)
    assert not asked.done()
    serves.append("tcp://127.0.0.1:1002")
    assert await asyncio.wait_for(asked, 30) is None
    assert await _while_served(address, serves[0], fails()) is None
