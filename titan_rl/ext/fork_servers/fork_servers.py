"""The fork servers of this process's ranks: started here, or used where another process keeps them.

TITAN_RL_FORK_SERVERS   unset: a run on CPU starts its own, which end with it
                        FOLDER: another process keeps them there (titan_rl warm); it must be the user's own, mode 0700
                        "off": every rank starts cold, that is, it imports its engine itself

A fork server that hangs is not killed before the run ends, because the kernel would kill its ranks too, which need it
no more. It is asked whether it answers before each rank, and ranks start cold while it does not.
"""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.meshes.starter import KINDS, WORKER_ENV, Kind, Servers, Starter

VARIABLE, OFF = "TITAN_RL_FORK_SERVERS", "off"
FORKING_LAUNCHER = str(Path(__file__).with_name("forking_rank_launcher.py"))
READY_SECONDS = 120.0  # to import an engine on a busy machine; a cold start takes as long there
FORK_SECONDS = 15.0  # then a rank starts cold; Monarch gives a process 30 s to answer
ANSWER_SECONDS = 2.0  # for a fork server that has answered before; one that takes longer hangs
KIND_ENV: dict[Kind, dict[str, str]] = {"model": {}, "generator": {**ENV, **vllm_cpu.ENV}}


class ForkServers(Servers):
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


class ForkStarter(Starter):
    """Has ranks forked by the fork server of their kind, if one answers."""

    def __init__(self) -> None:
        super().__init__()
        self._ready_by: dict[Path, float] = {}  # deadline of a fork server to import its engine, by socket; 0: it has
        self._warned: set[tuple[str, str]] = set()

    @property
    def folder(self) -> str:
        folder = os.environ.get(VARIABLE, OFF)
        return "" if folder == OFF else folder

    @contextmanager
    def serving(self, folder: Path) -> Iterator[Servers]:
        """Yield this process's own fork servers, none at first, and end them."""
        inherited, servers = os.environ.get(VARIABLE), ForkServers(folder)
        try:
            yield servers
        finally:
            servers.keep([])
            if not inherited:
                os.environ.pop(VARIABLE, None)

    async def launcher(self, kind: Kind | None, folder: str | None = None) -> tuple[str, Mapping[str, str]]:
        if kind and folder is None:
            server = await self.server_of(kind)
        else:
            server = f"{folder}/{kind}" if kind and folder else ""
        if not server:
            return await super().launcher(kind, folder)
        return FORKING_LAUNCHER, {"TITAN_RL_FORK_SOCKET": server, "TITAN_RL_FORK_SECONDS": str(FORK_SECONDS)}

    async def server_of(self, kind: Kind) -> str:
        """Return the socket of the fork server of this kind of rank, once it answers. "": ranks start cold."""
        import asyncio  # late: fork servers start before it is imported

        if not (folder := self.folder):
            return ""
        path, refusal = Path(folder) / kind, _refusal(Path(folder))
        by = self._ready_by.setdefault(path, time.monotonic() + READY_SECONDS)
        seconds = max(by - time.monotonic(), ANSWER_SECONDS)
        try:
            if not refusal:
                async with asyncio.timeout(seconds):
                    await ask(path)
                self._ready_by[path] = 0.0
        except TimeoutError:
            refusal = f"it did not answer within {seconds:.0f} s"
        except OSError as error:
            refusal = f"it cannot be reached ({error.strerror or error}){_last_line(path)}"
        if refusal:
            self.warn_cold(kind, refusal)
        return "" if refusal else str(path)

    def warn_cold(self, kind: str, reason: str) -> None:
        if (kind, reason) not in self._warned:
            self._warned.add((kind, reason))
            self.warn(
                f"the {kind} fork server forks no rank: {reason}; {kind} ranks start cold, which takes seconds more"
            )


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


def _refusal(folder: Path) -> str:
    """Return why the fork servers of this folder cannot be trusted, or ""."""
    try:
        info = folder.lstat()
    except OSError as error:
        return f"{VARIABLE}={folder}: {error.strerror}"
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        return f"{VARIABLE}={folder}: expected a folder of this user with mode 0700"
    return ""


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.with_name(f"{path.name}.log").read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""
