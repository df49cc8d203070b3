"""The program of a reward process: a supervisor, which forks the worker and ends everything that the worker started.

    controller ── JudgeRequests ──────────────> worker: imports a rubric's functions, calls them on its main thread
               <── its answers, one by one ────
               ── SIGTERM, or its death ──> supervisor ── SIGKILL ──> worker, then all of its descendants
               ── SIGUSR2 ─────────────────────────────────────> worker: writes its stack
               <── the worker's exit ─────

    Imported      the rubric is ready    str       a call that begins now and has another deadline
    ImportFailed  it will never be       Judged    the verdict about one answer

The supervisor is the subreaper of its descendants: one whose parent ends becomes its child, in any session and group.
It imports the standard library only, so that it is small. The worker sends each answer before it begins the next one,
so the controller knows which answer a worker died on.
"""

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from titan_rl.tasks.rubric import JudgeRequest, Rubric, Scorer
    from titan_rl.wire.types import Judgement

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
FORWARDED = {signal.SIGTERM: signal.SIGKILL, signal.SIGUSR2: signal.SIGUSR2}
AWAITED = {*FORWARDED, signal.SIGCHLD}
"""Blocked in the supervisor: the handler of a signal that comes just before a call that blocks would run after that."""


class Imported(NamedTuple):
    at_once: bool  # answers are judged together
    pid: int


class ImportFailed(NamedTuple):
    error: str


class Judged(NamedTuple):
    verdict: "Judgement"
    seconds: float


def main(controller: int, connection: int, stack: int) -> None:
    """Judge until the controller hangs up. `stack`: a descriptor of the file that SIGUSR2 has the stack written to."""
    fork_worker(controller, [connection])
    from titan_rl.wire.program import outlive_readers

    outlive_readers()
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)  # also while a regular expression runs
    reply, scorers = Reply(Connection(connection)), dict["Rubric", "Scorer"]()
    os.register_at_fork(after_in_child=reply.connection.close)  # its copy would hide that this process died
    with suppress(EOFError, ConnectionError):
        while True:
            for request in reply.connection.recv():
                _answer(reply, scorers, request)


def fork_worker(controller: int, workers: Sequence[int]) -> None:
    """Fork, and return in the worker only, which has its own process group. `workers`: descriptors that only it has."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != controller:
        os._exit(0)
    supervisor = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if worker := os.fork():
        for descriptor in workers:
            os.close(descriptor)
        _supervise(worker)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _supervise(worker: int) -> NoReturn:
    """Forward signals until the worker ends. Then end all of its descendants, and end as it did."""
    status: int | None = None
    while status is None:
        number = signal.sigwait(AWAITED)
        if number in FORWARDED:
            os.kill(worker, FORWARDED[signal.Signals(number)])
            continue
        while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
            status = ended[1] if ended[0] == worker else None
    with suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)  # its children are the supervisor's now
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # one core, the worker's, is enough
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _children() -> Iterator[int]:
    """Yield the processes whose parent is this one. Not all kernels have /proc/PID/task/PID/children."""
    me = os.getpid()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == me:
                yield int(entry)


class Reply:
    """Sends to the controller, from the worker only."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection, self._worker = connection, os.getpid()

    def __call__(self, message: str | Imported | ImportFailed | Judged) -> None:
        if os.getpid() != self._worker:
            os._exit(0)  # the user's function forked, and this is the child
        self.connection.send(message)


def _answer(reply: Reply, scorers: "dict[Rubric, Scorer]", request: "JudgeRequest") -> None:
    if request.prompt is None:
        from titan_rl.tasks.rubric import Scorer

        try:
            scorer = scorers[request.rubric] = Scorer(request.rubric)
        except BaseException as error:  # importing the user's module runs it
            reply(ImportFailed(f"{type(error).__name__}: {error}"))
        else:
            reply(Imported(scorer.at_once, os.getpid()))
        return
    began = time.perf_counter()
    for _, verdict in scorers[request.rubric].verdicts(
        request.prompt, request.answers, request.rows, ungraded=request.ungraded, seconds=request.seconds, at=reply
    ):
        now = time.perf_counter()
        reply(Judged(verdict, now - began))
        began = now
