"""The zygotes that ranks of this process are forked from: started here, or found where another process keeps them.

TITAN_RL_ZYGOTES    unset: a run on CPU starts its own, which end with it
                    FOLDER: those of another process (the pytest session); FOLDER must be the user's own, mode 0700
                    "off": every rank starts cold, that is, it imports its engine itself

Importing this module imports next to nothing: zygotes start before everything else.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV

Kind = Literal["model", "generator"]
KINDS: tuple[Kind, ...] = ("model", "generator")

VARIABLE, OFF = "TITAN_RL_ZYGOTES", "off"
ROOM = 16 << 10  # bytes added to a zygote's environment, so that a rank's own environment fits in its place
GRACE_SECONDS = 0.2  # for a root to end after its zygotes; one that still imports does not listen
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # unless hosts.threads gives a mesh more
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores of other ranks
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
        self._roots: dict[Kind, subprocess.Popen[bytes]] = {}  # what each is forked from

    def keep(self, kinds: Collection[Kind]) -> None:
        """Have a zygote of each of these kinds and no other."""
        for kind in list(self._roots):
            if kind not in kinds:
                self._end(kind)
        missing: list[Kind] = [kind for kind in kinds if kind not in self._roots]
        if missing and self._own:
            with suppress(OSError):  # the path is too long for a socket, say: ranks start cold, with a warning
                self._roots |= dict.fromkeys(missing, _start(missing, self._folder))
        if self._own:
            os.environ[VARIABLE] = str(self._folder) if kinds else OFF

    def _end(self, kind: Kind) -> None:
        root = self._roots.pop(kind)
        (self._folder / kind).unlink(missing_ok=True)
        if root in self._roots.values():
            _tell(root, kind)
            return
        assert root.stdin
        root.stdin.close()
        try:
            root.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            root.kill()  # the kernel ends its zygotes, if it has any yet
            root.wait()

    def end_all(self) -> None:
        for kind in list(self._roots):
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


def _start(kinds: Collection[Kind], folder: Path) -> subprocess.Popen[bytes]:
    """Start zygotes of these kinds, and return the process that they are forked from."""
    common = {**os.environ, **WORKER_ENV, "CUDA_VISIBLE_DEVICES": "", "TITAN_RL_ROOM": "x" * ROOM}
    by_kind = {name for own in KIND_ENV.values() for name in own}
    with ExitStack() as stack:
        zygotes = dict[str, dict[str, Any]]()
        for kind in kinds:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / kind))
            listener.listen(64)
            log = stack.enter_context(open(folder / f"{kind}.log", "wb"))
            own = {name: value for name, value in {**common, **KIND_ENV[kind]}.items() if name in by_kind}
            zygotes[kind] = {"listener": listener.fileno(), "log": log.fileno(), "environment": own}
        log = stack.enter_context(open(folder / "root.log", "ab"))
        program = str(Path(__file__).with_name("zygote_root.py"))
        root = subprocess.Popen(
            [sys.executable, "-P", program, str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=log,
            stderr=log,
            pass_fds=[each[fd] for each in zygotes.values() for fd in ("listener", "log")],
            process_group=0,  # Ctrl-C in the terminal reaches the controller only
            env={name: value for name, value in common.items() if name not in by_kind},
        )
    _tell(root, json.dumps(zygotes))
    return root


def _tell(root: subprocess.Popen[bytes], line: str) -> None:
    assert root.stdin
    with suppress(OSError):  # it has ended, and its zygotes with it
        root.stdin.write(f"{line}\n".encode())
