"""Which workers a run does not join, and how an agent's words become deaths."""

import os
from dataclasses import replace

import pytest

from titan_rl.meshes import deaths
from titan_rl.meshes.host_agent import HostFacts, own_versions
from titan_rl.meshes.remote_host import mismatch

FACTS = HostFacts(own_versions(), os.getcwd(), "/tmp/agent", "/tmp/agent/report", "", 1, "boot", 2, [], "node1")


def test_a_worker_of_another_version_or_folder_is_refused() -> None:
    assert mismatch(FACTS) == ""
    assert "expected this run's versions, titan_rl" in mismatch(replace(FACTS, versions="titan_rl 0.0.1"))
    assert "found titan_rl 0.0.1; start its worker" in mismatch(replace(FACTS, versions="titan_rl 0.0.1"))
    assert "expected this run's current folder" in mismatch(replace(FACTS, folder="/elsewhere"))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The deaths that listeners hear of, with no earlier ranks."""
    for name in ("_followed", "_away", "_lives", "_meant", "_ends", "_waiting"):
        monkeypatch.setattr(deaths, name, type(getattr(deaths, name))())
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(deaths, "_listeners", [lambda name, how: found.append((name, how))])
    return found


def test_ranks_of_another_host_live_and_die_by_what_its_agent_passes_on(heard: list[tuple[str, str]]) -> None:
    killed: list[int] = []
    env = deaths.follow(["trainer[dp=1 tp=0]"], "/tmp/agent/report")["trainer[dp=1 tp=0]"]
    assert env["TITAN_RL_REPORT"] == "/tmp/agent/report"
    shim = deaths.Shim(kill=killed.append)
    shim.hear(f"name {env['TITAN_RL_SHIM']}\n".encode())
    shim.hear(b"pid 41\n")
    assert deaths.living() == ["trainer[dp=1 tp=0]"]
    assert deaths.alive() == {}, "its pid means nothing on this machine"
    shim.hear(b"end 9\n")
    assert heard == [("trainer[dp=1 tp=0]", "was killed by signal 9")]
    assert deaths.living() == []
    assert not shim.hear(b""), "the shim has ended"
    assert heard == [("trainer[dp=1 tp=0]", "was killed by signal 9")]
    assert killed == []


def test_ranks_of_a_lost_host_are_dead(heard: list[tuple[str, str]]) -> None:
    env = deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")["generator0[tp=0]"]
    shim = deaths.Shim(kill=lambda _: None)
    shim.hear(f"name {env['TITAN_RL_SHIM']}\npid 41\n".encode())
    shim.end("is gone: its host tls://node1:26600 does not answer")
    assert heard == [("generator0[tp=0]", "is gone: its host tls://node1:26600 does not answer")]
    assert deaths.living() == []


def test_a_rank_that_was_killed_before_it_was_born_is_killed_on_its_host(heard: list[tuple[str, str]]) -> None:
    killed: list[int] = []
    env = deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")["generator0[tp=0]"]
    deaths.follow(["generator0[tp=0]"], "/tmp/agent/report")  # its successor
    shim = deaths.Shim(kill=killed.append)
    shim.hear(f"name {env['TITAN_RL_SHIM']}\npid 41\n".encode())
    assert killed == [41]
    assert heard == []
    assert deaths.living() == []
