"""Calls of the user's functions: async or plain, with the keywords that they take, and where they are."""

import asyncio
import inspect
import linecache
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

HERE = Path(__file__).parent
BUILT_IN = ("calc.py", "calc_agent.py", "hunt.py")
"""Files of this folder that take the place of the user's code."""
LIBRARY = sysconfig.get_paths()["stdlib"]

Site = tuple[CodeType, int]
"""A function's code and a line number."""


class Threads:
    """Threads for plain functions, with a count of the threads that did not return in time."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, "user code")
        self._stuck: dict[int, float] = {}  # thread: when its caller gave up

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return what the function returns. If this is cancelled, the function cannot be: its thread is stuck until it
        returns."""
        at, over = list[int](), list[bool]()

        def counted() -> Any:
            at.append(threading.get_ident())
            try:
                return function()
            finally:
                over.append(True)
                self._stuck.pop(at[0], None)

        work = asyncio.get_running_loop().run_in_executor(self._pool, counted)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError as error:
            if not at:
                work.cancel()
                raise
            work.add_done_callback(lambda work: work.exception())  # nothing waits for it any more
            self._stuck[at[0]] = time.monotonic()
            if over:
                self._stuck.pop(at[0], None)
            error.add_note(thread_place(at[0]))
            raise

    def stuck(self, seconds: float) -> int:
        """Return how many threads have been stuck for this long."""
        now = time.monotonic()
        return sum(now - since >= seconds for since in list(self._stuck.values()))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


threads: ContextVar[Threads | None] = ContextVar("threads", default=None)
"""The threads of the loop that runs a rollout. None: plain functions run in place."""


async def call_user(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call the user's function, and await its result if that can be awaited. A plain function runs on a thread."""
    pool = threads.get()
    if pool is None or asynchronous(function) or _trivial(function):
        result = function(*arguments, **keywords)
    else:
        result = await pool.run(lambda: function(*arguments, **keywords))
    return await result if inspect.isawaitable(result) else result


def _trivial(function: Callable[..., Any]) -> bool:
    """Return True for a class that defines no constructor, which cannot block."""
    return isinstance(function, type) and function.__init__ is object.__init__ and function.__new__ is object.__new__


def asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def shortened(value: object) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def place(sites: list[Site]) -> str:
    """Return "file:line in function" of the innermost site in the user's code, with its source line."""
    theirs = [site for site in sites if not _machinery(site[0].co_filename)] or sites
    if not theirs:
        return ""
    code, line = theirs[-1]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}{f': {source}' if source else ''}"


def error_place(error: BaseException) -> str:
    """Return where an error was raised. An error of another process carries its own place."""
    return getattr(error, "place", "") or place(list(_of_traceback(error.__traceback__)))


def thread_place(ident: int) -> str:
    """Return where a thread is now."""
    frame: FrameType | None = sys._current_frames().get(ident)
    sites: list[Site] = []
    while frame is not None:
        sites.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return place(sites[::-1])


def task_place(task: "asyncio.Task[Any]") -> str:
    """Return where a suspended task waits."""
    sites: list[Site] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            sites.append((frame.f_code, frame.f_lineno))
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return place(sites)


def _machinery(file: str) -> bool:
    if Path(file).parent == HERE:
        return Path(file).name not in BUILT_IN
    return file.startswith("<") or (file.startswith(LIBRARY) and "site-packages" not in file)


def _of_traceback(traceback: TracebackType | None) -> "list[Site]":
    sites = []
    while traceback is not None:
        sites.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return sites
