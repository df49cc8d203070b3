"""Receives requests from outside (signals, ctl) and lets the loop act on them between two steps.

Ctrl-C is a normal way to stop: the current step is finished and saved if it ends within the grace; a second Ctrl-C
stops at once. ctl.py asks for the same without a time limit, and for checkpoints and pauses. A paused run is a saved
run: it can be stopped or killed without loss.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

from titan_rl.control.server import RequestRefused
from titan_rl.record.terminal import Terminal
from titan_rl.wire.clock import Clock
from titan_rl.wire.spans import span
from titan_rl.wire.types import PhaseName

GRACE_SECONDS = 5.0  # for the current step after a Ctrl-C; saving and shutting down take extra time


class Stop:
    """Signals and requests, as the loop sees them: `for step in steps(...)`, `saves()`, `saved(step)`."""

    def __init__(self, task: asyncio.Task[Any], clock: Clock, terminal: Terminal) -> None:
        self.requested = False
        self._task, self._clock, self._terminal = task, clock, terminal
        self._go = asyncio.Event()  # cleared while a pause is requested or in effect
        self._go.set()
        self._asked: list[asyncio.Future[None]] = []  # resolved by the next save
        self._stepping = self._saving = self._leaving = self._paused = self._signalled = False
        self._phase: PhaseName | None = None
        self.step = 0  # the current step, or the last one
        self._last = 0
        self._saved: int | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    # -- called by the loop -----------------------------------------------------------------------------------

    def steps(self, first: int, last: int, phase: PhaseName = "rl") -> Iterator[int]:
        """Yield the steps of a loop, which calls `saves()` at the end of each, and `saved()` if it did save."""
        if phase != self._phase:
            self._phase, self._saved = phase, None
        self._last, self._stepping, self._saving = last, True, False
        try:
            for step in range(first, last + 1):
                self.step = step
                with span("step", step=step):
                    yield step
                self._saving = False
                if self._leaving:
                    return
        finally:
            self._stepping = False

    def saves(self) -> bool:
        """Return True if a request waits for this step to be on disk. Later requests wait for the next save."""
        self._saving = self.requested or not self._go.is_set() or bool(self._asked)
        return self._saving

    async def saved(self, step: int) -> None:
        """Note that the step is on disk: answer the requests that waited for it, wait here while paused, and let the
        loop end if a stop was requested. A failed save is not reported here, so the next step is saved instead."""
        self._saved = step
        for asked in self._asked:
            if not asked.done():
                asked.set_result(None)
        self._asked.clear()
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
            asked = asyncio.get_running_loop().create_future()
            self._asked.append(asked)
            await asked
        return self.status()

    async def pause(self) -> dict[str, Any]:
        """Train nothing after the current step until `resume`. Generators finish the samples they have started."""
        if self.requested:
            raise RequestRefused("the run is stopping")
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

    def _on_signal(self, number: int) -> None:
        if self._signalled:
            os._exit(128 + number)  # worker processes die with the controller
        self._signalled = True
        if self._stepping:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._give_up)
        self._request()

    def _give_up(self) -> None:
        if not (self._saving or self._leaving):
            self._task.cancel()
