"""The loop that all phases share: makes their steps, and keeps their state in memory and on disk.

    step n ── parts that a stop may give up ── update ── parts that a stop may cut short ── snapshot, checkpoint

After a signal there is always a step to save: n once its update is made, n - 1 until then. So an update that would not
end in time is not begun.
"""

import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from titan_rl.record.run_folder import Resume
from titan_rl.train.health import Rewind, Ruined
from titan_rl.train.learner import Learner
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.errors import RunError
from titan_rl.wire.reports import StepStats
from titan_rl.wire.types import PhaseName

COLD_START_SAVE_STEPS = 500  # between checkpoints of a cold start
UNMEASURED = "unmeasured"  # in a saved state: a stop cut the evaluation short, and the resumed run repeats it


@dataclass(frozen=True, slots=True)
class StepDone:
    """The state after a finished step, and whether the run continues after it."""

    state: dict[str, Any]  # the controller's part of a snapshot or checkpoint
    on_save: Callable[[int], Any] = lambda step: None  # called with the step before its checkpoint is written
    hopeless: RunError | None = None  # why the run cannot continue after this step
    enough: bool = False  # no further steps are needed


class StepLoop:
    """Makes the steps of one attempt."""

    def __init__(self, run: RunParts, learner: Learner, resume: Resume) -> None:
        self._config, self._stop, self._learner, self._resume = run.config, run.stop, learner, resume
        self._report, self._regrowth = run.report, run.regrowth
        self._update_seconds = 0.0  # duration of the last update
        self._torn = False  # an update was interrupted, so the trainers are between two steps
        self._on_disk: int | None = None  # the newest step that is

    async def make_steps(
        self,
        phase: PhaseName,
        start: int,
        last: int,
        step: Callable[[int], Awaitable[StepDone | None]],
        before: StepDone,
    ) -> None:
        """Make the steps after `start`, and keep the state of each, until the last one or a stop. `before` is the state
        after step `start`. A step that returns None was interrupted: then the one before it is on disk when this
        returns."""
        interval = COLD_START_SAVE_STEPS if phase == "cold_start" else self._config.checkpoint.interval
        self._on_disk = start if self._resume.state(phase)[1] is None else None
        for n in self._stop.steps(start + 1, last, phase):
            done = await step(n)
            if done is None:
                await self._fall_back(n - 1, before)
                return
            await self._keep(n, done, last=n == last or done.enough, due=n % interval == 0)
            before = done
            if done.enough:
                break

    async def train(self, update: Coroutine[Any, Any, StepStats]) -> StepStats | None:
        """Make a step's update. Return None if a stop leaves no time for it. An update that would not end in time is
        not begun: afterwards the trainers could no longer save the step before it."""
        if not self._stop.leaves_time(self._update_seconds):
            update.close()
            return None
        began, self._torn = time.perf_counter(), True
        stats = await self._stop.in_time(update, until_killed=True)  # without it there is nothing to save
        if stats is not None:
            self._update_seconds, self._torn = time.perf_counter() - began, False
        return stats

    async def _keep(self, step: int, done: StepDone, *, last: bool, due: bool) -> None:
        """Keep a finished step in memory, on disk, or neither. A pause waits here, and a hopeless run ends here;
        ruined weights are not kept. From a checkpoint trainers start again if there is room for rows that they lost."""
        if isinstance(done.hopeless, Ruined):
            raise done.hopeless
        if not self._stop.requested:
            await self._learner.snapshot(step, lambda: json.dumps(done.state))
        ends = done.hopeless is not None and not isinstance(done.hopeless, Rewind)
        requested = self._stop.saves()
        if requested or last or due or self._learner.failed_saves > 0 or ends:
            grows = not last and done.hopeless is None and self._regrowth.due
            saved = await self._save(step, done, last=last or ends, at_once=requested or grows)
            if saved and grows and self._regrowth.due and not self._stop.requested:
                raise self._regrowth.after(step)
        if done.hopeless is not None:
            raise done.hopeless

    async def _save(self, step: int, done: StepDone, *, last: bool, at_once: bool) -> bool:
        """Return True if the step was saved. It is on disk when this returns if it is the `last`, or with `at_once`."""
        self._report.to_disk()
        done.on_save(step)
        began = time.perf_counter()
        if not await self._learner.save(step, json.dumps(done.state), last=last, on_disk=at_once):
            return False
        self._stop.save_seconds = time.perf_counter() - began
        if last or at_once or self._config.checkpoint.async_mode == "disabled":
            self._on_disk = step
        await self._stop.saved(step)
        return True

    async def _fall_back(self, step: int, done: StepDone) -> None:
        """Save the last finished step, because the one after it was interrupted."""
        if self._torn:
            raise RunError(
                f"step {step + 1} was still being trained when fault.stop_grace_seconds was over",
                f"Steps after the last checkpoint are lost: trainers cannot be saved during an update. Raise "
                f"fault.stop_grace_seconds, which is {self._config.fault.stop_grace_seconds:g}, above the time of two "
                f"updates; the last one took {self._update_seconds:.1f} s.",
            )
        if self._on_disk != step:
            await self._save(step, done, last=True, at_once=True)
