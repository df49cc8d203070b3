"""Puts a run into a private network namespace, in which no other user can reach its sockets.

    host's network    everything else, and threads of `start_outside`: user functions may need a network
    run's network     the controller and its ranks: Monarch's and gloo's sockets; only a loopback device

Monarch's controller listens on abstract Unix sockets. They have no permissions, any local user finds their names in
/proc/net/unix, and messages to them can execute code. But they are visible in one network namespace only, as every TCP
port is. An unprivileged user may create a namespace inside a user namespace, which maps no user but this one.

Sockets with a path are not affected: the run's are in a folder that only its user can open.
"""

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar, cast

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

CAP_SYS_ADMIN = 21
CAPABILITY_VERSION = 0x20080522  # the arguments of capset: a header, and two rows of three sets

ALLOW = "Allow unprivileged user namespaces, or use a machine or container without other users"

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_outsider: "SimpleQueue[threading.Thread] | None" = (
    None  # threads to start by a thread that stays in the host's network
)


def isolate() -> str:
    """Move the calling thread, and all that it starts from now on, into a new network. Return why that is not possible,
    or "". Call it while the process has no other thread: only then can it enter a user namespace."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1 and not _capable(CAP_SYS_ADMIN):
        return f"this process has {threads} threads, and only one with a single thread can enter a user namespace"
    if not (reason := refusal()):
        _enter()
    return reason


def refusal() -> str:
    """Return why `isolate` would fail here, or "". A child tries it: half of it cannot be undone."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        reason = "an error in the child that tried it"
        with suppress(BaseException):
            reason = _attempt()
        os.write(writer, reason.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        reason = answer.read()
    os.waitpid(pid, 0)
    return reason


def _attempt() -> str:
    try:
        _enter()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        return f"no network namespace can be made ({error.strerror or error})"
    return ""


def _enter() -> None:
    global _outsider
    if not _capable(CAP_SYS_ADMIN):
        user, group = os.getuid(), os.getgid()
        _unshare(CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")  # the kernel asks for it before an unprivileged gid_map
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _outsider = SimpleQueue()
    threading.Thread(target=_start_threads, args=(_outsider,), name="outside", daemon=True).start()
    _unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        name, flags = struct.unpack("16sH22x", request)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | IFF_UP))
    _drop_capabilities()


def _drop_capabilities() -> None:
    """Give up the capabilities that a user namespace gave to this thread. A program that an ordinary user's process
    executes has none, and may open /proc/PID/fd only of a process that has no more: launchers of ranks do."""
    if os.getuid() != 0 and _libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start_outside(thread: threading.Thread) -> None:
    """Start a thread that uses the host's network even if the run is isolated."""
    if _outsider is None:
        thread.start()
    else:
        _outsider.put(thread)


def outside(function: Callable[[], T]) -> T:
    """Call a function in the host's network, and return its result."""
    if _outsider is None:
        return function()
    answer: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def call() -> None:
        try:
            answer.put((function(), None))
        except BaseException as error:  # a sys.exit in user code, say
            answer.put((None, error))

    start_outside(threading.Thread(target=call, daemon=True))
    value, error = answer.get()
    if error is not None:
        raise error
    return cast(T, value)


def _start_threads(threads: "SimpleQueue[threading.Thread]") -> None:
    _drop_capabilities()
    while True:
        threads.get().start()  # in the network of the thread that starts it


def _capable(capability: int) -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> capability & 1)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def warning(reason: str, remedy: str = ALLOW) -> str:
    """Return the warning about a run that is not isolated."""
    return (
        f"the run is not isolated: {reason}. While it lasts, any local user can execute code as you through Monarch's "
        f"sockets. {remedy}. docs/security.md"
    )
