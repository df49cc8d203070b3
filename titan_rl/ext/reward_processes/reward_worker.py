"""The program of a reward process: a worker, below a supervisor that ends everything that the worker started.

    controller ── JudgeRequests ──────────────> worker: imports a rubric's functions, calls them on its main thread
               <── its messages, one by one ──
               ── SIGTERM, or its death ──> supervisor ── SIGKILL ──> worker, then all of its descendants
               ── SIGUSR2 ─────────────────────────────────────> worker: writes its stack
               <── the worker's exit ─────

A message is a line with one JSON object:

    {"imported": AT_ONCE, "pid": PID}                    the rubric is ready
    {"failed": ERROR}                                    the rubric cannot be imported
    {"at": NAME, "has_deadline": BOOL}                   a call of a function begins; it ends itself when it is late
    {"reward", "parts", "error", "hung", "seconds"}      the verdict about one answer

The worker sends each answer before it begins the next one, so the controller knows which answer a worker died on.
"""

import faulthandler
import json
import os
import pickle
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from titan_rl.wire.supervisor import fork_worker

if TYPE_CHECKING:
    from titan_rl.tasks.rubric import JudgeRequest, Rubric, Scorer

LONGEST_TEXT = 10_000  # characters


def main(controller: int, connection: int, stack: int) -> None:
    """Judge until the controller closes the connection. `stack`: descriptor of the file that SIGUSR2 has the stack
    written to."""
    fork_worker(controller)
    from titan_rl.wire.program import outlive_readers

    outlive_readers()
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)  # also while a regular expression runs
    with socket.socket(fileno=connection) as link, link.makefile("rb") as requests, suppress(EOFError, ConnectionError):
        reply, scorers = Reply(link), dict["Rubric", "Scorer"]()
        while True:
            for request in pickle.load(requests):  # from the controller
                _answer(reply, scorers, request)


class Reply:
    """Sends messages to the controller, from the worker only."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._worker = link, os.getpid()

    def __call__(self, **message: Any) -> None:
        if os.getpid() != self._worker:
            os._exit(0)  # the user's function forked, and this is the child
        self._link.sendall(json.dumps(message).encode() + b"\n")


def _answer(reply: Reply, scorers: "dict[Rubric, Scorer]", request: "JudgeRequest") -> None:
    if request.prompt is None:
        from titan_rl.tasks.rubric import Scorer

        try:
            scorer = scorers[request.rubric] = Scorer(request.rubric)
        except BaseException as error:  # importing the user's module runs it
            reply(failed=f"{type(error).__name__}: {error}"[:LONGEST_TEXT])
        else:
            reply(imported=scorer.at_once, pid=os.getpid())
        return
    began = time.perf_counter()
    for _, verdict in scorers[request.rubric].verdicts(
        request.prompt,
        request.answers,
        request.rows,
        ungraded=request.ungraded,
        seconds=request.seconds,
        at=lambda name, has_deadline: reply(at=name, has_deadline=has_deadline),
    ):
        now = time.perf_counter()
        reply(
            reward=verdict.reward,
            parts=dict(verdict.parts),
            error=verdict.error[:LONGEST_TEXT],
            hung=verdict.hung,
            feedback=verdict.feedback[:LONGEST_TEXT],
            seconds=now - began,
        )
        began = now
