"""The program of a reward process: imports a rubric's functions and judges answers, on its main thread.

    controller ── length, pickle of a request ──> worker ── a line of JSON per answer ──> controller

    {"ready": true or false: answers are judged together}     {"failed": why the rubric cannot be imported}
    {"at": what}  before what has a deadline of its own         {"row": i, "reward": ..., "seconds": ...}

The controller kills a worker that is late, and whatever it started. SIGUSR2 makes the worker write its stack to a file,
even while one long regular expression holds the interpreter's lock.
"""

import ctypes
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
from titan_rl.wire.types import Prompt, Verdict

PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("!I")


class Request(NamedTuple):
    """Answers of one group to judge. Without a prompt: only import the rubric."""

    rubric: Rubric
    prompt: Prompt | None = None
    answers: Sequence[Answered] = ()
    rows: Sequence[int] = ()  # of the answers, those to judge
    ungraded: Sequence[int] = ()  # of these, those that the grader has failed on
    seconds: float | None = None


def serve(connection: int, stack: int, controller: int) -> None:
    """Judge until the controller hangs up. The kernel kills this process if the controller dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != controller:
        return
    outlive_readers()
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    os.register_at_fork(after_in_child=lambda: _close(connection))  # its copy would hide that this process died
    with socket.socket(fileno=connection) as controller_socket:
        requests = controller_socket.makefile("rb")
        scorers: dict[Rubric, Scorer] = {}
        while head := requests.read(LENGTH.size):
            request: Request = pickle.loads(requests.read(*LENGTH.unpack(head)))
            _answer(controller_socket, scorers, request)


def _close(connection: int) -> None:
    with suppress(OSError):
        os.close(connection)


def _answer(controller: socket.socket, scorers: dict[Rubric, Scorer], request: Request) -> None:
    me = os.getpid()

    def tell(**line: Any) -> None:
        if os.getpid() != me:
            os._exit(0)  # the user's function forked, and this is the child
        controller.sendall(json.dumps(line).encode() + b"\n")

    if request.prompt is None:
        try:
            scorer = scorers[request.rubric] = Scorer(request.rubric)
        except BaseException as error:  # importing the user's module runs it
            tell(failed=f"{type(error).__name__}: {error}")
        else:
            tell(ready=scorer.at_once)
        return
    began = time.perf_counter()
    verdicts = scorers[request.rubric].verdicts(
        request.prompt,
        request.answers,
        request.rows,
        ungraded=request.ungraded,
        seconds=request.seconds,
        at=lambda what: tell(at=what),
    )
    for row, verdict in verdicts:
        now = time.perf_counter()
        tell(row=row, seconds=now - began, **fields_of(verdict))
        began = now


def fields_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a line has it: null for NaN."""
    reward = None if math.isnan(verdict.reward) else verdict.reward
    return {"reward": reward, "parts": dict(verdict.parts), "error": verdict.error, "hung": verdict.hung}


def verdict_of(line: dict[str, Any]) -> Verdict:
    reward = math.nan if line["reward"] is None else float(line["reward"])
    return Verdict(reward, line["parts"], line["error"], line["hung"])
