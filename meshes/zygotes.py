"""The zygotes that ranks of this process are forked from: started here, or found where another process keeps them.

TITAN_RL_ZYGOTES    unset: a run on CPU starts its own, which end with it
                    FOLDER: those of another process (the pytest session); FOLDER must be the user's own, mode 0700
                    "off": every rank starts cold, that is, it imports its engine itself

Importing this module imports next to nothing: zygotes start before everything else.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from titan_rl.actors import thread_waits
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV

Kind = Literal["model", "generator"]
KINDS: tuple[Kind, ...] = ("model", "generator")

VARIABLE, OFF = "TITAN_RL_ZYGOTES", "off"
ROOM = 16 << 10  # bytes added to a zygote's environment, so that a rank's own environment fits in its place
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # unless hosts.threads gives a mesh more
    **thread_waits.ENV,
    "GLOO_SOCKET_IFNAME": "lo",  # ranks are on one host: no other one reaches them
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run never downloads
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # glibc would return the memory of a forward to the kernel and take it back page by page: 10,000 of them in a
    # generation, and in a training step, of grpo_llama, which is a tenth of its time and more on busy cores.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc accepts
}
"""Launch environment of every rank."""
KIND_ENV: dict[Kind, dict[str, str]] = {"model": {}, "generator": {**ENV, **vllm_cpu.ENV}}

_warned: set[tuple[str, str]] = set()


def warn(text: str) -> None:
    """Print why ranks start cold. A run replaces it by its terminal's."""
    print(f"warning: {text}", file=sys.stderr)


def warn_cold(kind: str, why: str) -> None:
    """Warn once that ranks of this kind start cold."""
    if (kind, why) not in _warned:
        _warned.add((kind, why))
        warn(f"the {kind} zygote forks no rank: {why}; {kind} ranks start cold, which takes seconds more")


class Zygotes:
    """This process's own zygotes, one per kind, with their sockets in `folder`. None if the environment names others or
    turns them off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = not os.environ.get(VARIABLE)
        self._started: dict[Kind, subprocess.Popen[bytes]] = {}

    def keep(self, kinds: Collection[Kind]) -> None:
        """Have a zygote of each of these kinds and no other."""
        for kind in list(self._started):
            if kind not in kinds:
                self._end(kind)
        for kind in kinds if self._own else ():
            if kind not in self._started:
                with suppress(OSError):  # the path is too long for a socket, say: ranks start cold, with a warning
                    self._started[kind] = _start(kind, self._folder)
        if self._own:
            os.environ[VARIABLE] = str(self._folder) if kinds else OFF

    def _end(self, kind: Kind) -> None:
        process = self._started.pop(kind)
        process.kill()
        process.wait()
        (self._folder / kind).unlink(missing_ok=True)

    def end_all(self) -> None:
        for kind in list(self._started):
            self._end(kind)
        if self._own:
            os.environ.pop(VARIABLE, None)


@contextmanager
def serving(folder: Path) -> Iterator[Zygotes]:
    """Yield this process's own zygotes, none at first, and end them."""
    zygotes = Zygotes(folder)
    try:
        yield zygotes
    finally:
        zygotes.end_all()


def _start(kind: Kind, folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, **WORKER_ENV, **KIND_ENV[kind], "CUDA_VISIBLE_DEVICES": ""}
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
