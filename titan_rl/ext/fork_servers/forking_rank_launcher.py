"""The launcher of a rank that a fork server forks (meshes/rank_launcher.py has the rest).

    python -I -S forking_rank_launcher.py COMMAND...        COMMAND starts the rank cold, if the server forks none

    controller <── "name LIFE NAME", "cold KIND REASON", "pid N", "end STATUS" ── launcher ──> fork server, or COMMAND

A fork server reports how its rank ended; the launcher also watches the rank itself, because a fork server may hang.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket
import array
import posix
import sys

sys.path.insert(0, __file__.rpartition("/ext/")[0] + "/meshes")
launcher = __import__("rank_launcher")
del sys.path[0]

SERVER, DEADLINE = b"TITAN_RL_FORK_SOCKET", b"TITAN_RL_FORK_SECONDS"
STATUS_SECONDS = 1.0  # for a fork server to report how its rank ended


def forked(reports: _socket.socket, environment: dict[bytes, bytes]) -> int:
    """Have the server fork the rank, or start it cold, and return its wait status."""
    server, deadline = environment.pop(SERVER), environment.pop(DEADLINE)
    word = rest = b""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.settimeout(float(deadline))
    try:
        connection.connect(server)
        umask = posix.umask(0o077)
        posix.umask(umask)
        cpus = b",".join(b"%d" % cpu for cpu in sorted(posix.sched_getaffinity(0)))
        head = [sys.argv[1].encode(), posix.getcwdb(), b"%d" % umask, cpus]
        request = b"\0".join([*head, *(key + b"=" + value for key, value in environment.items())])
        stdio = array.array("i", [0, 1, 2])
        connection.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, stdio)])
        word, _, rest = connection.recv(4096).partition(b" ")
    except OSError as error:
        rest = b"it did not answer: " + str(error).encode()
    if word == b"end":
        rest = b"its fork ended with status " + rest
    if word != b"pid":
        reports.sendall(b"cold " + server.rpartition(b"/")[2] + b" " + (rest or b"it has ended") + b"\n")
        return launcher.cold(reports, environment)
    reports.sendall(b"pid " + rest + b"\n")
    try:
        ended = posix.pidfd_open(int(rest))
    except OSError:  # the rank has ended, and the server has reported it
        ended = connection.fileno()
    launcher.await_any(reports, connection.fileno(), ended)
    connection.settimeout(STATUS_SECONDS)
    try:
        word, _, rest = connection.recv(100).partition(b" ")
    except OSError:  # the rank has ended, and the server hangs
        word = b""
    return int(rest) if word == b"end" else _signal.SIGKILL  # the kernel kills the ranks with their server


if __name__ == "__main__":
    launcher.main(forked)
