"""How ranks start: cold, each imports its engine itself; or as the part "fork servers" starts them.

    run.py, a worker ── Servers.keep: before everything else    spawn.py ── launcher: the program of each rank

Importing this module imports next to nothing, because fork servers start before everything else.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

from titan_rl.environment import TRACKER_KEYS
from titan_rl.wire.parts import part

Kind = Literal["model", "generator"]
KINDS: tuple[Kind, ...] = ("model", "generator")
NVIDIA = Path("/proc/driver/nvidia")  # exists where NVIDIA's driver is installed
LAUNCHER = str(Path(__file__).with_name("rank_launcher.py"))
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


class Servers:
    """What ranks are started from: nothing, they start cold."""

    def keep(self, kinds: Collection[Kind]) -> None:
        """Have what ranks of these kinds are started from, and no more."""


class Starter:
    """Starts every rank cold."""

    def __init__(self) -> None:
        self.warn: Callable[[str], None] = lambda text: print(f"warning: {text}", file=sys.stderr)

    @property
    def folder(self) -> str:
        """Return the folder of what ranks of this host are started from, or "" if they start cold."""
        return ""

    def serving(self, folder: Path) -> AbstractContextManager[Servers]:
        """Have servers of this process, none at first, and end them. Their sockets are in `folder`."""
        return nullcontext(Servers())

    async def launcher(self, kind: Kind | None, folder: str | None = None) -> tuple[str, Mapping[str, str]]:
        """Return the program that launches a rank, and its variables, once ranks of this kind can start. `folder`: the
        starter's on the rank's host, if that is another one."""
        return LAUNCHER, {}

    def warn_cold(self, kind: str, reason: str) -> None:
        """Warn once that ranks of this kind start cold."""


@cache
def starter() -> Starter:
    """Return how this process starts ranks."""
    return (part("fork servers") or Starter)()
