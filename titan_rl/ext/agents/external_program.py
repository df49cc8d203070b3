"""Runs the user's environments in the Python of environment.python, without this project's packages.

    one JSON object per line:  {"id", "do": make | reset | step | tool | get_reward | close | run | cancel, ...}  stdin
                               {"id", "value" | "error" | "cancelled", "place"}, {"report"} each second           stdout

external_python.py is the other end. Prints of the user's code go to stderr. The process ends with its stdin.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from titan_rl.ext.agents.adapters import Conversation, plain
from titan_rl.ext.agents.environment_calls import (
    load_agent,
    load_user_environment,
    make_environment,
    reset_environment,
    tools_of,
)
from titan_rl.ext.agents.tools import schema
from titan_rl.tasks.user_code import (
    Threads,
    asynchronous,
    call_user,
    error_place,
    thread_place,
    threads,
)
from titan_rl.wire.user_functions import keywords_of

REPORT_SECONDS = 1.0


class Program:
    def __init__(self, hello: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        self._name, self._args, self._send = hello["name"], hello["args"], send
        self._threads = Threads(hello["concurrency"])
        key = hello["key"]
        if hello["agent"]:
            self._maker = load_agent(self._name, self._args, key, hello["seats"])
        else:
            self._maker = load_user_environment(self._name, self._args, key, hello["seats"])
            if not isinstance(self._maker, type) and asynchronous(self._maker):
                what = "a function that is given the policy runs in this project's Python only"
                raise ValueError(f"{key}: expected a class, because {what}, found {self._name!r}")
        self._environments: dict[int, Any] = {}
        self._tools: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        self._ident = threading.get_ident()
        threading.Thread(target=self._report, daemon=True).start()

    def begin_call(self, request: dict[str, Any]) -> None:
        """Begin a call, or cancel one."""
        if request["do"] == "cancel":
            if (call := self._calls.get(request["id"])) is not None:
                call.cancel()
            return
        call = self._loop.create_task(self._answer(request), name=str(request.get("of", "")))
        self._calls[request["id"]] = call
        call.add_done_callback(lambda _: self._calls.pop(request["id"], None))

    async def _answer(self, request: dict[str, Any]) -> None:
        threads.set(self._threads)
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["value"] = await getattr(self, f"_{request['do']}")(request)
        except asyncio.CancelledError as error:
            answer["cancelled"] = next(iter(getattr(error, "__notes__", ())), "") or error_place(error)
        except BaseException as error:  # also a sys.exit: it ends this rollout, not the process
            answer |= {"error": str(error), "kind": type(error).__name__, "place": error_place(error)}
        self._send(answer)

    async def _make(self, request: dict[str, Any]) -> list[str]:
        """Make an environment; return which methods it has."""
        environment = await make_environment(self._maker, self._name, request["offered"], self._args)
        self._environments[request["of"]] = environment
        return [name for name in ("step", "get_reward", "to_move") if hasattr(environment, name)]

    async def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._environments[request["of"]]
        observation = await reset_environment(environment, self._name, request["offered"])
        tools = {tool.__name__: tool for tool in tools_of(environment)}
        self._tools[request["of"]] = tools
        schemas = [schema(tool) for tool in tools.values()]
        return {"observation": observation, "whole": isinstance(observation, Conversation), "tools": schemas}

    async def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = SimpleNamespace(**request["reply"])
        result = await call_user(self._environments[request["of"]].step, reply)
        whole = isinstance(result, tuple) and bool(result) and isinstance(result[0], Conversation)
        return {"found": result, "whole": whole}

    async def _tool(self, request: dict[str, Any]) -> Any:
        return await call_user(self._tools[request["of"]][request["name"]], **request["arguments"])

    async def _get_reward(self, request: dict[str, Any]) -> Any:
        return await call_user(self._environments[request["of"]].get_reward)

    async def _to_move(self, request: dict[str, Any]) -> Any:
        return await call_user(self._environments[request["of"]].to_move)

    async def _close(self, request: dict[str, Any]) -> None:
        self._tools.pop(request["of"], None)
        environment = self._environments.pop(request["of"], None)
        if hasattr(environment, "close"):
            await call_user(environment.close)

    async def _run(self, request: dict[str, Any]) -> Any:
        """Run an agent."""
        return await call_user(self._maker, **keywords_of(self._maker, request["offered"], self._name))

    def _report(self) -> None:
        """Send each second which rollout blocks the loop, and how many threads are stuck."""
        while True:
            self._loop.call_soon_threadsafe(self._beat)
            time.sleep(REPORT_SECONDS)
            blocked, task = time.monotonic() - self._beat_at - REPORT_SECONDS, asyncio.current_task(self._loop)
            report: dict[str, Any] = {"blocked": max(0.0, blocked), "stuck": self._threads.stuck(REPORT_SECONDS)}
            if blocked > REPORT_SECONDS:
                name = task.get_name() if task is not None else ""
                report |= {"of": int(name) if name.isdecimal() else None, "place": thread_place(self._ident)}
            self._send({"report": report})

    def _beat(self) -> None:
        self._beat_at = time.monotonic()


async def serve() -> None:
    out, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)  # prints of the user's code are no answers

    def send(message: dict[str, Any]) -> None:
        line = json.dumps(message, default=plain, skipkeys=True)
        with lock:
            out.write(line + "\n")
            out.flush()

    hello = json.loads(sys.stdin.buffer.readline())
    sys.path += [path for path in hello["path"] if path not in sys.path]
    try:
        program = Program(hello, send)
    except BaseException as error:  # importing the user's module runs it
        send({"failed": str(error), "kind": type(error).__name__})
        return
    send({"ready": sys.version.split()[0]})
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(loop, program), daemon=True).start()
    await loop.create_future()


def _listen(loop: asyncio.AbstractEventLoop, program: Program) -> None:
    """Read requests, on a separate thread: the process ends with its stdin even while the loop is blocked."""
    with suppress(ValueError):
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(program.begin_call, json.loads(line))
    os._exit(0)
