"""The hosts of a run: this machine, or hosts that the part "several hosts" joins (titan_rl/ext/hosts).

titan_rl/train/rank_places.py assigns each mesh its place on them.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from monarch.actor import HostMesh, this_host

from titan_rl.actors.endpoint import without_lines
from titan_rl.wire.cores import here


async def ended_at_once() -> None:
    """Return: the ranks of a host on this machine die with its worker."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of a host. The first two must be equal on all hosts, so every version of titan_rl must be able to read
    them."""

    versions: str
    folder: str  # current folder: relative paths of the config start here
    private: str  # folder that only this user can open, until the agent ends
    report: str  # socket to which launchers report
    fork_servers: str  # folder of its starter; empty: ranks start cold
    parent: int  # process of the worker, which starts ranks
    machine: str
    place: str  # equal for processes that can map each other's memory: two containers on one machine cannot
    cores: int
    gpus: list[str]
    address: str  # by which other hosts reach this one
    port: int  # the agent's: the kernel refuses connections once the agent has ended


@dataclass(frozen=True, slots=True)
class Host:
    """Where ranks can be spawned."""

    mesh: HostMesh
    name: str = "this host"
    parent: int = 0  # process that ranks are children of; 0: this one
    facts: HostFacts | None = None  # None: the host has no agent
    lost: Callable[[], bool] = lambda: False  # True: no rank can be spawned there
    silenced: Callable[[], Awaitable[None]] = ended_at_once  # wait until no rank of a lost host runs
    joined: float = field(default_factory=time.monotonic, compare=False)  # when it joined the run

    @property
    def near(self) -> bool:
        """Return True if its ranks can open the files of this process through /proc."""
        return self.facts is None or self.facts.place == here()


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A host for consecutive ranks of a mesh, and the variables that they are launched with: GPUs, for example."""

    host: Host
    ranks: int
    env: Mapping[str, str] = field(default_factory=dict)


def host_of(host: HostMesh | Host) -> Host:
    return host if isinstance(host, Host) else Host(host)


def local_host() -> Host:
    with without_lines(b"Monarch internal logs are being written"):
        return Host(this_host())
