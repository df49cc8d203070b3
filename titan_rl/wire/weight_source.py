"""Where a reader finds the bytes that a trainer rank packs for it.

An offer goes from its trainer rank to the controller, which adds the plan's part and sends the source to the reader.
The controller must not import torch for it: that would take it 1.2 CPU seconds while every mesh waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titan_rl.config.choices import BYTES
from titan_rl.wire.weight_plan import Copy

SLOTS = 2
"""Slots of staging memory: a version is packed into one while the other is read."""

HashKind = Literal["xxh3", "splitmix"]
"""Kind of a block's checksum: "xxh3" of bytes on a host, "splitmix" of bytes that a GPU reads
(kernels/block_hash.py)."""


FORCES_LINKS = ("rdma", "broadcast")
"""Values of weight_sync.transport by which processes of one machine exchange weights as if they were on several."""


def one_sided(backend: str) -> str:
    """Return the name of one-sided reads through this backend of Monarch's."""
    return f"RDMABuffer ({'TCP fallback' if backend == 'tcp' else backend})"


@dataclass(frozen=True, slots=True)
class Offer:
    """Where one reader finds its run."""

    place: str  # here(), at the trainer rank
    pid: int
    fd: int
    size: int  # bytes of the whole memory
    starts: tuple[int, ...]  # by slot: the run's first byte
    nbytes: int  # size of the run
    layout: int  # hash of the run's layout, see manifest.layout()
    link: Any  # from a link's trainer half to its reader half; None: no reader is remote
    kind: HashKind = "xxh3"  # kind of checksums in its manifests; `layout` covers it


@dataclass(frozen=True, slots=True)
class Source:
    """A trainer rank's offer to one reader, and the order of its contents."""

    trainer_rank: int
    offer: Offer
    copies: tuple[Copy, ...]
    dtype: str
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(copy.elements for copy in self.copies) * BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Memory of a reader with the bytes of remote reads, which readers of other replicas on the host map."""

    place: str  # transport.here(), at the reader
    pid: int
    fd: int
    inode: int  # the memory's, equal for all that share it

    @property
    def memory(self) -> tuple[str, int]:
        return self.place, self.inode


@dataclass(frozen=True, slots=True)
class Connection:
    """How a reader gets its weights."""

    transports: list[str]  # by source
    copy: HostCopy | None  # None: it maps the memory of every source
    senders: tuple[int, ...] = ()  # trainer ranks that can send to it, so that it need not read from them
    relay: Any = None  # its link's offer to readers of other hosts; None: it passes nothing on


@dataclass(frozen=True, slots=True)
class Notes:
    """Messages of the controller to both ends of a link about a publication. Only the link reads them."""

    trainers: Sequence[Any] = ()  # by rank; empty: none
    replicas: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # by name, then by rank


NO_NOTES = Notes()
