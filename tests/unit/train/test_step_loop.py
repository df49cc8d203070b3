"""What is saved when a step is finished, given up, or ruined: the real loop and stop, without meshes."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config.auto import on_device
from titan_rl.config.sections import CheckpointSection, Config
from titan_rl.record.run_folder import Resume
from titan_rl.record.terminal import Terminal
from titan_rl.train.health import Ruined
from titan_rl.train.regrowth import Regrow
from titan_rl.train.step_loop import StepDone, StepLoop
from titan_rl.train.stop import Stop
from titan_rl.wire.errors import RunError
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.spans import Clock

STATS = StepStats(loss=0.0, grad_norm=1.0, lr=1e-3, tokens=8, seconds=1.0)
IN_MEMORY = Resume(3, None, Snapshot("rl", 3, "{}", 1, {}))


class Learner:
    """Records the calls that keep a step."""

    failed_saves = 0
    saves = True
    on_disk = False  # the last save was waited for

    def __init__(self) -> None:
        self.events: list[str] = []

    async def snapshot(self, step: int, state: Callable[[], str]) -> None:
        self.events.append(f"snapshot {step}")

    async def save(self, step: int, state: str, *, last: bool, on_disk: bool) -> bool:
        self.events.append(f"save {step} {state}")
        self.on_disk = on_disk
        return self.saves


class Growth:
    """Has room for more trainers from the start, or never."""

    def __init__(self, due: bool) -> None:
        self.due = due

    def after(self, step: int) -> Regrow:
        return Regrow(f"after {step}")


def steps(
    step: Callable[[int, Stop, StepLoop, Learner], Awaitable[StepDone | None]],
    *,
    interval: int = 100,
    resume: Resume | None = None,
    grace: float = 1.0,
    growth: bool = False,
    learner: Learner | None = None,
) -> list[str]:
    """Make ten steps, and return the saves in their order."""
    learner = learner or Learner()

    async def body() -> None:
        task = asyncio.current_task()
        assert task is not None
        stop = Stop(task, Clock(), Terminal(), grace)
        config = on_device(Config(checkpoint=CheckpointSection(interval=interval)), "cpu")
        report = SimpleNamespace(to_disk=lambda: learner.events.append("to disk"))
        run: Any = SimpleNamespace(config=config, stop=stop, report=report, regrowth=Growth(growth))
        found = resume or Resume(None, None)
        kept: Any = learner
        loop = StepLoop(run, kept, found)
        start = found.rl or 0
        before = StepDone({"at": start}, lambda step: learner.events.append(f"ledger {step}"))
        await loop.make_steps("rl", start, 10, lambda n: step(n, stop, loop, learner), before)

    asyncio.run(body())
    return [event for event in learner.events if not event.startswith(("snapshot", "to disk"))]


def done(n: int, learner: Learner, **rest: Any) -> StepDone:
    return StepDone({"at": n}, lambda step: learner.events.append(f"ledger {step}"), **rest)


def request_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def slow(seconds: float = 60) -> StepStats:
    await asyncio.sleep(seconds)
    return STATS


async def third_is_given_up(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
    if n % 3 == 0 or n == 4:
        request_stop()
        assert await stop.in_time(slow()) is None
        return None
    return done(n, learner)


def test_a_step_that_is_given_up_leaves_the_one_before_it_on_disk() -> None:
    assert steps(third_is_given_up) == ["ledger 2", 'save 2 {"at": 2}']


def test_a_step_that_is_on_disk_already_is_not_saved_again() -> None:
    assert steps(third_is_given_up, interval=2) == ["ledger 2", 'save 2 {"at": 2}']


@pytest.mark.parametrize(("resume", "kept"), [(IN_MEMORY, ["ledger 3", 'save 3 {"at": 3}']), (Resume(3, None), [])])
def test_a_step_that_was_resumed_from_memory_is_not_on_disk(resume: Resume, kept: list[str]) -> None:
    assert steps(third_is_given_up, resume=resume) == kept


def test_an_update_that_would_not_end_in_time_is_not_begun() -> None:
    begun: list[int] = []

    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        async def update() -> StepStats:
            begun.append(n)
            return await slow(0.6)

        if n == 2:
            request_stop()
            await asyncio.sleep(0.3)
        return done(n, learner) if await loop.train(update()) else None

    assert steps(step) == ["ledger 1", 'save 1 {"at": 1}']
    assert begun == [1]


def test_an_update_uses_the_time_of_the_save_because_there_is_nothing_else_to_save() -> None:
    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        async def update() -> StepStats:
            await asyncio.sleep(0)
            stop._give_up()  # as when only the time for a save is left
            return STATS

        request_stop()
        assert await loop.train(update())
        assert await stop.in_time(slow()) is None
        return done(n, learner)

    assert steps(step, grace=1000) == ["ledger 1", 'save 1 {"at": 1}']


def test_an_update_that_outlasts_the_grace_ends_the_run_by_name() -> None:
    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        request_stop()
        assert await loop.train(slow()) is None
        return None

    with pytest.raises(RunError, match=r"step 1 was still being trained when fault\.stop_grace_seconds was over"):
        steps(step)


def test_ruined_weights_are_never_saved() -> None:
    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        assert not learner.events
        return done(n, learner, hopeless=Ruined("ruined"))

    with pytest.raises(Ruined):
        steps(step, interval=1)


def test_trainers_grow_after_the_next_checkpoint_which_is_waited_for() -> None:
    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        return done(n, learner)

    learner = Learner()
    with pytest.raises(Regrow, match="after 3"):
        steps(step, interval=3, growth=True, learner=learner)
    kept = [event for event in learner.events if not event.startswith(("snapshot", "to disk"))]
    assert kept == ["ledger 3", 'save 3 {"at": 3}']
    assert learner.on_disk


def test_trainers_do_not_grow_after_the_last_step_a_failed_save_or_a_request_to_stop() -> None:
    async def step(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        return done(n, learner)

    async def last(n: int, stop: Stop, loop: StepLoop, learner: Learner) -> StepDone | None:
        if n == 2:
            request_stop()
            await asyncio.sleep(0.01)
        return done(n, learner)

    assert steps(step, growth=True) == ["ledger 10", 'save 10 {"at": 10}']
    failing = Learner()
    failing.saves = False
    assert len(steps(step, interval=4, growth=True, learner=failing)) == 2 * 3
    assert steps(last, growth=True, grace=100) == ["ledger 2", 'save 2 {"at": 2}']
