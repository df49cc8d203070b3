"""The program of a reward process: imports a rubric's functions and judges answers, on its main thread.

    controller ── length, pickle of requests ──> worker ── lines of JSON in shared memory, and a byte ──> controller

    {"ready": true or false: answers are judged together}     {"failed": why the rubric cannot be imported}
    {"at": what}  before what has a deadline of its own         {"row": i, "reward": ..., "seconds": ...}

Each line has its time, "t". Lines survive the worker: the controller reads them after the byte, which comes once for
many fast answers, but also when a deadline has passed or the worker is gone. So it always knows whose turn it was.

The controller kills a worker that is late, and whatever it started (reward_keeper.py). SIGUSR2 makes the worker write
its stack to a file, even while one long regular expression holds the interpreter's lock.
"""

import faulthandler
import json
import math
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import Rubric, Scorer
from titan_rl.wire.streams import outlive_readers
from titan_rl.wire.types import Judgement, Prompt

LENGTH = struct.Struct("!I")
FLUSH_SECONDS = 0.02
"""Between two bytes to the controller, at least, while answers are fast."""


class JudgeRequest(NamedTuple):
    """Answers of one group to judge. Without a prompt: only import the rubric."""

    rubric: Rubric
    prompt: Prompt | None = None
    answers: Sequence[Answered] = ()
    rows: Sequence[int] = ()  # of the answers, those to judge
    ungraded: Sequence[int] = ()  # of these, those that the grader has failed on
    seconds: float | None = None


def serve(connection: int, lines: int, stack: int) -> None:
    """Judge until the controller hangs up. `lines` and `stack`: descriptors of shared memory."""
    outlive_readers()
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    os.register_at_fork(after_in_child=lambda: _close(connection))  # its copy would hide that this process died
    with socket.socket(fileno=connection) as controller_socket:
        requests = controller_socket.makefile("rb")
        scorers: dict[Rubric, Scorer] = {}
        while head := requests.read(LENGTH.size):
            told = Told(controller_socket, lines)
            asked: list[JudgeRequest] = pickle.loads(requests.read(*LENGTH.unpack(head)))
            for request in asked:
                _answer(told, scorers, request)
            told.flush()


def _close(connection: int) -> None:
    with suppress(OSError):
        os.close(connection)


class Told:
    """What the controller is told about one message's requests: lines, from the beginning of the shared memory on."""

    def __init__(self, controller: socket.socket, lines: int) -> None:
        self._controller, self._lines = controller, lines
        self._end, self._flushed, self._me = 0, time.monotonic(), os.getpid()

    def line(self, **fields: Any) -> None:
        if os.getpid() != self._me:
            os._exit(0)  # the user's function forked, and this is the child
        now = time.monotonic()
        self._end += os.pwrite(self._lines, json.dumps({"t": now, **fields}).encode() + b"\n", self._end)
        if now - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._controller.send(b"\n")
        self._flushed = time.monotonic()


def _answer(told: Told, scorers: dict[Rubric, Scorer], request: JudgeRequest) -> None:
    if request.prompt is None:
        try:
            scorer = scorers[request.rubric] = Scorer(request.rubric)
        except BaseException as error:  # importing the user's module runs it
            told.line(failed=f"{type(error).__name__}: {error}")
        else:
            told.line(ready=scorer.at_once, pid=os.getpid())
        return
    began = time.perf_counter()
    verdicts = scorers[request.rubric].verdicts(
        request.prompt,
        request.answers,
        request.rows,
        ungraded=request.ungraded,
        seconds=request.seconds,
        at=lambda what: told.line(at=what),
    )
    for row, verdict in verdicts:
        now = time.perf_counter()
        told.line(row=row, seconds=now - began, **fields_of(verdict))
        began = now


def fields_of(verdict: Judgement) -> dict[str, Any]:
    """Return a verdict as a line has it: null for NaN."""
    reward = None if math.isnan(verdict.reward) else verdict.reward
    return {"reward": reward, "parts": dict(verdict.parts), "error": verdict.error, "hung": verdict.hung}


def verdict_of(line: dict[str, Any]) -> Judgement:
    reward = math.nan if line["reward"] is None else float(line["reward"])
    return Judgement(reward, line["parts"], line["error"], line["hung"])
