"""Forks a reward process, and ends whatever it started, also in sessions of their own.

    controller ── SIGTERM, or its death ──> keeper ── SIGKILL ──> worker, then all of its descendants
               ── SIGUSR2 ──────────────────────────────────────> worker
               <── the worker's exit ────────

The keeper is the subreaper of its descendants: one whose parent ends becomes the keeper's own child, whatever session,
group or environment it has. Only the standard library is imported, so that a keeper is small.
"""

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
FORWARDED = {signal.SIGTERM: signal.SIGKILL, signal.SIGUSR2: signal.SIGUSR2}
AWAITED = {*FORWARDED, signal.SIGCHLD}
"""Blocked in the keeper: the handler of a signal that comes just before a call that blocks would run after that."""


def fork_worker(controller: int, workers: Sequence[int]) -> None:
    """Fork, and return in the worker only, which has its own process group. `workers`: descriptors that only it has."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != controller:
        os._exit(0)
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if worker := os.fork():
        for descriptor in workers:
            os.close(descriptor)
        _keep(worker)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(0)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _keep(worker: int) -> NoReturn:
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
            os.waitpid(-1, 0)  # its own children are ours now
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
