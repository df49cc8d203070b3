"""Parts of snapshots: their stamps, manifests of their copies, and the host of each copy."""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

KEPT = 2  # the newest complete snapshot, and the one being written

WRITING = 0  # serial numbers count from 1
HEAD = struct.Struct("=qqq")  # a part begins with its stamp, and start and end of its data besides tensors


@dataclass(frozen=True, slots=True)
class PartManifest:
    """Contents of a whole part: its head, and the digests of the blocks that follow it."""

    serial: int
    start: int
    end: int
    nbytes: int  # size of the part, at least `end`
    block_bytes: int
    digests: tuple[bytes, ...]  # xxh3, 128 bits

    @property
    def cut(self) -> tuple[int, int]:
        return self.nbytes, self.block_bytes

    @property
    def head(self) -> bytes:
        return HEAD.pack(self.serial, self.start, self.end)


@dataclass(frozen=True, slots=True)
class PartOffer:
    """A whole part that one server offers to another."""

    manifest: PartManifest
    blocks: "tuple[RDMABuffer, ...]"  # registered for one-sided reads


def head(fd: int) -> tuple[int, int, int]:
    """Return a part's stamp, start and end; zeros if nothing was written to it yet."""
    return HEAD.unpack(os.pread(fd, HEAD.size, 0).ljust(HEAD.size, b"\0"))


def peer_of(host: int, machines: Sequence[str]) -> int | None:
    """Return the host that has copies of a host's parts: the next one, in a ring, that is on another machine; or the
    next one, if all are on one machine. `machines`, by host: "" if it is lost. None: no other host is left.

    >>> [peer_of(host, ["a", "b", "c"]) for host in range(3)]
    [1, 2, 0]
    >>> peer_of(0, ["a", "a", "", "b"]), peer_of(0, ["a", "", ""])
    (3, None)
    """
    ring = [(host + distance) % len(machines) for distance in range(1, len(machines))]
    others = [other for other in ring if machines[other]]
    return min(others, key=lambda other: machines[other] == machines[host], default=None)
