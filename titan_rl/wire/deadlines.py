"""Deadlines that only count while this process runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_SECONDS = 1.0  # a timer that is later than this: the process was stopped (Ctrl-Z), or starved


class _Bell:
    """Ends `limit` after some seconds of this process's own time. Not two closures that know each other: such a cycle
    would keep the task, and all that it returned, until the oldest objects are collected."""

    __slots__ = ("_limit", "_loop", "_seconds", "_timer")

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit, self._seconds, self._loop = limit, seconds, asyncio.get_running_loop()
        self.wind()

    def wind(self) -> None:
        due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(due, self._ring, due)

    def cancel(self) -> None:
        self._timer.cancel()

    def _ring(self, due: float) -> None:
        if self._loop.time() - due > LATE_SECONDS:
            self.wind()
        else:
            self._limit.reschedule(self._loop.time())


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """Like asyncio.timeout, but start again if this process was stopped when the time ended. Then the answer may have
    arrived and not been read yet, so being late is no evidence against the process that was asked."""
    async with asyncio.timeout(None) as limit:
        bell = None if seconds is None else _Bell(limit, seconds)
        try:
            yield
        finally:
            if bell is not None:
                bell.cancel()
