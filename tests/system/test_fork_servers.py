"""Whole runs whose ranks are forked by fork servers, or not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.outputs import losses, sampled
from support.running import Run, Runs
from titan_rl.ext.fork_servers.fork_servers import OFF, VARIABLE

ENDLESS: dict[str, Any] = {"training__steps": 100_000, "eval__interval": 0, "algorithm__max_dead_steps": 0}


def until(run: Run, what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert run.process.poll() is None, run.finish(5)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def servers(run: Run) -> dict[str, psutil.Process]:
    """Return the run's own fork servers, by kind."""
    found = dict[str, psutil.Process]()
    for process in psutil.Process(run.process.pid).children():
        with suppress(psutil.Error):  # it has ended meanwhile
            command = process.cmdline()
            if command[2:3] and command[2].endswith("fork_server.py"):
                found[command[3]] = process
    return found


def replaced(run: Run) -> list[str]:
    return [line["why"] for line in run.written("faults.jsonl") if line["outcome"] == "back"]


def test_forked_and_cold_ranks_compute_the_same_bits(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = runs.start(tmp_path / "forked")
    forked.wait_for_step(1)
    for name, pid in forked.workers().items():
        rank = psutil.Process(pid)
        assert "fork_server.py" in " ".join(rank.parents()[0].cmdline()), name
        assert Path(f"/proc/{pid}/comm").read_text() == f"{name[:15]}\n", "for people who look at ps and top"
    out = forked.finish()
    assert forked.code == 0, out
    assert "start cold" not in out
    monkeypatch.setenv(VARIABLE, OFF)
    cold = runs.start(tmp_path / "cold")
    cold.wait_for_step(1)
    for name, pid in cold.workers().items():
        assert "rank_launcher.py" in " ".join(psutil.Process(pid).parents()[0].cmdline()), name
    out = cold.finish()
    assert cold.code == 0, out
    assert "start cold" not in out, "nothing is wrong if they were asked to"
    for kind in ("cold_start", "rl"):
        assert losses(forked, kind) == losses(cold, kind) != []
    assert sampled(forked) == sampled(cold) != []
    weights = [(run.folder / "hf").glob("*.safetensors") for run in (forked, cold)]
    for one, other in zip(*weights, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_run_outlives_its_fork_servers_and_leaves_nothing(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed, and its ranks with it. The other hangs, and its ranks live on until they are killed."""
    monkeypatch.delenv(VARIABLE)
    run = runs.start(tmp_path / "run", **ENDLESS)
    run.wait_for_step(2)
    own = servers(run)
    assert sorted(own) == ["generator", "model"]
    ends = [("generator", "generator0[tp=0]", signal.SIGSTOP), ("model", "trainer[dp=", signal.SIGKILL)]
    for count, (kind, rank, number) in enumerate(ends):
        before = run.workers()
        lost = [name for name in before if name.startswith(rank)]
        assert lost
        own[kind].send_signal(number)
        if number == signal.SIGSTOP:
            os.kill(before[lost[0]], signal.SIGKILL)
        until(run, lambda count=count: len(replaced(run)) > count)
        assert rank in replaced(run)[count]
        assert all(run.workers()[name] != before[name] for name in lost)
    left = psutil.Process(run.process.pid).children(recursive=True)
    assert len(left) >= 6, "three ranks and their launchers"
    run.process.kill()
    _, still = psutil.wait_procs(left, timeout=30)  # within a second on an idle machine; no deadline ends them
    assert not still
    out = run.finish()
    for kind, why in {
        "generator": "it did not answer within 2 s",
        "model": "it cannot be reached (Connection refused)",
    }.items():
        assert f"the {kind} fork server forks no rank: {why}" in " ".join(out.split())


def test_runs_share_what_titan_rl_warm_keeps(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with subprocess.Popen([sys.executable, "-m", "titan_rl.tools.warm"], stdout=subprocess.PIPE, text=True) as warm:
        assert warm.stdout is not None
        name, _, folder = warm.stdout.readline().strip().removeprefix("export ").partition("=")
        assert name == VARIABLE
        monkeypatch.setenv(name, folder)
        run = runs.start(tmp_path / "run", training__steps=500, algorithm__max_dead_steps=0)
        run.wait_for_step(1)
        for pid in run.workers().values():
            assert warm.pid in [process.pid for process in psutil.Process(pid).parents()]
        run.process.send_signal(signal.SIGINT)
        out = run.finish(60)
        assert run.code == 130, out
        assert "start cold" not in out
        kept = psutil.Process(warm.pid).children(recursive=True)
        assert len(kept) == 2, "fork servers, without ranks"
        run = runs.start(tmp_path / "killed", **ENDLESS)
        run.wait_for_step(1)
        run.process.kill()
        run.finish(60)
        ranks = [each for each in psutil.Process(warm.pid).children(recursive=True) if each not in kept]
        assert not psutil.wait_procs(ranks, timeout=30)[1]
        warm.send_signal(signal.SIGINT)
        assert warm.wait(30) == 0
    assert not any(process.is_running() for process in kept)
    assert not Path(folder).exists()


def test_ranks_start_cold_in_a_run_that_may_not_use_a_folder_of_fork_servers(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(folder))
    run = runs.start(tmp_path / "run", **ENDLESS)
    why = f"{VARIABLE}={folder}: expected a folder of this user with mode 0700"
    warnings, out = {f"the {kind} fork server forks no rank: {why}" for kind in ("model", "generator")}, ""
    assert run.process.stdout is not None
    while not all(warning in out for warning in warnings):
        line = run.process.stdout.readline()
        assert line, out
        out += line
    run.process.kill()  # other tests await ranks that start cold
    run.finish()


def test_bad_input_and_ctrl_c_leave_no_fork_server(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    run = runs.start(tmp_path / "bad", model__hf_assets_path=tmp_path / "missing")
    run.finish(60)
    assert run.code == 2
    run = runs.start(tmp_path / "run", **ENDLESS)
    until(run, lambda: len(servers(run)) == 2)
    left = list(servers(run).values())
    run.process.send_signal(signal.SIGINT)
    run.finish(60)
    assert run.code == 130
    assert not any(process.is_running() for process in left)
