"""ctl: its output, its refusals, and which runs it finds."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from support.control_socket import STATUS, fail, never, refuse, serving
from support.forked_ranks import until
from titan_rl.ext.control.client import Endpoint, RequestFailed
from titan_rl.ext.control.server import ANNOUNCEMENT
from titan_rl.tools.ctl import MAX_ROWS, cell, main, view


def ctl_with_server(tmp_path: Path, sockets: Path, *argv: str) -> int:
    async def run() -> int:
        async with serving(tmp_path, sockets) as control:
            control.offer(checkpoint=never, pause=fail, resume=refuse)
            return await asyncio.to_thread(main, [str(tmp_path), *argv])

    return asyncio.run(run())


def test_ctl_shows_tables(tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl_with_server(tmp_path, sockets, "status") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["run"], ["state", "training"]]
    assert ["saved", "-"] in lines
    assert ["up", "1", "min", "15", "s"] in lines
    assert ["name", "pid", "state", "since"] in lines
    assert ["trainer[dp=0", "tp=0]", "11", "serving", "1", "min", "10", "s"] in lines
    assert lines[lines.index(["waits"]) + 1] == ["none"]
    assert lines[-2:] == [["restarts"], ["generators", "1"]]


def test_times_are_clocks_and_waits_are_durations() -> None:
    at = time.mktime((2026, 11, 27, 11, 45, 3, 0, 0, -1))
    assert cell("time", at) == "2026-11-27 11:45:03"
    assert cell("seconds", 75.0) == "1 min 15 s"


def test_a_long_table_shows_what_differs_and_counts_the_rest() -> None:
    ranks = [{"rank": f"generator{i}[tp=0]", "pid": i, "state": "serving", "seconds": float(i)} for i in range(512)]
    ranks[300]["state"] = "lost"
    console = Console(width=100)
    with console.capture() as shown:
        console.print(view({"ranks": ranks, "waits": ranks[:3]}))
    lines = shown.get().splitlines()
    assert len(lines) < 2 * MAX_ROWS
    assert lines[2].split()[:3] == ["generator300[tp=0]", "300", "lost"]
    assert lines[3].split()[0] == "generator511[tp=0]"
    assert any(line.strip() == "and 480 more: 480 serving; --json shows all" for line in lines)
    assert [line.split()[0] for line in lines[-3:]] == [f"generator{i}[tp=0]" for i in range(3)]


def test_a_pipe_in_the_place_of_the_announcement_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ANNOUNCEMENT)
    with pytest.raises(RequestFailed, match="no run is active in"):
        Endpoint.find(tmp_path)


def test_ctl_prints_json(tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl_with_server(tmp_path, sockets, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["resume"], "not now"),
        (["pause"], "RuntimeError: the engine is gone"),
        (["scale", "--json", "generators=3"], "unknown command 'scale'; available now: "),
        (["checkpoint", "--timeout", "0.3"], "did not answer checkpoint within 0.3 s"),
    ],
)
def test_ctl_says_what_was_refused(
    tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    assert ctl_with_server(tmp_path, sockets, *argv) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["stat"], "invalid choice: 'stat'"),
        (["scale", "generators"], "expected NAME=VALUE, found 'generators'"),
        (["status", "--wait"], "--wait is only for the command stop"),
        (["stop", "--timeout", "0"], "expected seconds above 0, found 0"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_usage_is_told_before_anybody_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path), *argv])
    assert left.value.code == 2
    assert error in capsys.readouterr().err


def ended() -> int:
    """A process id that was just free."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("announced", "error"),
    [
        (None, "no run is active"),
        ("", "no run is active"),
        ('{"pid": 1', "no run is active"),
        ("[]", "no run is active"),
        ("[" * 100_000, "no run is active"),
        ("FIFO", "no run is active"),
        ({"pid": 0}, "is not running: its process"),
        ({"pid": os.getpid()}, "is not running: its process"),  # another process has its id by now
        ({"host": "elsewhere"}, "is on elsewhere, process"),
    ],
)
def test_a_run_that_is_over_or_elsewhere_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], announced: Any, error: str
) -> None:
    if isinstance(announced, dict):
        where = {"pid": ended(), "host": socket.gethostname(), "socket": str(tmp_path / "gone" / "control")}
        announced = json.dumps(where | {k: v for k, v in announced.items() if v})
    if announced == "FIFO":
        os.mkfifo(tmp_path / ANNOUNCEMENT)
    elif announced is not None:
        (tmp_path / ANNOUNCEMENT).write_text(announced)
    assert main([str(tmp_path), "status"]) == 2
    assert error in capsys.readouterr().err


def test_a_process_that_ended_but_was_not_reaped_is_not_running(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    endpoint = Endpoint(tmp_path, process.pid, tmp_path / "control")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not endpoint.runs()
    process.wait()


def test_a_process_whose_first_thread_has_ended_runs_until_its_others_have(tmp_path: Path) -> None:
    program = "import ctypes, os, threading; threading.Thread(target=os.read, args=(0, 1)).start(); "
    program += "ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        endpoint = Endpoint(tmp_path, process.pid, tmp_path / "control")
        assert endpoint.runs()
        process.communicate(b"x", timeout=60)
        assert not endpoint.runs()


def test_a_run_that_does_not_end_in_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match=r"has not ended within 0\.2 s"):
        Endpoint(tmp_path, os.getpid(), tmp_path / "control").wait(0.2)


def test_ctl_loads_no_heavy_library() -> None:
    heavy = {"tensorboard", "google.protobuf", "numpy", "torch"}
    code = f"import sys, titan_rl.tools.ctl; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
