"""Receives requests from outside (signals, ctl) and lets the loop act on them between two steps.

A signal is a normal way to stop. The current step is finished and saved if there is time for both within the grace;
otherwise it is given up, and the step before it is saved. A second signal stops at once. ctl.py asks for the same
without a time limit, and for checkpoints and pauses. A paused run is a saved run: it can be stopped or killed without
loss.
"""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from titan_rl.record.terminal import Terminal
from titan_rl.wire.errors import CommandRefused
from titan_rl.wire.spans import Clock, span
from titan_rl.wire.types import PhaseName

T = TypeVar("T")

SAME_SECONDS = 0.25  # signals closer than this are one request: a wrapper forwards the signal that the terminal sent
SAME_TERM_SECONDS = 5.0  # a SIGTERM this close is no other request either: Slurm sends two to a job that it ends


def same_seconds(number: int) -> float:
    """Return how long a signal belongs to the request of the signal before it."""
    return SAME_TERM_SECONDS if number == signal.SIGTERM else SAME_SECONDS


class Stops:
    """The stops of several policies of one process. A signal is for each of them."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        """Before there are any, a signal cancels `task`, which starts the meshes."""
        self.each: list[Stop] = []
        self._task, self._cancelled = task, math.inf  # when, in the loop's time
        listen(self._on_signal)

    @property
    def requested(self) -> bool:
        return any(stop.requested for stop in self.each)

    @property
    def given_up(self) -> bool:
        return any(stop.given_up for stop in self.each)

    async def leave(self) -> dict[str, str]:
        """Stop all policies after their current steps, however long those take."""
        if not self.each:
            self._task.cancel()
        for stop in self.each:
            await stop.leave()
        return {"state": "stopping"}

    def _on_signal(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self.each and now - self._cancelled > same_seconds(number):
            os._exit(128 + number)
        if not self.each:
            self._cancelled = now
            self._task.cancel()
        for stop in self.each:
            stop.on_signal(number)


def listen(on_signal: Callable[[int], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


class Stop:
    """Signals and requests, as the loop sees them: `for step in steps(...)`, `in_time(work)`, `saves()`,
    `saved(step)`."""

    def __init__(
        self,
        task: asyncio.Task[Any],
        clock: Clock,
        terminal: Terminal,
        grace: float = 25.0,
        stops: Stops | None = None,
        listens: bool = True,
    ) -> None:
        """After the first signal, `task` has saved and ended within `grace` seconds, if saving is fast enough. With
        `stops`, of all policies of this process, signals go there; if it does not `listen`, they stay the caller's."""
        self.requested = False
        self.save_seconds: float | None = None  # duration of the last save
        self.given_up = False  # the grace is over, except for what a save needs
        self._task, self._clock, self._terminal = task, clock, terminal
        self._go = asyncio.Event()  # cleared while a pause is requested or in effect
        self._go.set()
        self._save_requests: list[asyncio.Future[None]] = []  # resolved by the next save
        self._stepping = self._leaving = self._paused = self._ended = False
        self._grace, self._signalled, self._deadline = grace, math.inf, math.inf  # times of the loop
        self._part: asyncio.Task[Any] | None = None  # the part of the current step that may be interrupted
        self._until_killed = False  # whether it uses the time for a save, too
        self._phase: PhaseName | None = None
        self.step = 0  # the current step, or the last one
        self._last = 0
        self._saved: int | None = None
        self._loop = asyncio.get_running_loop()
        if stops is not None:
            stops.each.append(self)
        elif listens:
            listen(self.on_signal)

    # -- called by the loop -----------------------------------------------------------------------------------

    def steps(self, first: int, last: int, phase: PhaseName = "rl") -> Iterator[int]:
        """Yield the steps of a loop, which calls `saves()` at the end of each, and `saved()` if it did save."""
        if phase != self._phase:
            self._phase, self._saved = phase, None
        self._last, self._stepping = last, True
        try:
            for step in range(first, last + 1):
                self.step = step
                with span("step", step=step):
                    yield step
                if self._leaving:
                    return
        finally:
            self._stepping = False

    async def in_time(self, work: Coroutine[Any, Any, T], *, until_killed: bool = False) -> T | None:
        """Await a part of a step. Return None if it is given up first: the part is cancelled. That happens while there
        is still time for a save; or, with `until_killed`, when the whole grace is over."""
        if self.given_up:
            work.close()
            return None
        part = self._part = asyncio.ensure_future(work)
        self._until_killed = until_killed
        try:
            return await part
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self.given_up or (caller is not None and caller.cancelling()):
                raise
            return None
        finally:
            self._part = None

    def leaves_time(self, seconds: float) -> bool:
        """Return True if work that takes `seconds` would end in time if it began now."""
        return self._loop.time() + seconds <= self._deadline

    def saves(self) -> bool:
        """Return True if a request waits for this step to be on disk. Later requests wait for the next save."""
        return self.requested or not self._go.is_set() or bool(self._save_requests)

    async def saved(self, step: int) -> None:
        """Note that the step is on disk: answer the requests that waited for it, wait here while paused, and let the
        loop end if a stop was requested. A failed save is not reported here, so the next step is saved instead."""
        self._saved = step
        for request in self._save_requests:
            if not request.done():
                request.set_result(None)
        self._save_requests.clear()
        if not self._go.is_set():
            self._paused = True
            try:
                with self._clock("pause"), self._terminal.phase(f"paused after step {step}, which is saved"):
                    await self._go.wait()
            finally:
                self._paused = False
        self._leaving = self.requested

    # -- requests, each answered with the run's status -----------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the state; `step` is the current or last step, `saved` the last that this process wrote to disk."""
        return {
            "state": self._state,
            "phase": self._phase and self._phase.replace("_", " "),
            "step": self.step,
            "of": self._last,
            "saved": self._saved,
        }

    async def checkpoint(self) -> dict[str, Any]:
        """Answer once the current step is on disk; in a paused run the last one is."""
        if not self._paused:
            request = asyncio.get_running_loop().create_future()
            self._save_requests.append(request)
            await request
        return self.status()

    async def pause(self) -> dict[str, Any]:
        """Train nothing after the current step until `resume`. Generators finish the samples they have started."""
        if self.requested:
            raise CommandRefused("the run is stopping")
        self._go.clear()
        return await self.checkpoint()

    async def resume(self) -> dict[str, Any]:
        """End a pause, or cancel one that has not started."""
        self._go.set()
        return self.status()

    async def leave(self) -> dict[str, Any]:
        """Stop after the current step, however long it takes."""
        self._request()
        return self.status()

    @property
    def _state(self) -> str:
        if self.requested:
            return "stopping"
        if self._stepping:
            return "training" if self._go.is_set() else "paused" if self._paused else "pausing"
        return "starting" if self._phase is None else "finishing"

    def _request(self) -> None:
        if self.requested:
            return
        self.requested = True
        self._go.set()
        if not self._stepping:
            self._task.cancel()

    def end(self) -> None:
        """Mark the run as finished: later signals have no effect."""
        self._ended = True

    def on_signal(self, number: int) -> None:
        now = self._loop.time()
        if self._signalled < math.inf:
            if number != signal.SIGHUP and now - self._signalled > same_seconds(number):
                os._exit(128 + number)  # worker processes die with the controller
            return
        if self._ended:
            return
        self._signalled = now
        if self._stepping and not self._paused:
            # A save may be slower than the last one; of the first, nothing is known.
            save = self._grace / 5 if self.save_seconds is None else 1.5 * self.save_seconds + 0.5
            self._deadline = now + self._grace - min(save, self._grace / 2)
            self._loop.call_at(self._deadline, self._give_up)
            self._loop.call_at(now + self._grace, self._give_up, True)
            self._terminal.note(
                f"{signal.Signals(number).name}: step {self.step} is finished and saved if that takes less than "
                f"{self._grace:g} s, else the step before it is saved; a second signal stops at once"
            )
        self._request()

    def _give_up(self, grace_over: bool = False) -> None:
        self.given_up = True
        if self._part is not None and (grace_over or not self._until_killed):
            self._part.cancel()
