"""How a loop ends, pauses and saves on request: signals in a real process, calls next to a real loop."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from titan_rl.record.terminal import Terminal
from titan_rl.train.stop import Stop
from titan_rl.wire.errors import CommandRefused
from titan_rl.wire.spans import Clock

PROGRAM = """
import asyncio, sys
from titan_rl.wire.spans import Clock
from titan_rl.train.stop import Stop
from titan_rl.record.terminal import Terminal

async def main():
    stop = Stop(asyncio.current_task(), Clock(), Terminal(), grace=float(sys.argv[3]))
    print("up", flush=True)
    if sys.argv[1] == "starting":
        await asyncio.sleep(60)
    if sys.argv[1] == "pausing":
        pausing = asyncio.create_task(stop.pause())
    for step in stop.steps(1, 1000):
        if await stop.in_time(asyncio.sleep(float(sys.argv[2]), "done")) is None:
            print("step", step, "given up", flush=True)
            break
        saving = stop.saves()
        print("step", step, "saved" if saving else "", flush=True)
        if saving:
            await stop.saved(step)
    print("left", flush=True)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled", flush=True)
"""


def start(does: str, seconds: float, *, grace: float = 25, hup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
    """Start a loop whose steps take `seconds`, with this disposition of SIGHUP."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, does, str(seconds), str(grace)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hup),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def wait_for_line(process: subprocess.Popen[str], begin: str) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.strip().startswith(begin):
            return
    raise AssertionError(f"no line that begins with {begin!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_step_in_hand_is_saved(number: int) -> None:
    process = start("stepping", 0.2)
    time.sleep(0.5)
    os.kill(process.pid, number)
    out, _ = process.communicate(timeout=30)
    lines = out.splitlines()
    assert lines[-1] == "left"
    assert lines[-2].endswith("saved")
    assert sum(line.endswith("saved") for line in lines) == 1


def test_a_step_that_does_not_end_is_given_up_and_nothing_else() -> None:
    process = start("stepping", 60, grace=5)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=50)
    assert out.splitlines()[1:] == ["step 1 given up", "left"]
    assert 3.5 < time.monotonic() - began < 40, "the grace without what a first save needs, and not the step of 60 s"


def test_nohup_is_respected_and_signals_that_come_together_are_one() -> None:
    process = start("stepping", 1, hup=signal.SIG_IGN)
    os.kill(process.pid, signal.SIGHUP)
    wait_for_line(process, "step 1")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a terminal, and a wrapper that forwards its signals
        os.kill(process.pid, number)
    wait_for_line(process, "SIG")
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.4)
    os.kill(process.pid, signal.SIGTERM)  # Slurm's second
    assert process.communicate(timeout=30)[0].splitlines() == ["step 2 saved", "left"]
    assert process.returncode == 0


def test_before_the_first_step_nothing_is_waited_for() -> None:
    process = start("starting", 0)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "cancelled\n", "it would sleep for 60 s"


def test_twice_is_at_once() -> None:
    process = start("stepping", 60)
    os.kill(process.pid, signal.SIGINT)
    wait_for_line(process, "SIGINT: step 1 is finished and saved if that takes less than 25 s")
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT, "after the grace, the code would be 0"


def test_ctrl_c_ends_a_pause_at_once_at_the_step_that_was_saved() -> None:
    process = start("pausing", 0.1)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)  # a pause does not end by itself; after the grace, it would be cancelled
    assert [line for line in out.splitlines() if "paused" not in line] == ["step 1 saved", "left"]


class Loop:
    """Makes ten steps next to the test's calls; the first `failing` saves fail."""

    def __init__(self, steps: int = 10, seconds: float = 0.02, failing: int = 0, grace: float = 25.0) -> None:
        self.steps, self.seconds, self.failing, self.grace = steps, seconds, failing, grace
        self.trained: list[int] = []
        self.saved: list[int] = []
        self.clock = Clock()

    def alongside(self, asks: Callable[[Stop], Awaitable[Any]]) -> Any:
        return asyncio.run(self._both(asks))

    async def _both(self, asks: Callable[[Stop], Awaitable[Any]]) -> Any:
        stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        loop = asyncio.create_task(self._run(stop))
        answer = await asyncio.wait_for(asks(await stop), 60)
        await asyncio.wait_for(loop, 60)
        return answer

    async def _run(self, ready: asyncio.Future[Stop]) -> None:
        task = asyncio.current_task()
        assert task is not None
        stop = Stop(task, self.clock, Terminal(), self.grace)
        ready.set_result(stop)
        for step in stop.steps(1, self.steps):
            await asyncio.sleep(self.seconds)
            self.trained.append(step)
            if stop.saves() or step == self.steps:
                if self.failing:
                    self.failing -= 1
                    continue
                self.saved.append(step)
                await stop.saved(step)


