"""The control socket: which processes reach it, and its answers."""

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from support.control_socket import STATUS, serving
from titan_rl.ext.control import server as control_module
from titan_rl.ext.control.client import Endpoint
from titan_rl.ext.control.server import ANNOUNCEMENT


async def say(control: Path, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(control)
    writer.write(line)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 30)
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
        (request("ad", a=1), "unknown command 'ad'; available now: status, add, never, refuse, fail"),
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
    assert {answer["error"] for answer in answers} == {f"expected one line of JSON like {control_module.EXAMPLE}"}
    assert last == {"answer": 2}


async def test_who_says_nothing_is_not_waited_for_and_holds_nobody_up(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "REQUEST_SECONDS", 0.2)

    async with serving(tmp_path, sockets):
        reader, writer = await asyncio.open_unix_connection(sockets / "control")
        assert await say(sockets / "control", request("add", a=1)) == {"answer": 2}
        assert json.loads(await asyncio.wait_for(reader.readline(), 30)) == {
            "error": "no request was received within 0.2 s"
        }
        writer.close()


async def test_who_leaves_before_the_answer_costs_nothing(tmp_path: Path, sockets: Path) -> None:
    async with serving(tmp_path, sockets):
        for line in (request("never"), request("add", a=1), b"{"):
            _, writer = await asyncio.open_unix_connection(sockets / "control")
            writer.write(line)
            writer.transport.abort()
        assert await say(sockets / "control", request("add", a=1)) == {"answer": 2}


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


async def test_what_is_asked_when_the_run_ends_is_answered(tmp_path: Path, sockets: Path) -> None:
    async with serving(tmp_path, sockets):
        asked = asyncio.create_task(say(sockets / "control", request("never")))
        await asyncio.sleep(0.1)
    assert (await asked) == {"error": "the run ended before it could never"}


async def test_the_run_is_told_of_commands_and_not_of_questions(tmp_path: Path, sockets: Path) -> None:
    announced: list[str] = []

    async with serving(tmp_path, sockets, announced.append):
        for line in (request("status"), request("add", a=1, b=2), request("nonsense"), request("add")):
            await say(sockets / "control", line)
    assert announced == ["asked to add a=1 b=2"]


def test_a_withheld_command_is_refused_by_name_and_not_announced(tmp_path: Path, sockets: Path) -> None:
    announced: list[str] = []

    async def run() -> list[dict[str, Any]]:
        async with serving(tmp_path, sockets, announced.append) as control:
            control.withhold("add", "never", why="expected checkpoint.enable = true, found false")
            return [await say(sockets / "control", request(name)) for name in ("add", "never", "refuse")]

    why = "expected checkpoint.enable = true, found false"
    assert asyncio.run(run()) == [{"error": f"add: {why}"}, {"error": f"never: {why}"}, {"error": "not now"}]
    assert announced == ["asked to refuse"]


async def test_only_its_user_reaches_it_and_nothing_stays(tmp_path: Path, sockets: Path) -> None:
    async with serving(tmp_path / "run", sockets):
        mode = (sockets / "control").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert stat.S_IMODE((tmp_path / "run" / ANNOUNCEMENT).stat().st_mode) == 0o600
        where = json.loads((tmp_path / "run" / ANNOUNCEMENT).read_text())
        assert where == {"pid": os.getpid(), "host": socket.gethostname(), "socket": str(sockets / "control")}
    assert not list((tmp_path / "run").iterdir())
    assert not list(sockets.iterdir())


async def test_an_announcement_that_is_another_runs_by_now_stays(tmp_path: Path, sockets: Path) -> None:
    async with serving(tmp_path, sockets):
        (tmp_path / ANNOUNCEMENT).write_text('{"pid": 1}')
    assert (tmp_path / ANNOUNCEMENT).exists()


def test_a_path_longer_than_the_kernel_takes(tmp_path: Path, sockets: Path) -> None:
    deep = sockets / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)

    async def run() -> Any:
        async with serving(tmp_path, deep):
            endpoint = Endpoint.find(tmp_path)
            return await asyncio.to_thread(endpoint.ask, "add", {"a": 1}, 5.0)

    assert asyncio.run(run()) == 2
