"""Steering a run from outside: the socket, who reaches it and what it answers; ctl; and a real run that is steered."""

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.running import Run, Runs
from titan_rl.control import server as control_module
from titan_rl.control.client import Endpoint, Failed
from titan_rl.control.server import ANNOUNCEMENT, Control, RequestRefused
from titan_rl.ctl import main
from titan_rl.record.history import audit

STATUS = {
    "run": {"state": "training", "phase": "rl", "step": 3, "of": 8, "saved": None, "up_seconds": 75.2, "held_out": 0.5},
    "ranks": [
        {"name": "trainer[dp=0 tp=0]", "pid": 11, "state": "serving", "since_seconds": 70.0},
        {"name": "generator0[tp=0]", "pid": 12, "state": "starting", "since_seconds": 1.5},
    ],
    "waits": [],
    "restarts": {"generators": 1},
}


async def status() -> dict[str, Any]:
    return STATUS


async def add(a: int, b: int = 1) -> int:
    return a + b


async def never() -> None:
    await asyncio.sleep(3600)


async def refuse() -> None:
    raise RequestRefused("not now")


async def fail() -> None:
    raise RuntimeError("the engine is gone")


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="titan_rl-test-") as folder:
        yield Path(folder)


@asynccontextmanager
async def serving(folder: Path, sockets: Path, told: Callable[[str], Any] = len) -> AsyncIterator[Control]:
    control = Control(folder, sockets / "control", told=told)
    control.question(status=status)
    control.offer(add=add, never=never, refuse=refuse, fail=fail)
    async with control:
        yield control


async def say(control: Path, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(control)
    writer.write(line)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.count(b"\n") == 1
    assert answer.endswith(b"\n")
    return json.loads(answer)


def request(command: str, **arguments: Any) -> bytes:
    return json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"


def replies(tmp_path: Path, sockets: Path, *lines: bytes) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        async with serving(tmp_path, sockets):
            return [await say(sockets / "control", line) for line in lines]

    return asyncio.run(run())


def test_a_command_takes_json_by_name_and_answers_in_json(tmp_path: Path, sockets: Path) -> None:
    lines = request("add", a=1, b=2), request("add", a=1), request("status")
    assert replies(tmp_path, sockets, *lines) == [{"answer": 3}, {"answer": 2}, {"answer": STATUS}]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (request("ad", a=1), "there is no command 'ad' now; there are status, add, never, refuse, fail"),
        (request("add"), "add: missing a required argument: 'a'; it takes a: int, b: int = 1"),
        (request("add", a=1, c=2), "add: got an unexpected keyword argument 'c'; it takes a: int, b: int = 1"),
        (request("never", a=1), "never: got an unexpected keyword argument 'a'; it takes no arguments"),
        (request("refuse"), "not now"),
        (request("fail"), "RuntimeError: the engine is gone"),
        (request("add", a="x"), 'TypeError: can only concatenate str (not "int") to str'),
    ],
)
def test_what_cannot_be_is_answered_with_the_reason(tmp_path: Path, sockets: Path, line: bytes, error: str) -> None:
    assert replies(tmp_path, sockets, line, request("add", a=1)) == [{"error": error}, {"answer": 2}]


GARBAGE = [
    b"",
    b"\n",
    b"\xff\xfe\n",
    b"[" * 50_000 + b"\n",
    b"x" * 200_000,
    b"7\n",
    b"[]\n",
    b'{"command": "status"}\n',
    b'{"command": 1, "arguments": {}}\n',
    b'{"command": "add", "arguments": [1]}\n',
    b'{"command": "status", "arguments": {}, "more": 1}\n',
]


def test_garbage_is_answered_with_what_is_expected(tmp_path: Path, sockets: Path) -> None:
    *answers, last = replies(tmp_path, sockets, *GARBAGE, request("add", a=1))
    assert {answer["error"] for answer in answers} == {f"expected a line of JSON like {control_module.EXAMPLE}"}
    assert last == {"answer": 2}


def test_any_line_is_answered_with_a_line(tmp_path: Path, sockets: Path) -> None:
    @given(st.lists(st.binary(max_size=80) | st.text(max_size=40).map(json.dumps).map(str.encode), max_size=20))
    def check(lines: list[bytes]) -> None:
        for reply in replies(tmp_path, sockets, *lines):
            assert set(reply) == {"error"}

    check()


