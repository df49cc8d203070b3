"""Ctrl-C in a real process: the step in hand ends saved; a second Ctrl-C does not wait for it."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, sys
from titan_rl.stop import Stop

async def main():
    stop = Stop(asyncio.current_task())
    print("up", flush=True)
    if sys.argv[1] == "starting":
        await asyncio.sleep(60)
    for step in stop.steps(1, 1000):
        await asyncio.sleep(float(sys.argv[2]))
        leaving = stop.here()
        print("step", step, "saved" if leaving else "", flush=True)
    print("left", flush=True)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_step_in_hand_is_saved(number: int) -> None:
    process = start("stepping", "0.2")
    time.sleep(0.5)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=10)
    lines = out.splitlines()
    assert lines[-1] == "left"
    assert lines[-2].endswith("saved")
    assert sum(line.endswith("saved") for line in lines) == 1


def test_a_step_that_does_not_end_is_given_up() -> None:
    process = start("stepping", "60")
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert out == "cancelled\n"
    assert 4 < time.monotonic() - began < 8


def test_before_the_first_step_nothing_is_waited_for() -> None:
    process = start("starting", "0")
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=3)[0] == "cancelled\n"


def test_twice_is_at_once() -> None:
    process = start("stepping", "60")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=2) == 128 + signal.SIGINT
