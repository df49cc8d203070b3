"""A process that has imported Python's library and forks an execution per request: a warm start.

It is started with an empty environment and no descriptors but its socket, leaves the host's files behind, and never
reads code, tests or outputs, which pass by as descriptors. So its forks can inherit no secret.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from titan_rl.ext.sandbox import landlock, seccomp
from titan_rl.ext.sandbox.contained import LayerMissing, Prepared, contain, layer, separate
from titan_rl.ext.sandbox.inside import Pipes
from titan_rl.ext.sandbox.private_root import enter, visible
from titan_rl.ext.sandbox.syscalls import CHILD_SUBREAPER, NEWNS, SET_DUMPABLE, control, unshare

WARM = (
    *("collections", "copy", "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "bisect", "io", "itertools", "math", "operator", "random", "re", "statistics", "string", "time"),
    *("typing", "traceback", "types", "unittest", "subprocess", "tempfile", "shutil", "glob", "pathlib", "socket"),
)
UNUSED_USERS = range(61000, 61184)  # systemd leaves them free
SLACK = 64  # processes that this user may start elsewhere meanwhile, without namespaces
MAX_MESSAGE_BYTES = 1 << 16


def serve(descriptor: int, settings: dict[str, Any]) -> None:
    """Serve executions until the socket closes. The first message names the missing layers."""
    host = socket.socket(fileno=descriptor)
    for name in WARM:
        importlib.import_module(name)
    missing: list[str] = []
    prepared = None
    try:
        missing = lacking(frozenset(settings["layers"]))
        prepared = prepare(settings)
    except LayerMissing as error:
        missing.append(str(error))
    except Exception as error:
        missing.append(f"sandbox: {error!r}")
    host.send(json.dumps({"missing": missing, "landlock": landlock.version()}).encode())
    if missing or prepared is None:
        return
    gc.collect()
    gc.freeze()  # forks then copy fewer pages
    while True:
        message, descriptors, _, _ = socket.recv_fds(host, MAX_MESSAGE_BYTES, 8)
        if not message:
            return
        request = json.loads(message)
        if request == "kill":
            continue  # it has ended by itself meanwhile
        if (pid := os.fork()) == 0:
            host.close()
            contain(prepared, request["mode"], request["limits"], Pipes(*descriptors))
        for each in descriptors:
            os.close(each)
        before = _cpu_seconds()
        if not attend(host, pid, prepared):
            return
        host.send(json.dumps({"cpu_seconds": _cpu_seconds() - before}).encode())


def attend(host: socket.socket, pid: int, prepared: Prepared) -> bool:
    """Wait for the end of an execution, or end it at the host's request. Return False if the host is gone."""
    here, ended = True, os.pidfd_open(pid)
    poll = select.poll()
    for each in (host.fileno(), ended):
        poll.register(each, select.POLLIN)
    while here and (ready := dict(poll.poll())) and ended not in ready:
        here = bool(host.recv(MAX_MESSAGE_BYTES))  # "kill", or nothing
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    if not here:
        os.kill(pid, signal.SIGKILL)
    reap(prepared)
    return here


def reap(prepared: Prepared) -> None:
    """Wait until every process of the execution is gone. A process id namespace kills them by itself."""
    while True:
        if "namespaces" not in prepared.layers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)  # all at once, so that no fork escapes; Landlock or the user keep it inside
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def lacking(layers: frozenset[str]) -> list[str]:
    """Return the layers that this kernel does not have, each with the reason."""
    found = []
    abi = landlock.version()
    if "landlock" in layers or "namespaces" not in layers:
        alone = "namespaces" not in layers and os.geteuid() != 0
        least = landlock.SCOPED if alone else 1
        if abi < least:
            why = "Linux 6.12, to keep signals inside" if alone else "Linux 5.13 with lsm=landlock"
            found.append(f"landlock: expected ABI {least} or newer ({why}), found {abi or 'none'}")
    if "seccomp" in layers:
        with suppress(OSError):
            if (pid := os.fork()) == 0:
                code = 1
                with suppress(BaseException):
                    seccomp.restrict()
                    code = 0
                os._exit(code)
            if os.waitpid(pid, 0)[1]:
                found.append("seccomp: expected a kernel with seccomp filters on x86_64 or aarch64, found none")
    return found


def prepare(settings: dict[str, Any]) -> Prepared:
    """Leave the host's files behind, and become an unused user."""
    layers, packages, folder = frozenset(settings["layers"]), settings["packages"], settings["folder"]
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    os.umask(0o022)
    paths = visible(packages)
    others = 0
    control(CHILD_SUBREAPER, 1)
    root = os.geteuid() == 0
    user = _unused(proc) if root else 0
    if "namespaces" in layers:
        with layer("namespaces"):
            entered = root and _entered(NEWNS)
            if root and not entered:
                become(user)
            if not entered:
                separate(proc, NEWNS, os.geteuid())
            paths, packages = enter(paths, packages)
            if entered:
                become(user)
    else:
        if root:
            os.chown(folder, user, user)
            become(user)
        else:
            others = _tasks(proc) + SLACK
        if not root or landlock.version() >= landlock.SCOPED:
            with layer("landlock"):
                landlock.keep_signals()
    return Prepared(layers, proc, paths, packages, folder, others)


def become(user: int) -> None:
    """Become a user without processes and files: the kernel does not limit root's processes."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    control(SET_DUMPABLE, 1)  # the maps of a user namespace can be written again


def _unused(proc: int) -> int:
    """Return one of UNUSED_USERS that has no process: two fork servers of one user would share its limit of processes.
    The search begins at this process's number, so that servers that start together rarely choose the same."""
    begin = os.getpid() % len(UNUSED_USERS)
    users = [*UNUSED_USERS[begin:], *UNUSED_USERS[:begin]]
    owners = {owner for _, owner in _processes(proc)}
    return next((user for user in users if user not in owners), users[0])


def _entered(flags: int) -> bool:
    try:
        unshare(flags)
    except PermissionError:
        return False
    return True


def _tasks(proc: int) -> int:
    """Return the number of this user's threads, as the limit of processes counts them."""
    count = 0
    for name, owner in _processes(proc):
        if owner == os.getuid():
            with suppress(OSError):  # it has ended
                count += len(_listed(proc, f"{name}/task"))
    return count


def _processes(proc: int) -> Iterator[tuple[str, int]]:
    """Yield number and user of each process."""
    for name in filter(str.isdigit, _listed(proc, ".")):
        with suppress(OSError):  # it has ended
            yield name, os.stat(name, dir_fd=proc).st_uid


def _listed(proc: int, folder: str) -> list[str]:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(at)
    finally:
        os.close(at)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
