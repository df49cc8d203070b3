"""A process of the run on each host that holds parts of snapshots: those of the host's own ranks, and copies of a
peer's.

    rank ── /proc ──> its part             a memfd of the keeper of its host
    keeper <── one-sided reads ── a peer's keeper          one copy of that part on another host

A part outlives its rank, because the keeper holds it; its copy outlives the host. The bytes of a copy go as those of a
weight sync between hosts do, by RDMABuffer. Messages have only the part's head, its digests, and where its blocks are.
A copy gets its stamp when all of its bytes are there and have those digests (kept_parts.py): a torn one never counts.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.actors.endpoint import fallible, quiet_rdma
from titan_rl.meshes.kept_parts import KeptParts
from titan_rl.wire.snapshot import PartOffer
from titan_rl.wire.weight_source import one_sided

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

BLOCK_SECONDS = 60.0  # at most, for one read: of a host that is gone, and that no one has noticed


def verb(method: Any) -> Any:
    """Make an endpoint of a method that runs next to others. If it fails, so does its call, and nothing else."""
    return concurrent_endpoint(fallible(method))


class Keeper(Actor):
    """The parts as an actor: what another process asks of them."""

    def __init__(self) -> None:
        self._parts = KeptParts()
        self._registered: dict[int, tuple[tuple[int, int], list[RDMABuffer]]] = {}  # by descriptor: cut and blocks
        self._backend = ""  # of one-sided reads, once this process has used it

    @verb
    async def transport(self) -> str:
        """Return how this keeper reads the parts of others."""
        return await self._prepared()

    @verb
    async def hold(self, mesh: str) -> tuple[int, int]:
        """Return under which pid and file descriptor the ranks of this host find a new part."""
        return os.getpid(), self._parts.hold(mesh)

    @verb
    async def drop(self, fds: list[int]) -> None:
        self._parts.drop(fds)
        # At once: from here on a descriptor may be that of a new part.
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
        """Copy a part of the keeper `source` into a part of this one within `seconds`, at most `rate` bytes a second
        over all copies; return the bytes that were read."""
        from monarch.rdma import RDMAAction

        part, ends = self._parts.part(fd), time.monotonic() + seconds  # `fd` may be another part's after a wait
        await self._prepared()
        offer: PartOffer = await asyncio.wait_for(source.offer.call_one(source_fd, serial).as_asyncio(), seconds)

        async def read(number: int, block: memoryview) -> None:
            left = min(BLOCK_SECONDS, max(1.0, ends - time.monotonic()))
            await RDMAAction().read_remote(block, offer.blocks[number]).submit(timeout=math.ceil(left))

        return await self._parts.fetch(part, offer.manifest, read, rate)

    async def _prepared(self) -> str:
        """Let Monarch start one-sided reads in this process, which it does at their first use, and not in silence."""
        if not self._backend:
            with quiet_rdma():
                from monarch.rdma import RDMABuffer

                buffer = RDMABuffer(memoryview(bytearray(1)))
            self._backend = buffer.backend
            await buffer.drop()
        return one_sided(self._backend)

    async def _blocks(self, fd: int) -> "list[RDMABuffer]":
        """Return the blocks of a part, registered. Those of each part are registered once."""
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
    """Make blocks unreachable. A read of one that is in progress fails."""
    for buffer in buffers:
        await buffer.drop()
