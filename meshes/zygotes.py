"""The zygotes that ranks of this process are forked from: started here, or found where another process keeps them.

TITAN_RL_ZYGOTES    unset: a run on CPU starts its own, which end with it
                    FOLDER: those of another process (the pytest session); FOLDER must be the user's own, mode 0700
                    "off": every rank starts cold, that is, it imports its engine itself

Importing this module imports no Monarch: zygotes start before everything else.
"""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import ENV

Kind = Literal["model", "generator"]
KINDS: tuple[Kind, ...] = ("model", "generator")

VARIABLE, OFF = "TITAN_RL_ZYGOTES", "off"
READY_SECONDS = 60.0  # to import an engine on a busy machine; a cold start takes as long there
ROOM = 16 << 10  # bytes added to a zygote's environment, so that a rank's own environment fits in its place
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # processes share the cores; two OpenMP teams that spin on them are extremely slow
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run never downloads
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Launch environment of every rank."""
KIND_ENV: dict[Kind, dict[str, str]] = {"model": {}, "generator": {**ENV, **vllm_cpu.ENV}}

_ready: dict[Path, bool] = {}  # whether the zygote of a socket has answered
_warned: set[tuple[str, str]] = set()


def warn(text: str) -> None:
    """Print why ranks start cold. A run replaces it by its terminal's."""
    print(f"warning: {text}", file=sys.stderr)


def warn_cold(kind: str, why: str) -> None:
    """Warn once that ranks of this kind start cold."""
    if (kind, why) not in _warned:
        _warned.add((kind, why))
        warn(f"the {kind} zygote forks no rank: {why}; {kind} ranks start cold, which takes seconds more")


@contextmanager
def serving(folder: Path, kinds: Iterable[Kind] = KINDS, *, threads: int = 1) -> Iterator[None]:
    """Keep a zygote per kind with its socket in `folder`, unless the environment names others or turns them off."""
    if os.environ.get(VARIABLE):
        yield
        return
    started: list[subprocess.Popen[bytes]] = []
    try:
        for kind in kinds:
            with suppress(OSError):  # the path is too long for a socket, say: `find` warns
                started.append(_start(kind, folder, threads))
        os.environ[VARIABLE] = str(folder)
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _start(kind: Kind, folder: Path, threads: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, **WORKER_ENV, **KIND_ENV[kind], "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / kind))
        listener.listen(64)
        program = str(Path(__file__).with_name("zygote.py"))
        with open(folder / f"{kind}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", program, kind, str(listener.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                process_group=0,  # Ctrl-C in the terminal reaches the controller only
                env={**env, "TITAN_RL_ROOM": "x" * ROOM},
            )


async def find(kind: Kind) -> str:
    """Return the socket of the zygote that forks this kind of rank, once it is ready. "": ranks start cold."""
    folder = os.environ.get(VARIABLE, OFF)
    if folder == OFF:
        return ""
    path = Path(folder) / kind
    if path not in _ready:
        why = _refusal(Path(folder))
        try:
            if not why:
                async with asyncio.timeout(READY_SECONDS):
                    await _hear_ready(path)
        except TimeoutError:
            why = f"it was not ready within {READY_SECONDS:g} s"
        except OSError as error:
            why = f"it cannot be reached ({error.strerror or error}){_last_line(path)}"
        _ready[path] = not why
        if why:
            warn_cold(kind, why)
    return str(path) if _ready[path] else ""


def _refusal(folder: Path) -> str:
    """Return why the zygotes of this folder cannot be trusted, or ""."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{VARIABLE}={folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return f"{VARIABLE}={folder}: expected a folder of this user with mode 0700"
    return ""


async def _hear_ready(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"\0\0")
        if await reader.readline() != b"ready\n":
            raise OSError("it has ended")
    finally:
        writer.close()


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.with_name(f"{path.name}.log").read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""
