"""The parts of snapshots that a keeper holds: their memory, the digests of what it holds, and copies of other parts.

    part     [ head | block | block | ... ]        the head begins with the part's stamp
    offer    a whole part's digests, block by block
    fetch    a copy: WRITING, the blocks that the memory lacks, each compared with its digest, then the head

A block that does not have its digest ends the copy, so a part that changes meanwhile is never taken for whole. A copy
that failed leaves no stamp, and its memory must not be used again: blocks that it asked for may still arrive.
"""

import asyncio
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from titan_rl.wire.snapshot import HEAD, WRITING, PartManifest, head

T = TypeVar("T")

BLOCK = 8 << 20  # bytes of one read: 4 to 8 MB measured best over Monarch's TCP fallback
IN_FLIGHT = 4  # reads of a keeper at a time, over all copies: what bounds the memory of Monarch's messages
LOOK_SECONDS = 0.005  # between two looks at a stamp

Read = Callable[[int, memoryview], Awaitable[None]]  # of a block's number, and where its bytes belong


@dataclass(eq=False, slots=True)
class KeptPart:
    """The memory of one part."""

    fd: int
    cut: tuple[int, int] = (0, 0)  # bytes that are mapped, and bytes of a block
    blocks: Sequence[memoryview] = ()  # of what is mapped
    manifest: PartManifest | None = None  # of what the memory held when it had this stamp
    copying: "asyncio.Future[None] | None" = None

    @property
    def known(self) -> PartManifest | None:
        """Return the manifest of what the memory holds now; None if that is unknown."""
        return self.manifest if self.manifest and head(self.fd)[0] == self.manifest.serial else None

    def map(self, nbytes: int, block_bytes: int) -> bool:
        """Map the memory, which has at least `nbytes` from now on. Return True if it was mapped otherwise."""
        if self.cut == (nbytes, block_bytes):
            return False
        if os.fstat(self.fd).st_size < nbytes:  # never less: a late read or an earlier mapping may touch the rest
            os.ftruncate(self.fd, nbytes)
        whole = memoryview(mmap.mmap(self.fd, nbytes))
        # A read in progress, or a registration, keeps the earlier mapping as long as it needs it.
        self.blocks = [whole[at : at + block_bytes] for at in range(HEAD.size, nbytes, block_bytes)]
        self.cut = nbytes, block_bytes
        return True


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


class KeptParts:
    """The parts that this process holds, by file descriptor."""

    def __init__(self, block_bytes: int = BLOCK) -> None:
        self._block_bytes = block_bytes
        self._parts: dict[int, KeptPart] = {}
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._rate = ReadRate()

    def hold(self, mesh: str) -> int:
        """Return a new part, without memory until it is written."""
        fd = os.memfd_create(f"titan_rl snapshot of {mesh}")
        self._parts[fd] = KeptPart(fd)
        return fd

    def drop(self, fds: Sequence[int]) -> None:
        """Close parts, and end copies into them. Their memory is freed when the last that has mapped it unmaps it."""
        for fd in fds:
            part = self._parts.pop(fd)
            if part.copying is not None:
                part.copying.cancel()
            os.close(fd)

    async def stamped(self, fds: Sequence[int], serial: int, within: float) -> list[bool]:
        """Wait at most `within` seconds until all parts have the stamp. Return which ones have it."""
        deadline = time.monotonic() + within
        while not all(found := [head(fd)[0] == serial for fd in fds]) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        return found

    def part(self, fd: int) -> KeptPart:
        if (part := self._parts.get(fd)) is None:
            raise RuntimeError(f"expected a part of a snapshot under {fd}, found that it was dropped")
        return part

    async def offer(self, fd: int, serial: int) -> PartManifest:
        """Return the manifest of a part with this stamp. Its blocks are mapped from then on."""
        part = self.part(fd)
        found, start, end = head(fd)
        if found != serial:
            raise RuntimeError(f"expected snapshot {serial}, found the stamp {found}")
        nbytes = -(-max(end, os.fstat(fd).st_size) // mmap.PAGESIZE) * mmap.PAGESIZE
        part.map(nbytes, self._block_bytes)
        if (known := part.known) is not None and known.cut == part.cut:
            return known
        digests = await asyncio.to_thread(_digests, part.blocks)  # hashing releases the GIL
        self.check(part)
        if (found := head(fd)[0]) != serial:
            raise RuntimeError(f"expected snapshot {serial} until it was hashed, found the stamp {found}")
        part.manifest = PartManifest(serial, start, end, nbytes, self._block_bytes, digests)
        return part.manifest

    async def fetch(self, part: KeptPart, manifest: PartManifest, read: Read, rate: float = 0.0) -> int:
        """Make a part the copy of another one, whose blocks `read` reads, at most `rate` bytes a second over all
        copies; 0: no bound. Return the bytes that were read: of blocks that the memory lacked."""
        self.check(part)
        if part.copying is not None:
            raise RuntimeError(f"expected one copy at a time into the part under {part.fd}, found another in progress")
        known, part.manifest = part.known, None
        os.pwrite(part.fd, HEAD.pack(WRITING, 0, 0), 0)
        if part.map(*manifest.cut) or known is None or known.cut != manifest.cut:
            lacking = list(range(len(manifest.digests)))
        else:
            pairs = zip(known.digests, manifest.digests, strict=True)
            lacking = [number for number, (old, new) in enumerate(pairs) if old != new]
        part.copying = asyncio.ensure_future(self._copy(part, manifest, lacking, read, rate))
        try:
            await part.copying
        except asyncio.CancelledError:
            self.check(part)
            raise  # the caller was cancelled
        finally:
            part.copying = None
        self.check(part)
        os.pwrite(part.fd, manifest.head, 0)
        part.manifest = manifest
        return sum(len(part.blocks[number]) for number in lacking)

    def check(self, part: KeptPart) -> None:
        """Raise if a part was dropped: its descriptor may be another one's by now."""
        if self._parts.get(part.fd) is not part:
            raise RuntimeError("expected a part of a snapshot until it was whole, found that it was dropped")

    async def _copy(
        self, part: KeptPart, manifest: PartManifest, lacking: Sequence[int], read: Read, rate: float
    ) -> None:
        """Read and compare the blocks that are lacking; the first failure ends the reads of the others."""
        numbers = iter(lacking)

        async def some() -> None:
            for number in numbers:
                block = part.blocks[number]
                async with self._in_flight:
                    await asyncio.sleep(self._rate.wait(time.monotonic(), len(block), rate))
                    await read(number, block)
                if await asyncio.to_thread(_digest, block) != manifest.digests[number]:
                    raise RuntimeError(
                        f"expected block {number} of {len(manifest.digests)} of snapshot {manifest.serial} with the "
                        "digest of its manifest, found another one: the part has changed, or was damaged on its way"
                    )

        await together(some() for _ in range(min(IN_FLIGHT, len(lacking))))


def _digest(block: memoryview) -> bytes:
    return xxhash.xxh3_128(block).digest()


def _digests(blocks: Sequence[memoryview]) -> tuple[bytes, ...]:
    return tuple(_digest(block) for block in blocks)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what the calls return. The first error of one ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def ended(calls: Iterable[Awaitable[object]]) -> None:
    """Return when all calls have ended; then raise the first error of one."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
