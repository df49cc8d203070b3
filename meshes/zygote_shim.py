"""What Monarch launches for each rank: it gets the rank from a zygote or starts it cold, and ends as the rank ends.

    python -I -S zygote_shim.py COMMAND...        COMMAND starts the rank cold

    controller <── "name LIFE NAME", "cold KIND REASON", "pid N", "end STATUS" ── shim ──> zygote, or a child: COMMAND

The shim dies with the controller (on another host: with the agent that it reports to), and the rank dies with the shim.
It imports as little as it can: 10 ms of CPU a rank.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import array
import ctypes
import posix
import select
import sys

SHIM, REPORT, CONTROLLER = b"TITAN_RL_SHIM", b"TITAN_RL_REPORT", b"TITAN_RL_CONTROLLER"
ZYGOTE, DEADLINE = b"TITAN_RL_ZYGOTE", b"TITAN_RL_FORK_SECONDS"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
libc = ctypes.CDLL(None)


def main() -> None:
    if posix.getpgrp() != posix.getpid():
        posix.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller only
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):  # so do signals to every process of a job
        _signal.signal(number, _signal.SIG_IGN)
    libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    environment = dict(posix.environ)
    life_and_name, report, controller = (environment.pop(key) for key in (SHIM, REPORT, CONTROLLER))
    zygote, deadline = (environment.pop(key, b"") for key in (ZYGOTE, DEADLINE))
    if posix.getppid() != int(controller):
        posix._exit(1)
    environment[b"TITAN_RL_PROC"] = life_and_name.partition(b" ")[2]
    reports = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    reports.connect(report)
    reports.sendall(b"name " + life_and_name + b"\n")
    status = forked(reports, zygote, float(deadline), environment) if zygote else None
    if status is None:
        status = cold(reports, environment)
    reports.sendall(b"end %d\n" % status)
    if posix.WIFSIGNALED(status):
        number = posix.WTERMSIG(status)
        libc.prctl(PR_SET_DUMPABLE, 0)  # one core, the rank's, is enough
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    posix._exit(posix.WEXITSTATUS(status))


def forked(reports: _socket.socket, zygote: bytes, deadline: float, environment: dict[bytes, bytes]) -> int | None:
    """Have the zygote fork the rank, and return its wait status. None: it must start cold, and the report says why."""
    word = rest = b""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.settimeout(deadline)
    try:
        connection.connect(zygote)
        umask = posix.umask(0o077)
        posix.umask(umask)
        cpus = b",".join(b"%d" % cpu for cpu in sorted(posix.sched_getaffinity(0)))
        head = [sys.argv[1].encode(), posix.getcwdb(), b"%d" % umask, cpus]
        data = b"\0".join([*head, *(key + b"=" + value for key, value in environment.items())]) + b"\0\0"
        stdio = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        if unsent := data[connection.sendmsg([data], stdio) :]:  # a zygote that refuses may have hung up
            connection.sendall(unsent)
        word, _, rest = line(connection).partition(b" ")
    except OSError as error:
        rest = b"it did not answer: " + str(error).encode()
    if word == b"end":
        rest = b"its fork ended with status " + rest
    if word != b"pid":
        reports.sendall(b"cold " + zygote.rpartition(b"/")[2] + b" " + (rest or b"it has ended") + b"\n")
        return None
    reports.sendall(b"pid " + rest + b"\n")
    connection.settimeout(None)
    await_or_end(connection.fileno(), reports)
    try:
        word, _, rest = line(connection).partition(b" ")
    except OSError:
        word = b""
    return int(rest) if word == b"end" else _signal.SIGKILL  # the ranks of a zygote that has ended are killed


def cold(reports: _socket.socket, environment: dict[bytes, bytes]) -> int:
    """Start the rank as a child, and return its wait status."""
    executed, writer = posix.pipe2(posix.O_CLOEXEC)
    pid = posix.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        posix.execve(sys.argv[1], sys.argv[1:], environment)
    posix.close(writer)
    posix.read(executed, 1)  # returns once the rank's /proc/PID/environ is its own
    reports.sendall(b"pid %d\n" % pid)
    try:
        ended = posix.pidfd_open(pid)
    except OSError:  # a kernel before 5.3: ranks that start cold then outlive their host's agent
        return posix.waitpid(pid, 0)[1]
    await_or_end(ended, reports)
    return posix.waitpid(pid, 0)[1]


def await_or_end(descriptor: int, reports: _socket.socket) -> None:
    """Wait until a descriptor can be read. End, and the rank too, if nobody hears reports any more."""
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    watched.register(reports, select.POLLIN)
    while True:
        ready = [number for number, _ in watched.poll()]
        if descriptor in ready:
            return
        if not reports.recv(1):
            posix.kill(posix.getpid(), _signal.SIGKILL)


def line(connection: _socket.socket) -> bytes:
    found = b""
    while (one := connection.recv(1)) not in (b"", b"\n"):
        found += one
    return found


if __name__ == "__main__":
    main()
