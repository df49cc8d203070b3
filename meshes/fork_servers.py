"""The fork servers of this process's ranks: started here, or used where another process keeps them.

TITAN_RL_FORK_SERVERS   unset: a run on CPU starts its own, which end with it
                        FOLDER: another process keeps them there (titan_rl warm); it must be the user's own, mode 0700
                        "off": every rank starts cold, that is, it imports its engine itself

A fork server that hangs is not killed before the run ends, because the kernel would kill its ranks too, which need it
no more. It is asked whether it answers before each rank, and ranks start cold while it does not (spawn.py).

Importing this module imports next to nothing: fork servers start before everything else.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.environment import TRACKER_KEYS

Kind = Literal["model", "generator"]
KINDS: tuple[Kind, ...] = ("model", "generator")

VARIABLE, OFF = "TITAN_RL_FORK_SERVERS", "off"
READY_SECONDS = 120.0  # to import an engine on a busy machine; a cold start takes as long there
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # unless hosts.threads gives a mesh more
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores of other ranks
    "GLOO_SOCKET_IFNAME": "lo",  # ranks are on one host: no other one reaches them
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run never downloads
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    **dict.fromkeys(TRACKER_KEYS, ""),
}
"""Launch environment of every rank."""
KIND_ENV: dict[Kind, dict[str, str]] = {"model": {}, "generator": {**ENV, **vllm_cpu.ENV}}

_warned: set[tuple[str, str]] = set()


def warn(text: str) -> None:
    """Print why ranks start cold. A run replaces it by its terminal's."""
    print(f"warning: {text}", file=sys.stderr)


def warn_cold(kind: str, reason: str) -> None:
    """Warn once that ranks of this kind start cold."""
    if (kind, reason) not in _warned:
        _warned.add((kind, reason))
        warn(f"the {kind} fork server forks no rank: {reason}; {kind} ranks start cold, which takes seconds more")


class ForkServers:
    """This process's own fork servers, one per kind, with their sockets in `folder`. None if the environment names
    others or turns them off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = not os.environ.get(VARIABLE)
        self._started: dict[Kind, subprocess.Popen[bytes]] = {}

    def keep(self, kinds: Collection[Kind]) -> None:
        """Have a fork server of each of these kinds and no other."""
        for kind in KINDS if self._own else ():
            if kind not in kinds and (server := self._started.pop(kind, None)):
                (self._folder / kind).unlink(missing_ok=True)
                server.kill()
                server.wait()
            if kind in kinds and kind not in self._started:
                with suppress(OSError):  # the path is too long for a socket, say: ranks start cold, with a warning
                    self._started[kind] = _start(kind, self._folder)
        if self._own:
            os.environ[VARIABLE] = str(self._folder) if kinds else OFF


@contextmanager
def serving(folder: Path) -> Iterator[ForkServers]:
    """Yield this process's own fork servers, none at first, and end them."""
    inherited, servers = os.environ.get(VARIABLE), ForkServers(folder)
    try:
        yield servers
    finally:
        servers.keep([])
        if not inherited:
            os.environ.pop(VARIABLE, None)


def _start(kind: Kind, folder: Path) -> subprocess.Popen[bytes]:
    program = str(Path(__file__).with_name("fork_server.py"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, open(folder / f"{kind}.log", "wb") as log:
        listener.bind(str(folder / kind))
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, "-P", program, kind, str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C in the terminal reaches the controller only
            env={**os.environ, **WORKER_ENV, **KIND_ENV[kind], "CUDA_VISIBLE_DEVICES": ""},
        )


async def ask(path: Path) -> None:
    """Return once the fork server with this socket has imported its engine. OSError: it has ended."""
    import asyncio

    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.setblocking(False)
        await loop.sock_connect(asking, str(path))
        await loop.sock_sendall(asking, b"ready?")
        if await loop.sock_recv(asking, 16) != b"ready":
            raise ConnectionError("it has ended")
