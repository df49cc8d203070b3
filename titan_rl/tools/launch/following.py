"""Waits for a submitted job: shows where it is in the queue and why, and prints its log as it grows."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from titan_rl.record.terminal import Terminal
from titan_rl.wire.program import FAILED, STOPPED

SILENT_SECONDS = 1800.0
"""How long a scheduler may not answer before the following of a job ends. Upgrades of a cluster take minutes."""
MOST_PAUSE = 60.0  # seconds between two looks at a scheduler that does not answer


class SubmissionFailed(Exception):
    """The scheduler did not take the job, or is not reached. The text is in its own words."""

    passing = False
    """True if asking again may help: the scheduler is restarted, or not reached."""


class Look(NamedTuple):
    """A job's state in the scheduler."""

    state: str
    reason: str = ""  # in the scheduler's own words

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


ENDED = Look("ended")
UNKNOWN = "unknown"  # the state while a scheduler does not answer


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


def follow(
    submit: Callable[[], Submitted], terminal: Terminal, poll_seconds: float, silent_seconds: float = SILENT_SECONDS
) -> int:
    """Return the exit code of the run. Ctrl-C ends the following, not the job: one that was submitted is recorded. So
    does a scheduler that has not answered for `silent_seconds`."""
    shown, job = None, None

    def left(job: Submitted) -> str:
        return f"{job.name} continues; the same command follows it again, {job.ends_it} ends it"

    try:
        with interrupts_wait():
            job = submit()
        answered, pause = time.monotonic(), poll_seconds
        while True:
            try:
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
            except SubmissionFailed as error:
                if not error.passing:
                    terminal.note(left(job))
                    raise
                look = Look(UNKNOWN, str(error))
                if look != shown:
                    terminal.note(f"{job.name}: {look}")
                    shown = look
            if look.state != UNKNOWN:
                answered, pause = time.monotonic(), poll_seconds
            elif time.monotonic() - answered > silent_seconds:
                terminal.error(
                    f"the cluster has not answered for {silent_seconds:g} s ({look.reason}). {left(job)}", ""
                )
                return FAILED
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE) if look.state == UNKNOWN else poll_seconds
    except KeyboardInterrupt:
        if job is None:
            raise
        terminal.note(left(job))
        return STOPPED
