"""A part of a snapshot from one server to another: by messages, by one-sided reads, and by bare reads."""

import asyncio
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.ranks import IMPORTABLE
from bench.rows import Row, in_turn
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import worker_processes
from titan_rl.meshes.snapshot_server import BLOCK, IN_FLIGHT, SnapshotServer, verb
from titan_rl.meshes.spawn import spawn
from titan_rl.wire.snapshot import HEAD

MESSAGE = 16 << 20
SECONDS = 600.0
MESSAGES, ONE_SIDED, BARE = "messages, as before", "one-sided reads", "bare reads, as the floor"


class BenchServer(SnapshotServer):
    """A server that can also copy a part without proof: by messages, or by nothing but reads."""

    @verb
    async def piece(self, fd: int, start: int, size: int) -> bytes:
        return os.pread(fd, size, start)

    @verb
    async def by_messages(self, fd: int, source: Any, source_fd: int, nbytes: int) -> int:
        """Copy as servers did before one-sided reads: the next piece travels while one is written."""

        def asked(start: int) -> Any:
            call = source.piece.call_one(source_fd, start, min(MESSAGE, nbytes - start))
            return asyncio.ensure_future(call.as_asyncio())

        coming = asked(0)
        for start in range(0, nbytes, MESSAGE):
            piece = await coming
            if start + MESSAGE < nbytes:
                coming = asked(start + MESSAGE)
            os.pwrite(fd, piece, start)
        return nbytes

    @verb
    async def prepare_bare(self, fd: int, serial: int, source: Any, source_fd: int) -> None:
        self._offer = await source.offer.call_one(source_fd, serial).as_asyncio()
        self._parts.part(fd).map(*self._offer.manifest.cut)

    @verb
    async def bare(self, fd: int) -> int:
        from monarch.rdma import RDMAAction

        pairs = iter(list(zip(self._offer.blocks, self._parts.part(fd).blocks, strict=True)))

        async def some() -> None:
            for source, block in pairs:
                await RDMAAction().read_remote(block, source).submit(timeout=60)

        await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
        return self._offer.manifest.nbytes


async def copying(megabytes: int, repeats: int) -> list[Row]:
    nbytes, ways = megabytes * 10**6, (MESSAGES, ONE_SIDED, BARE)
    seconds, worked, moved = ({way: list[float]() for way in ways} for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        sockets = Path(folder) / "sockets"
        sockets.mkdir()
        async with worker_processes(2, sockets, Path(folder) / "logs", SECONDS) as hosts:
            source, reader = [
                (await spawn(host, name="snapshots", shape={"number": 1}, first=number, env=IMPORTABLE))
                .spawn("snapshots", BenchServer)  # pyright: ignore[reportArgumentType]
                .slice(number=0)
                for number, host in enumerate(hosts)
            ]
            pid, part = await source.hold.call_one("trainer").as_asyncio()
            copies = {way: (await reader.hold.call_one("trainer").as_asyncio())[1] for way in ways}
            memory = os.open(f"/proc/{pid}/fd/{part}", os.O_RDWR)
            write(memory, 1, nbytes)
            await reader.prepare_bare.call_one(copies[BARE], 1, source, part).as_asyncio()
            for serial, (turn, way) in enumerate(in_turn(ways, 1 + repeats), start=2):
                write(memory, serial, nbytes)
                before, began = cpu_seconds(), time.perf_counter()
                if way == MESSAGES:
                    call = reader.by_messages.call_one(copies[way], source, part, nbytes)
                elif way == BARE:
                    call = reader.bare.call_one(copies[way])
                else:
                    call = reader.fetch.call_one(copies[way], serial, source, part, SECONDS, 0.0)
                arrived = await call.as_asyncio()
                if turn:  # the first round touches pages and opens connections
                    seconds[way].append(time.perf_counter() - began)
                    worked[way].append(cpu_seconds() - before)
                    moved[way].append(arrived / 1e6)
            os.close(memory)
            await deaths.kill(deaths.living())
    row, rows = partial(Row, "copies", f"{megabytes} MB from one server to another"), list[Row]()
    for way in ways:
        rows += [
            row(f"{way}: MB", moved[way]),
            row(f"{way}: s", seconds[way], ratio=min(seconds[way]) / min(seconds[BARE])),
            row(f"{way}: CPU s of both servers", worked[way], ratio=min(worked[way]) / min(worked[BARE])),
        ]
    return rows


def write(memory: int, serial: int, nbytes: int) -> None:
    """Write a part of random bytes."""
    for start in range(HEAD.size, nbytes, BLOCK):
        os.pwrite(memory, os.urandom(min(BLOCK, nbytes - start)), start)
    os.pwrite(memory, HEAD.pack(serial, HEAD.size, nbytes), 0)


def cpu_seconds() -> float:
    """Return the CPU seconds of both servers, by each process's own CPU clock."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in deaths.alive().values())
