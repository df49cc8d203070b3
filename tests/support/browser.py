"""Drives a real browser without a window over its debugging protocol."""

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS = 30.0
ANSWER_SECONDS = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Page:
    """One page of the browser. `problems` has the errors that it logged, `requests` each address that it loaded."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if (answer := self._answers.pop(found.get("id", 0), None)) is not None:
                answer.set_result(found)
            self._note(found.get("method", ""), found.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, ANSWER_SECONDS)
        assert "error" not in found, found
        return found["result"]

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def open(self, address: str) -> float:
        """Load an address; return the milliseconds until its scripts had run, by the browser's own clock."""
        await self.call("Page.navigate", url=address)
        deadline = time.monotonic() + ANSWER_SECONDS
        while await self.run("document.readyState") != "complete" or (
            await self.run("location.href") == "about:blank" != address
        ):
            assert time.monotonic() < deadline, f"{address} is not loaded within {ANSWER_SECONDS:g} s"
            await asyncio.sleep(0.05)
        return await self.run("performance.timing.domComplete - performance.timing.navigationStart")

    async def press(self, key: str) -> None:
        await self.run(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def browser(width: int = 1200, height: int = 900) -> AsyncIterator[Page]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"expected a browser ({', '.join(NAMES)}), found none: install Debian's chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = await answer.json(content_type=None)
                target = next(target for target in targets if target["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for part in ("Runtime", "Log", "Network", "Page"):
                        await page.call(f"{part}.enable")
                    yield page
                    listening.cancel()
        finally:
            process.kill()
            process.wait(10)


async def _port(profile: Path) -> int:
    """Return the port that the browser wrote down."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, IndexError):
            return int((profile / "DevToolsActivePort").read_text().splitlines()[0])
        await asyncio.sleep(0.05)
    raise AssertionError(f"the browser has not started within {START_SECONDS:g} s")
