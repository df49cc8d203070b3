"""A deadline that counts only while this process runs."""

import asyncio
import threading
import time

import pytest

from titan_rl.wire.deadlines import deadline


async def test_it_ends_what_is_too_slow() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with deadline(0.1):
            await asyncio.sleep(60)
    assert 0.1 <= (time.monotonic() - began) < 30


async def test_it_leaves_alone_what_is_in_time_and_what_is_cancelled() -> None:
    async with deadline(None):
        await asyncio.sleep(0)
    async with deadline(60):
        await asyncio.sleep(0)

    async def waits() -> None:
        async with deadline(60):
            await asyncio.sleep(60)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_that_came_while_this_loop_was_held_up_is_read() -> None:
    """It came in time, but was not read."""
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    threading.Timer(0.1, lambda: loop.call_soon_threadsafe(answer.set_result, "here")).start()

    async def hold_up() -> None:
        time.sleep(1.6)

    async with deadline(0.5):
        held = asyncio.create_task(hold_up())
        found = await answer
    await held
    assert found == "here"
