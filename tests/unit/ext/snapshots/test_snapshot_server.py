"""Copies of parts between two servers in one process: their bytes, and when a copy has its stamp."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from titan_rl.ext.snapshots.snapshot_parts import HEAD, WRITING, head
from titan_rl.ext.snapshots.snapshot_server import IN_FLIGHT, Parts, ReadRate

BLOCK = 1000  # bytes
STATE = os.urandom(10 * BLOCK)


@dataclass
class Pair:
    """A part, and memory for its copy at another server."""

    source: Parts = field(default_factory=lambda: Parts(BLOCK))
    peer: Parts = field(default_factory=lambda: Parts(BLOCK))
    reads: list[int] = field(default_factory=list)  # numbers of blocks
    meanwhile: Callable[[int], Awaitable[None]] | None = None  # awaited before each read

    def __post_init__(self) -> None:
        self.part, self.copy = self.source.hold("trainer"), self.peer.hold("trainer")

    def write(self, serial: int, state: bytes) -> None:
        """Write the part as a rank does."""
        os.pwrite(self.part, HEAD.pack(WRITING, 0, 0), 0)
        os.pwrite(self.part, state, HEAD.size)
        os.pwrite(self.part, HEAD.pack(serial, HEAD.size, HEAD.size + len(state)), 0)

    async def fetch(self, serial: int) -> int:
        async def read(number: int, block: memoryview) -> None:
            self.reads.append(number)
            if self.meanwhile is not None:
                await self.meanwhile(number)
            block[:] = self.source.part(self.part).blocks[number]

        self.reads.clear()
        return await self.peer.fetch(self.peer.part(self.copy), await self.source.offer(self.part, serial), read)

    async def fetch_anew(self, serial: int) -> int:
        """Fetch undisturbed into a new part."""
        self.meanwhile, self.copy = None, self.peer.hold("trainer")
        return await self.fetch(serial)

    def copied(self, serial: int) -> bytes:
        found, start, end = head(self.copy)
        assert found == serial
        return os.pread(self.copy, end - start, start)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for parts in (made.source, made.peer):
        parts.drop(list(parts._parts))


async def test_a_copy_equals_its_part_also_when_that_grows_or_shrinks(pair: Pair) -> None:
    longer = STATE + os.urandom(5000)  # in more pages
    for serial, state, pages in ((3, STATE, 3), (4, longer, 4), (5, STATE, 4)):  # memory never shrinks
        pair.write(serial, state)
        assert await pair.fetch(serial) == pages * 4096 - HEAD.size, "whole pages"
        assert pair.copied(serial) == state


async def test_a_copy_is_offered_in_its_turn(pair: Pair) -> None:
    """Its host's server is gone: a third one fetches the copy."""
    pair.write(3, STATE)
    await pair.fetch(3)
    assert await pair.peer.offer(pair.copy, 3) == await pair.source.offer(pair.part, 3)


@pytest.mark.parametrize("harm", ["bytes", "a later snapshot"])
async def test_a_copy_of_a_part_that_changes_meanwhile_has_no_stamp(pair: Pair, harm: str) -> None:
    async def change(number: int) -> None:
        if number == 3 and harm == "bytes":
            os.pwrite(pair.part, b"changed", 5500)
        elif number == 3:
            pair.write(5, os.urandom(len(STATE)))

    pair.write(3, STATE)
    await pair.fetch(3)
    pair.write(4, STATE[::-1])
    pair.meanwhile = change
    with pytest.raises(RuntimeError, match="of 13 of snapshot 4 with the digest"):
        await pair.fetch(4)
    assert await pair.peer.stamped([pair.copy], 3, 0.0) == [False]
    assert await pair.peer.stamped([pair.copy], 4, 0.0) == [False]


async def test_a_part_without_the_stamp_is_not_offered(pair: Pair) -> None:
    pair.write(4, STATE)
    with pytest.raises(RuntimeError, match="expected snapshot 3, found the stamp 4"):
        await pair.source.offer(pair.part, 3)
    os.pwrite(pair.part, HEAD.pack(WRITING, 0, 0), 0)
    with pytest.raises(RuntimeError, match="expected snapshot 3, found the stamp 0"):
        await pair.source.offer(pair.part, 3)


async def test_a_read_that_fails_ends_the_copy_and_its_other_reads(pair: Pair) -> None:
    async def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("the link is down")
        await asyncio.Event().wait()

    pair.write(3, STATE)
    pair.meanwhile = fail
    with pytest.raises(RuntimeError, match="the link is down"):
        await pair.fetch(3)
    assert len(pair.reads) <= IN_FLIGHT
    await pair.fetch_anew(3)
    assert pair.copied(3) == STATE


async def test_a_copy_that_is_dropped_ends_and_leaves_its_reads_to_others(pair: Pair) -> None:
    """The loss of its host is not known yet: its reads would take until their deadline."""
    stuck = asyncio.Event()

    async def hang(_: int) -> None:
        if len(pair.reads) == IN_FLIGHT:
            stuck.set()
        await asyncio.Event().wait()

    pair.write(3, STATE)
    pair.meanwhile = hang
    fetching = asyncio.create_task(pair.fetch(3))
    await stuck.wait()
    pair.peer.drop([pair.copy])
    with pytest.raises(RuntimeError, match="found that it was dropped"):
        await fetching
    await pair.fetch_anew(3)
    assert pair.copied(3) == STATE


async def test_a_descriptor_that_is_used_again_is_another_part(pair: Pair) -> None:
    """Its source answered late, after it had been dropped."""

    async def read(_: int, block: memoryview) -> None:
        raise AssertionError

    pair.write(3, STATE)
    manifest, late = await pair.source.offer(pair.part, 3), pair.peer.part(pair.copy)
    pair.peer.drop([pair.copy])
    assert pair.peer.hold("trainer") == pair.copy
    await pair.fetch(3)
    with pytest.raises(RuntimeError, match="found that it was dropped"):
        await pair.peer.fetch(late, manifest, read)
    assert pair.copied(3) == STATE


async def test_a_part_is_the_copy_of_one_at_a_time(pair: Pair) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def wait(_: int) -> None:
        begun.set()
        await go.wait()

    pair.write(3, STATE)
    pair.meanwhile = wait
    fetching = asyncio.create_task(pair.fetch(3))
    await begun.wait()
    with pytest.raises(RuntimeError, match="expected one copy at a time"):
        await pair.fetch(3)
    go.set()
    await fetching
    assert pair.copied(3) == STATE


def test_reads_begin_at_their_rate_whichever_copy_they_are_of() -> None:
    rate = ReadRate()
    assert [rate.wait(10.0, 500, 1000.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert rate.wait(10.25, 250, 1000.0) == 1.25
    assert rate.wait(20.0, 250, 1000.0) == 0.0, "unused time gives no credit"
    assert rate.wait(20.0, 10**12, 0.0) == 0.0
