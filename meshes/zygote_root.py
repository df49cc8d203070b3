"""The process that a run's zygotes are forked from, after it has imported what all of them need: torch, above all.

    controller ──stdin──> root ──fork──> zygote of each kind (zygote.py) ──fork──> ranks

    python -P zygote_root.py PARENT      on stdin, a line of JSON: each kind's listener and log (fds) and environment;
                                         later: names of kinds whose zygotes are to end

Both zygotes would import torch for themselves otherwise, on cores that the controller needs, too. They die with this
process, which dies with PARENT. What zygote.py says of threads, CUDA and imports holds here as well.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
zygote: Any = importlib.import_module("zygote")  # not as a part of titan_rl, of which this imports nothing
del sys.path[0]

SHARED = [name for name in zygote.PRELOAD["model"].split() if name in zygote.PRELOAD["generator"].split()]


def main() -> None:
    zygote.end_with(parent=int(sys.argv[1]))
    zygotes = json.loads(_line())
    own = zygote.own_environment()
    gc.disable()
    zygote.import_all(SHARED, "root")
    root, forked = os.getpid(), dict[int, tuple[str, int]]()  # kinds and pids, by pidfd
    while zygotes:
        kind, facts = zygotes.popitem()
        if (pid := os.fork()) == 0:
            for fd in (*forked, *(fd for others in zygotes.values() for fd in (others["listener"], others["log"]))):
                os.close(fd)
            zygote.end_with(root)
            return become_zygote(kind, facts, own)
        forked[os.pidfd_open(pid)] = kind, pid
        for fd in (facts["listener"], facts["log"]):
            os.close(fd)
    await_end(forked)


def become_zygote(kind: str, facts: dict[str, Any], own: dict[bytes, bytes]) -> None:
    """Make this fork the zygote of a kind. Returns in each rank, when it has ended."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, at in ((null, 0), (facts["log"], 1), (facts["log"], 2)):
        os.dup2(fd, at)
    for fd in (null, facts["log"]):
        os.close(fd)
    own |= {os.fsencode(name): os.fsencode(value) for name, value in facts["environment"].items()}
    zygote.set_environment(own)
    sys.warnoptions[:] = [option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if option]
    warnings._processoptions(sys.warnoptions)  # pyright: ignore[reportAttributeAccessIssue]  # as Python does at its start
    command = ["python", "-P", zygote.__file__, kind]
    zygote.show_in_proc(own, b"".join(os.fsencode(word) + b"\0" for word in command))
    zygote.fork_ranks(kind, socket.socket(fileno=facts["listener"]), own)


def _line() -> bytes:
    """Read a line of stdin, and nothing of what follows it."""
    found = b""
    while not found.endswith(b"\n"):
        if not (one := os.read(0, 1)):
            raise EOFError("expected a line on stdin")
        found += one
    return found


def await_end(forked: dict[int, tuple[str, int]]) -> None:
    """Kill the zygotes that the controller names, and all of them once it closes stdin. Return when none is left."""
    poll = select.poll()
    for fd in (0, *forked):
        poll.register(fd, select.POLLIN)
    while forked:
        fd, _ = poll.poll()[0]
        if fd == 0:
            named = os.read(0, 1 << 10).decode().split()
            for kind, pid in forked.values():
                if kind in named or not named:
                    os.kill(pid, signal.SIGKILL)
            if not named:
                poll.unregister(0)
        else:
            os.waitpid(forked.pop(fd)[1], 0)
            poll.unregister(fd)
            os.close(fd)


if __name__ == "__main__":
    main()
