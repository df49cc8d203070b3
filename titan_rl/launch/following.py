"""Waits for a submitted job: shows where it is in the queue and why, and prints its log as it grows."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from titan_rl.record.terminal import Terminal
from titan_rl.wire.program import STOPPED


class SubmissionFailed(Exception):
    """The scheduler did not take the job, or is not reached. The text is in its own words."""


class Look(NamedTuple):
    """A job's state in the scheduler."""

    state: str
    reason: str = ""  # in the scheduler's own words

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


ENDED = Look("ended")


class Submitted(Protocol):
    """A job that a scheduler has."""

    @property
    def name(self) -> str: ...

    @property
    def ends_it(self) -> str:
        """Return the command that ends the job."""
        ...

    def look(self) -> Look: ...

    def output(self) -> str:
        """Return what the run has printed since the last call."""
        ...

    def exit_code(self) -> tuple[int, str]:
        """Return the exit code of an ended job, and a reason if the run itself has printed none."""
        ...


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block, not within it."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def follow(submit: Callable[[], Submitted], terminal: Terminal, poll_seconds: float) -> int:
    """Return the exit code of the run. Ctrl-C ends the following, not the job: one that was submitted is recorded."""
    shown, job = None, None
    try:
        with interrupts_wait():
            job = submit()
        while True:
            look = job.look()
            if look not in (shown, ENDED):
                terminal.note(f"{job.name}: {look}")
                shown = look
            sys.stdout.write(job.output())
            sys.stdout.flush()
            if look == ENDED:
                code, why = job.exit_code()
                terminal.note(f"{job.name} {why or f'ended with exit code {code}'}")
                return code
            time.sleep(poll_seconds)
    except KeyboardInterrupt:
        if job is None:
            raise
        terminal.note(f"{job.name} continues; the same command follows it again, {job.ends_it} ends it")
        return STOPPED
