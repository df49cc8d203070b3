"""One execution, seen from inside: forked from the fork server, it gives up everything before the code runs.

fork server ── fork ──> separate: namespaces ── fork ──> process 1: scratch, limits, Landlock, seccomp ── fork ──> code
                                                         └──> how it ended, on a descriptor that the code does not have
"""

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from titan_rl.ext.sandbox import landlock, seccomp
from titan_rl.ext.sandbox.inside import Pipes, become_python, become_shell, content, take_descriptors
from titan_rl.ext.sandbox.private_root import DEVICES, SCRATCH, mount_scratch
from titan_rl.ext.sandbox.solution_calls import examine
from titan_rl.ext.sandbox.syscalls import (
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    NEWUTS,
    SET_DUMPABLE,
    SET_PDEATHSIG,
    control,
    drop_capabilities,
    unshare,
)

INSIDE = 1000  # user and group, as the code sees them
OWN_PROCESSES = 2  # the sandbox's, next to the code's
OPEN_FILES = 64


class Prepared(NamedTuple):
    """The fork server's preparations for all executions."""

    layers: frozenset[str]
    proc: int  # descriptor of the host's /proc
    paths: list[str]  # readable ones
    packages: str
    folder: str  # scratch, without namespaces
    others: int  # processes of this user that count against its limit, without namespaces


class LayerMissing(Exception):
    """A layer could not be set up. str() names it."""


@contextmanager
def layer(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LayerMissing(f"{name}: {error}") from error


def contain(prepared: Prepared, mode: str, limits: Mapping[str, float], pipes: Pipes) -> NoReturn:
    """Run one execution, as a fork of the fork server."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the code may send it to process 1
        control(SET_PDEATHSIG, signal.SIGKILL)
        if "namespaces" in prepared.layers:
            with layer("namespaces"):
                separate(prepared.proc)
        if first := os.fork():
            os.closerange(0, 1 << 16)
            os.waitpid(first, 0)
            os._exit(0)
        os.close(prepared.proc)
        control(SET_PDEATHSIG, signal.SIGKILL)
        confine(prepared, limits)
        _run(mode, pipes, prepared)
    except BaseException as error:
        report(pipes.ending, {"failed": str(error) if isinstance(error, LayerMissing) else repr(error)})
    os._exit(1)


def separate(proc: int, flags: int = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP, user: int = INSIDE) -> None:
    """Enter new namespaces, of which the user namespace knows no user but this one."""
    uid, gid = os.getuid(), os.getgid()
    unshare(NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {uid} 1"), ("gid_map", f"{user} {gid} 1")):
        at = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(at, text.encode())
        os.close(at)


def confine(prepared: Prepared, limits: Mapping[str, float]) -> None:
    """Give up, for good, all rights that the code must not have."""
    layers, scratch = prepared.layers, prepared.folder
    if "namespaces" in layers:
        with layer("namespaces"):
            mount_scratch(int(limits["disk_mb"]))
            socket.sethostname("sandbox")
        scratch = SCRATCH
    os.makedirs(f"{scratch}/work", mode=0o700, exist_ok=True)
    os.chdir(f"{scratch}/work")
    control(SET_DUMPABLE, 0)  # no descriptor or memory of process 1 is reached through /proc
    if "landlock" in layers:
        with layer("landlock"):
            landlock.restrict(prepared.paths, [scratch, *DEVICES])
    if "rlimits" in layers:
        with layer("rlimits"):
            set_limits(limits, prepared.others)
    drop_capabilities()
    if "seccomp" in layers:
        with layer("seccomp"):
            seccomp.restrict(alone="namespaces" not in layers)
    os.environ.clear()
    path = f"/usr/local/bin:/usr/bin:/bin:{sys.base_prefix}/bin"
    work = f"{scratch}/work"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.environ.update(PATH=path, HOME=work, PWD=work, TMPDIR=scratch, LANG="C.UTF-8", USER="code", **threads)


def set_limits(limits: Mapping[str, float], others: int) -> None:
    cpu, mib = max(1, int(limits["cpu_seconds"])), 1 << 20
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),  # a signal; one second later one that cannot be ignored
        resource.RLIMIT_AS: int(limits["memory_mb"]) * mib,
        resource.RLIMIT_NPROC: int(limits["processes"]) + OWN_PROCESSES + others,
        resource.RLIMIT_FSIZE: int(limits["file_mb"]) * mib,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, most in wanted.items():
        resource.setrlimit(which, most if isinstance(most, tuple) else (most, most))


def report(ending: int, outcome: Mapping[str, Any]) -> None:
    os.write(ending, json.dumps(outcome).encode()[: 1 << 16])


def _run(mode: str, pipes: Pipes, prepared: Prepared) -> NoReturn:
    """Run the code in a child, as process 1: its end is the end of all processes of the execution."""
    if mode == "tests":
        report(pipes.ending, examine(pipes, prepared.packages))
        os._exit(0)
    code = os.fork()
    if code == 0:
        text = content(pipes.code)
        take_descriptors(pipes)
        become_shell(text) if mode == "shell" else become_python(text, prepared.packages)
    while True:
        ended, status = os.wait()
        if ended == code:
            break
    exit_code, by = (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
    report(pipes.ending, {"exit_code": exit_code, "signal": by})
    os._exit(0)
