"""Forks a process that runs the user's code, and ends everything that it started.

    starter ── SIGTERM, or its death ──> supervisor ── SIGKILL ──> worker, then all of its descendants
            ── SIGUSR2 ─────────────────────────────────────────> worker
            <── the worker's exit ─────

The supervisor is the subreaper of its descendants: one whose parent ends becomes its child, in any session and group.
It is also the worker's parent, so code that kills its parent does not kill the starter. It imports the standard library
only, so that it is small.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALLED = 128
"""Exit code of the supervisor, less the signal that ended the worker, as shells count."""
FORWARDED = {signal.SIGTERM: signal.SIGKILL, signal.SIGUSR2: signal.SIGUSR2}
AWAITED = {*FORWARDED, signal.SIGCHLD}
"""Blocked in the supervisor: the handler of a signal that comes just before a call that blocks would run after that."""
LOOK_SECONDS = 0.5
"""Between two looks at whether the starter still runs. (The kernel's signal would come when the starter's thread that
started this process ends.)"""


def how_ended(code: int) -> str:
    """Return how a worker ended, by the exit code of its supervisor."""
    number = -code if code < 0 else code - SIGNALLED
    return f"was killed by signal {number}" if number > 0 else f"ended with exit code {code}"


def fork_worker(starter: int, *, own_temp: bool = False) -> None:
    """Fork, and return only in the worker, which has its own process group. `starter`: the process that started this
    one. The supervisor keeps its copy of every connection: the starter reads the end of one when the worker and all its
    descendants have ended. With `own_temp` they get a new TMPDIR, which is removed after that."""
    temp = ""
    if own_temp:
        import tempfile

        temp = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="titan_rl-")
        tempfile.tempdir = None  # it remembers the one before
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    if worker := os.fork():
        _supervise(worker, starter, temp)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _supervise(worker: int, starter: int, temp: str) -> NoReturn:
    """Forward signals until the worker ends. Then end all of its descendants, remove the folder `temp`, and exit with
    the worker's exit code."""
    status: int | None = None
    while status is None:
        received = signal.sigtimedwait(AWAITED, LOOK_SECONDS)
        if received is None:
            if os.getppid() != starter:
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
    if temp:
        import shutil

        shutil.rmtree(temp, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def _children() -> Iterator[int]:
    """Yield the processes whose parent is this one. Not all kernels have /proc/PID/task/PID/children."""
    me = os.getpid()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == me:
                yield int(entry)