def test_who_says_nothing_is_not_waited_for_and_holds_nobody_up(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "REQUEST_SECONDS", 0.2)

    async def run() -> None:
        async with serving(tmp_path, sockets):
            reader, writer = await asyncio.open_unix_connection(sockets / "control")
            assert await say(sockets / "control", request("add", a=1)) == {"answer": 2}
            assert json.loads(await asyncio.wait_for(reader.readline(), 5)) == {
                "error": "nothing was asked within 0.2 s"
            }
            writer.close()

    asyncio.run(run())


def test_who_leaves_before_the_answer_costs_nothing(tmp_path: Path, sockets: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, sockets):
            for line in (request("never"), request("add", a=1), b"{"):
                _, writer = await asyncio.open_unix_connection(sockets / "control")
                writer.write(line)
                writer.transport.abort()
            assert await say(sockets / "control", request("add", a=1)) == {"answer": 2}

    asyncio.run(run())


def test_two_who_ask_at_once_are_both_answered(tmp_path: Path, sockets: Path) -> None:
    meeting: list[int] = []

    async def meet(me: int) -> list[int]:
        meeting.append(me)
        while len(meeting) < 2:
            await asyncio.sleep(0)
        return sorted(meeting)

    async def run() -> list[dict[str, Any]]:
        async with serving(tmp_path, sockets) as control:
            control.offer(meet=meet)
            asking = (say(sockets / "control", request("meet", me=i)) for i in range(2))
            return await asyncio.gather(*asking)

    assert asyncio.run(run()) == [{"answer": [0, 1]}] * 2


def test_what_is_asked_when_the_run_ends_is_answered(tmp_path: Path, sockets: Path) -> None:
    async def run() -> dict[str, Any]:
        async with serving(tmp_path, sockets):
            asked = asyncio.create_task(say(sockets / "control", request("never")))
            await asyncio.sleep(0.1)
        return await asked

    assert asyncio.run(run()) == {"error": "the run ended before it could never"}


def test_the_run_is_told_of_commands_and_not_of_questions(tmp_path: Path, sockets: Path) -> None:
    told: list[str] = []

    async def run() -> None:
        async with serving(tmp_path, sockets, told.append):
            for line in (request("status"), request("add", a=1, b=2), request("nonsense"), request("add")):
                await say(sockets / "control", line)

    asyncio.run(run())
    assert told == ["asked to add a=1 b=2"]


def test_only_its_user_reaches_it_and_nothing_stays(tmp_path: Path, sockets: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path / "run", sockets):
            mode = (sockets / "control").stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert stat.S_IMODE((tmp_path / "run" / ANNOUNCEMENT).stat().st_mode) == 0o600
            where = json.loads((tmp_path / "run" / ANNOUNCEMENT).read_text())
            assert where == {"pid": os.getpid(), "host": socket.gethostname(), "socket": str(sockets / "control")}

    asyncio.run(run())
    assert not list((tmp_path / "run").iterdir())
    assert not list(sockets.iterdir())


def test_an_announcement_that_is_another_runs_by_now_stays(tmp_path: Path, sockets: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, sockets):
            (tmp_path / ANNOUNCEMENT).write_text('{"pid": 1}')

    asyncio.run(run())
    assert (tmp_path / ANNOUNCEMENT).exists()


def test_a_path_longer_than_the_kernel_takes(tmp_path: Path, sockets: Path) -> None:
    deep = sockets / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)

    async def run() -> Any:
        async with serving(tmp_path, deep):
            endpoint = Endpoint.find(tmp_path)
            return await asyncio.to_thread(endpoint.ask, "add", {"a": 1}, 5.0)

    assert asyncio.run(run()) == 2


# -- ctl -------------------------------------------------------------------------------------------------------


