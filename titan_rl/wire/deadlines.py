"""Deadlines that only count while this process runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LATE_SECONDS = 1.0  # a timer that is later than this: the process was stopped (Ctrl-Z), or starved


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """Like asyncio.timeout, but start again if this process was stopped when the time ended. Then the answer may have
    arrived and not been read yet, so being late is no evidence against the process that was asked."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def ring(due: float) -> None:
            nonlocal timer
            if loop.time() - due > LATE_SECONDS:
                timer = set_timer()
            else:
                limit.reschedule(loop.time())

        def set_timer() -> asyncio.TimerHandle | None:
            due = loop.time() + (seconds or 0)
            return None if seconds is None else loop.call_at(due, ring, due)

        timer = set_timer()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