def test_a_checkpoint_is_answered_when_it_is_on_disk_and_the_loop_goes_on() -> None:
    loop = Loop()

    async def asks(stop: Stop) -> Any:
        await asyncio.sleep(0.05)
        return await stop.checkpoint(), list(loop.saved)

    answer, saved = loop.alongside(asks)
    assert saved == [answer["saved"]]
    assert loop.trained == list(range(1, 11))
    assert loop.saved == [answer["saved"], 10]


def test_two_who_ask_for_a_checkpoint_get_the_same_one() -> None:
    loop = Loop()
    first, second = loop.alongside(lambda stop: asyncio.gather(stop.checkpoint(), stop.checkpoint()))
    assert first["saved"] == second["saved"]
    assert len(loop.saved) == 2


def test_a_save_that_fails_is_tried_again_after_the_next_step() -> None:
    loop = Loop(failing=2)
    assert loop.alongside(lambda stop: stop.checkpoint())["saved"] == 3
    assert loop.saved == [3, 10]


def test_the_loop_never_ends_at_a_step_that_was_not_saved() -> None:
    loop = Loop(failing=2)
    answer = loop.alongside(lambda stop: stop.leave())
    assert answer["state"] == "stopping"
    assert loop.trained == [1, 2, 3]
    assert loop.saved == [3]


def test_nothing_is_trained_in_a_pause_and_everything_after_it() -> None:
    loop = Loop()

    async def asks(stop: Stop) -> Any:
        paused = await stop.pause()
        trained = list(loop.trained)
        await asyncio.sleep(0.3)
        assert loop.trained == trained
        assert await stop.checkpoint() == paused  # it is on disk already
        assert (await stop.resume())["state"] != "paused"
        return paused, trained

    paused, trained = loop.alongside(asks)
    assert paused["state"] == "paused"
    assert paused["saved"] == paused["step"] == trained[-1]
    assert loop.trained == list(range(1, 11))
    assert loop.clock.lap()["pause"] >= 0.3


def test_a_pause_that_is_yet_to_come_can_be_taken_back() -> None:
    loop = Loop()

    async def asks(stop: Stop) -> Any:
        await asyncio.sleep(0)
        pausing = asyncio.create_task(stop.pause())
        await asyncio.sleep(0)
        assert stop.status()["state"] == "pausing"
        await stop.resume()
        return await pausing

    assert loop.alongside(asks)["state"] != "paused"
    assert loop.trained == list(range(1, 11))


def test_a_paused_loop_that_is_stopped_saves_nothing_more() -> None:
    loop = Loop()

    async def asks(stop: Stop) -> Any:
        await stop.pause()
        await stop.leave()
        with pytest.raises(CommandRefused, match="stopping"):
            await stop.pause()

    loop.alongside(asks)
    assert loop.trained == loop.saved == [1]


def test_a_stop_that_is_asked_for_has_more_patience_than_ctrl_c() -> None:
    loop = Loop(seconds=0.3, grace=0)
    loop.alongside(lambda stop: stop.leave())
    assert loop.saved == [1]


@pytest.mark.parametrize(("last_save", "left"), [(None, 200.0), (1.0, 248.0), (100.0, 125.0)])
def test_the_time_for_a_save_is_kept_free(last_save: float | None, left: float) -> None:
    """Before any save a fifth of the grace, then half as much again as the last one took, but never more than half."""

    async def asks(stop: Stop) -> None:
        stop.save_seconds = last_save
        assert stop.leaves_time(1e9)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert stop.leaves_time(left - 30)
        assert not stop.leaves_time(left + 0.01)

    Loop(steps=2, seconds=0.3, grace=250).alongside(asks)


def test_what_begins_after_the_grace_is_given_up_at_once_and_a_death_is_no_stop() -> None:
    async def asks(stop: Stop) -> None:
        task = asyncio.create_task(stop.in_time(asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()  # as the watch does when a rank dies
        with pytest.raises(asyncio.CancelledError):
            await task
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert stop.given_up
        assert await stop.in_time(asyncio.sleep(60, "never")) is None

    Loop(steps=2, seconds=0.3, grace=0).alongside(asks)


async def test_a_loop_that_fails_can_be_begun_again() -> None:
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task, Clock(), Terminal())

    def fails() -> None:
        for step in stop.steps(1, 10):
            assert step < 3, "a rank died"

    with pytest.raises(AssertionError, match="a rank died"):
        fails()
    assert stop.status()["state"] == "finishing"
    assert list(stop.steps(2, 4)) == [2, 3, 4]
