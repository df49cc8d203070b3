"""A process on each host that holds the snapshot parts of the host's ranks, and copies of another host's parts.

    rank ── /proc ──> its part             a memfd of its host's server
    server <── one-sided reads ── another host's server          one copy of that part

    part     [ head | block | block | ... ]        the head begins with the part's stamp
    offer    the digests of a whole part, block by block
    fetch    stamp WRITING, read each block and compare its digest, then write the head

A part survives its rank, and its copy survives the host. Bytes of a copy are read through RDMABuffer, as in a weight
sync between hosts; messages carry only heads, digests and where blocks are. A block with another digest ends the copy,
so a part that changes meanwhile never counts as whole. A failed copy leaves no stamp. Its memory must not be used
again: blocks that were requested may still arrive.
"""

import asyncio
import math
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash
from monarch.actor import Actor, concurrent_endpoint

from titan_rl.actors.endpoint import fallible, quiet_rdma
from titan_rl.ext.snapshots.snapshot_parts import HEAD, WRITING, PartManifest, PartOffer, head
from titan_rl.wire.weight_source import one_sided

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

T = TypeVar("T")

BLOCK_SECONDS = 60.0  # limit of one read, in case the loss of its host goes unnoticed
BLOCK = 8 << 20  # bytes of one read: 4 to 8 MB measured best over Monarch's TCP fallback
IN_FLIGHT = 4  # concurrent reads of a process, over all copies: bounds the memory of Monarch's messages
POLL_SECONDS = 0.005  # interval at which stamps are checked

Read = Callable[[int, memoryview], Awaitable[None]]  # (block number, destination)


@dataclass(eq=False, slots=True)
class Part:
    """The memory of one part."""

    fd: int
    cut: tuple[int, int] = (0, 0)  # (mapped bytes, bytes per block)
    blocks: Sequence[memoryview] = ()  # the mapped bytes
    copying: "asyncio.Future[None] | None" = None

    def map(self, nbytes: int, block_bytes: int) -> None:
        """Map the memory, and grow it to at least `nbytes`."""
        if self.cut == (nbytes, block_bytes):
            return
        if os.fstat(self.fd).st_size < nbytes:  # never shrink: a late read or an earlier mapping may touch the rest
            os.ftruncate(self.fd, nbytes)
        whole = memoryview(mmap.mmap(self.fd, nbytes))
        # A read in progress, or a registration, keeps the earlier mapping as long as it needs it.
        self.blocks = [whole[at : at + block_bytes] for at in range(HEAD.size, nbytes, block_bytes)]
        self.cut = nbytes, block_bytes


class ReadRate:
    """Bounds how many bytes a second all copies to this process begin to read."""

    def __init__(self) -> None:
        self._free = 0.0  # when the next read may begin

    def wait(self, now: float, nbytes: int, rate: float) -> float:
        """Return the seconds after `now` at which a read of `nbytes` may begin. `rate`: bytes a second; 0: no bound."""
        if not rate:
            return 0.0
        begin = max(now, self._free)
        self._free = begin + nbytes / rate
        return begin - now


class Parts:
    """The parts in this process's memory, by file descriptor."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self._block_bytes = block_bytes
        self._parts: dict[int, Part] = {}
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._rate = ReadRate()

    def hold(self, mesh: str) -> int:
        """Return the descriptor of a new part, which has no memory until it is written."""
        fd = os.memfd_create(f"titan_rl snapshot of {mesh}")
        self._parts[fd] = Part(fd)
        return fd

    def drop(self, fds: Sequence[int]) -> None:
        """Close parts, and end copies into them. Memory is freed when the last process unmaps it."""
        for fd in fds:
            part = self._parts.pop(fd)
            if part.copying is not None:
                part.copying.cancel()
            os.close(fd)

    async def stamped(self, fds: Sequence[int], serial: int, within: float) -> list[bool]:
        """Wait at most `within` seconds until all parts have the stamp. Return whether each has it."""
        deadline = time.monotonic() + within
        while not all(stamps := [head(fd)[0] == serial for fd in fds]) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return stamps

    def part(self, fd: int) -> Part:
        if (part := self._parts.get(fd)) is None:
            raise RuntimeError(f"expected a part of a snapshot under {fd}, found that it was dropped")
        return part

    async def offer(self, fd: int, serial: int) -> PartManifest:
        """Return the manifest of a part with this stamp. Its blocks are mapped from then on."""
        part = self.part(fd)
        stamp, start, end = head(fd)
        if stamp != serial:
            raise RuntimeError(f"expected snapshot {serial}, found the stamp {stamp}")
        nbytes = -(-max(end, os.fstat(fd).st_size) // mmap.PAGESIZE) * mmap.PAGESIZE
        part.map(nbytes, self._block_bytes)
        digests = await asyncio.to_thread(_digests, part.blocks)  # hashing releases the GIL
        self.check(part)
        if (stamp := head(fd)[0]) != serial:
            raise RuntimeError(f"expected snapshot {serial} until it was hashed, found the stamp {stamp}")
        return PartManifest(serial, start, end, nbytes, self._block_bytes, digests)

    async def fetch(self, part: Part, manifest: PartManifest, read: Read, rate: float = 0.0) -> int:
        """Make a part the copy of another one, whose blocks `read` reads, at most `rate` bytes a second over all
        copies; 0: no bound. Return the number of bytes."""
        self.check(part)
        if part.copying is not None:
            raise RuntimeError(f"expected one copy at a time into the part under {part.fd}, found another in progress")
        os.pwrite(part.fd, HEAD.pack(WRITING, 0, 0), 0)
        part.map(*manifest.cut)
        part.copying = asyncio.ensure_future(self._copy(part, manifest, read, rate))
        try:
            await part.copying
        except asyncio.CancelledError:
            self.check(part)
            raise  # the caller was cancelled
        finally:
            part.copying = None
        self.check(part)
        os.pwrite(part.fd, manifest.head, 0)
        return sum(map(len, part.blocks))

    def check(self, part: Part) -> None:
        """Raise if a part was dropped: its descriptor may belong to another part by now."""
        if self._parts.get(part.fd) is not part:
            raise RuntimeError("expected a part of a snapshot until it was whole, found that it was dropped")

    async def _copy(self, part: Part, manifest: PartManifest, read: Read, rate: float) -> None:
        """Read and compare all blocks; the first failure ends the other reads."""
        blocks = iter(list(enumerate(part.blocks)))

        async def read_blocks() -> None:
            for number, block in blocks:
                async with self._in_flight:
                    await asyncio.sleep(self._rate.wait(time.monotonic(), len(block), rate))
                    await read(number, block)
                if await asyncio.to_thread(_digest, block) != manifest.digests[number]:
                    raise RuntimeError(
                        f"expected block {number} of {len(manifest.digests)} of snapshot {manifest.serial} with the "
                        "digest of its manifest, found another one: the part has changed, or was damaged on its way"
                    )

        await together(read_blocks() for _ in range(IN_FLIGHT))


def _digest(block: memoryview) -> bytes:
    return xxhash.xxh3_128(block).digest()


def _digests(blocks: Sequence[memoryview]) -> tuple[bytes, ...]:
    return tuple(map(_digest, blocks))


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


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
