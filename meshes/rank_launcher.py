"""The program that Monarch launches for each rank. It starts the rank, and ends as the rank ends.

    python -I -S rank_launcher.py COMMAND...        COMMAND starts the rank cold

    controller <── "name LIFE NAME", "cold KIND REASON", "pid N", "end STATUS" ── launcher ──> COMMAND

The launcher dies with the controller (on another host: with the agent that it reports to), and the rank dies with the
launcher. It imports as little as it can: 10 ms of CPU a rank. Another launcher may call `main` with another `start`
(starter.py).
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import ctypes
import posix
import select
import sys

TYPE_CHECKING = False  # typing is not imported
if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[[_socket.socket, dict[bytes, bytes]], int]

RANK, REPORT, CONTROLLER = b"TITAN_RL_RANK", b"TITAN_RL_REPORT", b"TITAN_RL_CONTROLLER"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
libc = ctypes.CDLL(None)


def main(start: "Start | None" = None) -> None:
    if posix.getpgrp() != posix.getpid():
        posix.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller only
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):  # so do signals to every process of a job
        _signal.signal(number, _signal.SIG_IGN)
    libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    environment = dict(posix.environ)
    life_and_name, report, controller = (environment.pop(key) for key in (RANK, REPORT, CONTROLLER))
    if posix.getppid() != int(controller):
        posix._exit(1)
    environment[b"TITAN_RL_PROC"] = life_and_name.partition(b" ")[2]
    reports = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        reports.connect(report)
    except OSError as error:
        name = life_and_name.partition(b" ")[2].decode()
        sys.stderr.write(
            f"titan_rl: the launcher of {name} cannot reach its controller at {report.decode()}: {error}\n"
        )
        posix._exit(1)
    reports.sendall(b"name " + life_and_name + b"\n")
    status = (start or cold)(reports, environment)
    reports.sendall(b"end %d\n" % status)
    if posix.WIFSIGNALED(status):
        number = posix.WTERMSIG(status)
        libc.prctl(PR_SET_DUMPABLE, 0)  # one core, the rank's, is enough
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    posix._exit(posix.WEXITSTATUS(status))


def cold(reports: _socket.socket, environment: dict[bytes, bytes]) -> int:
    """Start the rank as a child, and return its wait status."""
    launcher = posix.getpid()
    pid = posix.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        if posix.getppid() != launcher:  # it died before this process had asked to die with it
            posix._exit(1)
        posix.execve(sys.argv[1], sys.argv[1:], environment)
    reports.sendall(b"pid %d\n" % pid)
    try:
        ended = posix.pidfd_open(pid)
    except OSError:  # a kernel before 5.3: ranks that start cold then outlive their host's agent
        return posix.waitpid(pid, 0)[1]
    await_any(reports, ended)
    return posix.waitpid(pid, 0)[1]


def await_any(reports: _socket.socket, *descriptors: int) -> None:
    """Wait until one of these can be read. End, and the rank too, if the reports are not read any more."""
    watched = select.poll()
    for descriptor in (*descriptors, reports.fileno()):
        watched.register(descriptor, select.POLLIN)
    while True:
        ready = [number for number, _ in watched.poll()]
        if any(descriptor in ready for descriptor in descriptors):
            return
        if not reports.recv(1):
            posix.kill(posix.getpid(), _signal.SIGKILL)


if __name__ == "__main__":
    main()
