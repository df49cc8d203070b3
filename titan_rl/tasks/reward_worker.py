"""The program of a reward process: a supervisor, which forks the worker and ends everything that the worker started.

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

The supervisor is the subreaper of its descendants: one whose parent ends becomes its child, in any session and group.
It imports the standard library only, so that it is small. The worker sends each answer before it begins the next one,
so the controller knows which answer a worker died on.
"""

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from titan_rl.tasks.rubric import JudgeRequest, Rubric, Scorer

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALLED = 128
"""Exit code of the supervisor, less the signal that ended the worker, as shells count."""
FORWARDED = {signal.SIGTERM: signal.SIGKILL, signal.SIGUSR2: signal.SIGUSR2}
AWAITED = {*FORWARDED, signal.SIGCHLD}
"""Blocked in the supervisor: the handler of a signal that comes just before a call that blocks would run after that."""
LOOK_SECONDS = 0.5
"""Between two looks at whether the controller still runs. (The kernel's signal would come when the controller's thread
that started this process ends.)"""
LONGEST_ERROR = 10_000  # characters


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


def fork_worker(controller: int) -> None:
    """Fork, and return only in the worker, which has its own process group. The supervisor keeps its copy of the
    connection: the controller reads its end when the worker and all its descendants have ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if worker := os.fork():
        _supervise(worker, controller)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _supervise(worker: int, controller: int) -> NoReturn:
    """Forward signals until the worker ends. Then end all of its descendants, and exit with its exit code."""
    status: int | None = None
    while status is None:
        received = signal.sigtimedwait(AWAITED, LOOK_SECONDS)
        if received is None:
            if os.getppid() != controller:
                os.kill(worker, signal.SIGKILL)
        elif received.si_signo in FORWARDED:
            os.kill(worker, FORWARDED[signal.Signals(received.si_signo)])
        else:
            while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                status = ended[1] if ended[0] == worker else None
    with suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)  # its children are the supervisor's now
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def _children() -> Iterator[int]:
    """Yield the processes whose parent is this one. Not all kernels have /proc/PID/task/PID/children."""
    me = os.getpid()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == me:
                yield int(entry)


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
            reply(failed=f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
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
            error=verdict.error[:LONGEST_ERROR],
            hung=verdict.hung,
            seconds=now - began,
        )
        began = now
