"""A deadline that counts only while this process runs."""

import asyncio
import os
import signal
import subprocess
import sys
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
    """It came in time: nobody read it."""

    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    threading.Timer(0.1, lambda: loop.call_soon_threadsafe(answer.set_result, "here")).start()

    async def hold_up() -> None:
        time.sleep(1.6)

    async with deadline(0.5):
        held = asyncio.create_task(hold_up())
        found = await answer
    await held
    assert found == "here"


PROGRAM = """
import asyncio, sys
from titan_rl.wire.deadlines import deadline

async def main():
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("up", flush=True)
    async with deadline(3):
        print((await reader.readline()).decode(), flush=True)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_waits_again() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)  # a deadline of wall time has ended what it guards by now
    process.stdin.write("late, but well\n")
    process.stdin.close()
    assert process.stdout.read() == "late, but well\n\n"
    assert process.wait(30) == 0
