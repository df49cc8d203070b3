"""A process on each host that holds the snapshot parts of the host's ranks, and copies of another host's parts.

    rank ── /proc ──> its part             a memfd of its host's server
    server <── one-sided reads ── another host's server          one copy of that part

A part survives its rank, and its copy survives the host. Bytes of a copy are read through RDMABuffer, as in a weight
sync between hosts; messages carry only heads, digests and where blocks are. Only a copy whose bytes all have those
digests gets its stamp (snapshot_parts.py): a torn one never counts.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.actors.endpoint import fallible, quiet_rdma
from titan_rl.meshes.snapshot_parts import Parts
from titan_rl.wire.snapshot import PartOffer
from titan_rl.wire.weight_source import one_sided

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

BLOCK_SECONDS = 60.0  # limit of one read, in case the loss of its host goes unnoticed


def verb(method: Any) -> Any:
    """Make a concurrent endpoint. An error in it fails its call only."""
    return concurrent_endpoint(fallible(method))


class SnapshotServer(Actor):
    """Serves parts to ranks of this host and to other servers."""

    def __init__(self) -> None:
        self._parts = Parts()
        self._registered: dict[int, tuple[tuple[int, int], list[RDMABuffer]]] = {}  # cut and blocks, by descriptor
        self._backend = ""  # Monarch's backend for one-sided reads, after the first use

    @verb
    async def transport(self) -> str:
        """Return how this server reads parts from others."""
        return await self._prepared()

    @verb
    async def hold(self, mesh: str) -> tuple[int, int]:
        """Return the pid and file descriptor under which the ranks of this host find a new part."""
        return os.getpid(), self._parts.hold(mesh)

    @verb
    async def drop(self, fds: list[int]) -> None:
        self._parts.drop(fds)
        # Pop all before the first await: from then on a descriptor may be a new part's.
        for buffers in [self._registered.pop(fd)[1] for fd in fds if fd in self._registered]:
            await _unregister(buffers)

    @verb
    async def stamped(self, fds: list[int], serial: int, within: float) -> list[bool]:
        return await self._parts.stamped(fds, serial, within)

    @verb
    async def offer(self, fd: int, serial: int) -> PartOffer:
        """Return the digests of a part with this stamp, and its blocks, registered for one-sided reads."""
        await self._prepared()
        manifest = await self._parts.offer(fd, serial)
        return PartOffer(manifest, tuple(await self._blocks(fd)))

    @verb
    async def fetch(self, fd: int, serial: int, source: Any, source_fd: int, seconds: float, rate: float) -> int:
        """Copy a part of the server `source` into a part of this one within `seconds`, at most `rate` bytes a second
        over all copies; return the number of bytes."""
        from monarch.rdma import RDMAAction

        part, ends = self._parts.part(fd), time.monotonic() + seconds  # `fd` may be another part's after a wait
        await self._prepared()
        offer: PartOffer = await asyncio.wait_for(source.offer.call_one(source_fd, serial).as_asyncio(), seconds)

        async def read(number: int, block: memoryview) -> None:
            limit = min(BLOCK_SECONDS, max(1.0, ends - time.monotonic()))
            await RDMAAction().read_remote(block, offer.blocks[number]).submit(timeout=math.ceil(limit))

        return await self._parts.fetch(part, offer.manifest, read, rate)

    async def _prepared(self) -> str:
        """Make Monarch start one-sided reads in this process, which it does at their first use, with messages."""
        if not self._backend:
            with quiet_rdma():
                from monarch.rdma import RDMABuffer

                buffer = RDMABuffer(memoryview(bytearray(1)))
            self._backend = buffer.backend
            await buffer.drop()
        return one_sided(self._backend)

    async def _blocks(self, fd: int) -> "list[RDMABuffer]":
        """Return the blocks of a part, which are registered once per mapping."""
        from monarch.rdma import RDMABuffer

        part = self._parts.part(fd)
        cut, buffers = self._registered.get(fd, ((0, 0), []))
        if cut != part.cut:
            new = [RDMABuffer(block) for block in part.blocks]
            self._registered[fd] = part.cut, new
            await _unregister(buffers)
            return new
        return buffers


async def _unregister(buffers: "Sequence[RDMABuffer]") -> None:
    """Make blocks unreachable. A read in progress fails."""
    for buffer in buffers:
        await buffer.drop()
