"""Ctrl-C is a normal way to stop: the step in hand is finished and saved, if it ends soon. Twice stops at once."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

from titan_rl.spans import span

GRACE_SECONDS = 5.0  # for the step in hand; saving and shutting down come on top


class Stop:
    """Signal handling of a run."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.requested = False
        self._task = task
        self._stepping = False
        self._leaving = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def steps(self, first: int, last: int) -> Iterator[int]:
        """The steps of a loop that asks `here()` at the end of each."""
        self._stepping = True
        try:
            for step in range(first, last + 1):
                if self._leaving:
                    return
                with span("step", step=step):
                    yield step
        finally:
            self._stepping = False

    def here(self) -> bool:
        """Whether to leave after this step, and so to save it. A request that comes later waits for the next step: the
        loop never ends at a step that was not saved."""
        self._leaving = self.requested
        return self._leaving

    def _on_signal(self, number: int) -> None:
        if self.requested:
            os._exit(128 + number)  # worker processes die with the controller
        self.requested = True
        if self._stepping:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._give_up)
        else:
            self._task.cancel()

    def _give_up(self) -> None:
        if not self._leaving:
            self._task.cancel()