def ctl(folder: Path, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titan_rl.ctl", str(folder), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def beside_a_server(tmp_path: Path, sockets: Path, *argv: str) -> int:
    async def run() -> int:
        async with serving(tmp_path, sockets) as control:
            control.offer(checkpoint=never, pause=fail, resume=refuse)
            return await asyncio.to_thread(main, [str(tmp_path), *argv])

    return asyncio.run(run())


def test_ctl_shows_tables(tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside_a_server(tmp_path, sockets, "status") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["run"], ["state", "training"]]
    assert ["saved", "-"] in lines
    assert ["up", "1", "min", "15", "s"] in lines
    assert ["name", "pid", "state", "since"] in lines
    assert ["trainer[dp=0", "tp=0]", "11", "serving", "1", "min", "10", "s"] in lines
    assert lines[lines.index(["waits"]) + 1] == ["none"]
    assert lines[-2:] == [["restarts"], ["generators", "1"]]


def test_ctl_prints_json(tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside_a_server(tmp_path, sockets, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["resume"], "not now"),
        (["pause"], "RuntimeError: the engine is gone"),
        (["scale", "--json", "generators=3"], "there is no command 'scale' now"),
        (["checkpoint", "--timeout", "0.3"], "did not answer checkpoint within 0.3 s"),
    ],
)
def test_ctl_says_what_was_refused(
    tmp_path: Path, sockets: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    assert beside_a_server(tmp_path, sockets, *argv) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["stat"], "invalid choice: 'stat'"),
        (["scale", "generators"], "expected NAME=VALUE, found 'generators'"),
        (["status", "--wait"], "--wait belongs to stop"),
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
        (None, "no run is under way"),
        ("", "no run is under way"),
        ('{"pid": 1', "no run is under way"),
        ("[]", "no run is under way"),
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
    if announced is not None:
        (tmp_path / ANNOUNCEMENT).write_text(announced)
    assert main([str(tmp_path), "status"]) == 2
    assert error in capsys.readouterr().err


def test_a_process_that_ended_but_was_not_reaped_is_not_running(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    endpoint = Endpoint(tmp_path, process.pid, tmp_path / "control")
    time.sleep(0.3)
    assert not endpoint.runs()
    process.wait()


def test_a_run_that_does_not_end_in_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"has not ended within 0\.2 s"):
        Endpoint(tmp_path, os.getpid(), tmp_path / "control").wait(0.2)


# -- a real run ------------------------------------------------------------------------------------------------


def told(run: Run, *argv: str) -> dict[str, Any]:
    done = ctl(run.folder, *argv, "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def checkpoints(run: Run) -> set[str]:
    return {path.parent.name for path in (run.folder / "checkpoint").glob("step-*/.metadata")}


def steps(run: Run) -> list[int]:
    return [line["step"] for line in run.lines("metrics.jsonl")]


def test_a_run_is_saved_paused_resumed_and_stopped(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint__keep_latest_k": 0, "algorithm__max_dead_steps": 0}
    run = runs.start(tmp_path / "run", training__steps=1000, checkpoint__interval=1000, **keys)
    run.wait_for_step(1)
    assert told(run, "status")["run"]["state"] == "training"
    first = told(run, "checkpoint")["saved"]
    assert f"step-{first}" in checkpoints(run)

    paused = told(run, "pause")
    assert paused["state"] == "paused"
    assert steps(run)[-1] == paused["saved"] == told(run, "checkpoint")["saved"] > first
    assert f"step-{paused['saved']}" in checkpoints(run)
    time.sleep(2)
    assert steps(run)[-1] == paused["saved"]
    assert paused.items() <= told(run, "status")["run"].items()
    assert "paused" in ctl(run.folder, "status").stdout

    assert told(run, "resume")["state"] == "training"
    run.wait_for_step(paused["saved"] + 1)
    refused = ctl(run.folder, "scale", "trainers=3")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1

    stopped = ctl(run.folder, "stop", "--wait")
    assert stopped.returncode == 0, stopped.stderr
    assert run.process.poll() is not None
    out = run.finish()
    assert run.code == 130, out
    assert f"paused after step {paused['saved']}, which is saved" in out
    for command in ("checkpoint", "pause", "resume", "stop"):
        assert f"asked to {command}" in out
    last = steps(run)[-1]
    assert f"RL step {last}" in out
    assert checkpoints(run) == {f"step-{step}" for step in (first, paused["saved"], last)}
    assert steps(run) == list(range(1, last + 1))
    assert audit(run.folder)[0] == []
    assert not run.processes()
    assert ctl(run.folder, "status").returncode == 2
    assert not (run.folder / ANNOUNCEMENT).exists()


def test_a_run_that_is_starting_answers_and_can_be_stopped(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    deadline = time.monotonic() + 60
    while not (run.folder / ANNOUNCEMENT).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told(run, "status")["run"]["state"] == "starting"
    assert told(run, "stop", "--wait")["state"] == "stopping"
    out = run.finish(timeout=30)
    assert run.code == 130, out
    assert not run.processes()
