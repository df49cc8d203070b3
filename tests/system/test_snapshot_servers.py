"""Snapshot servers of three hosts on this machine, without ranks: copies by one-sided reads; a source that dies."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.signals import stop
from titan_rl.ext.hosts.worker_processes import worker_processes
from titan_rl.ext.snapshots.snapshot_parts import HEAD
from titan_rl.ext.snapshots.snapshot_server import BLOCK, BLOCK_SECONDS
from titan_rl.ext.snapshots.snapshot_servers import Place, ServerHandle, SnapshotServers
from titan_rl.meshes import deaths
from titan_rl.wire.errors import RankDied

SECONDS = 120.0
SOON = BLOCK_SECONDS / 2  # a copy that waits for reads of a lost host takes longer
PAUSE = 4.0  # between two reads of the copy whose source dies
STATE = os.urandom(5 * BLOCK + 12345)


def write(place: Place, serial: int, state: bytes) -> None:
    """Write a part as a rank does."""
    with open(place.path, "r+b", buffering=0) as memory:
        memory.truncate(HEAD.size + len(state))
        os.pwrite(memory.fileno(), state, HEAD.size)
        os.pwrite(memory.fileno(), HEAD.pack(serial, HEAD.size, HEAD.size + len(state)), 0)


def read(place: Place, serial: int) -> bytes:
    memory = Path(place.path).read_bytes()
    found, start, end = HEAD.unpack_from(memory)
    assert found == serial
    return memory[start:end]


def held(place: Place) -> int:
    return 512 * os.stat(place.path).st_blocks


def with_servers(folder: Path, work: Callable[[list[ServerHandle]], Awaitable[None]]) -> None:
    async def run() -> None:
        (folder / "s").mkdir()
        async with worker_processes(3, folder / "s", folder / "logs", SECONDS) as hosts:
            servers = SnapshotServers(hosts, SECONDS, SECONDS)
            copies, how = await servers.start(hosts)
            assert copies == ["host0's on host1", "host1's on host2", "host2's on host0"]
            assert how.startswith("RDMABuffer (")
            await work([await servers.of(host) for host in hosts])
            await deaths.kill(deaths.living())

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_one_sided_reads_copy_a_part_and_a_dead_source_delays_no_other_copy(tmp_path: Path) -> None:
    async def work(servers: list[ServerHandle]) -> None:
        source, reader, other = servers
        part, copy = await source.hold("trainer"), await reader.hold("trainer")
        write(part, 1, STATE)
        moved = await reader.fetch(copy.fd, 1, part)
        assert len(STATE) <= moved <= len(STATE) + 8192
        assert read(copy, 1) == STATE
        changed = STATE[: 2 * BLOCK] + b"changed" + STATE[2 * BLOCK + 7 :]
        write(part, 2, changed)
        await reader.fetch(copy.fd, 2, part)
        assert read(copy, 2) == changed
        assert held(copy) == held(part), "a copy takes as much memory as its part"

        lost, torn = await source.hold("trainer"), await reader.hold("trainer")
        write(lost, 3, STATE)
        begun = asyncio.create_task(reader.fetch(torn.fd, 3, lost, len(STATE), rate=BLOCK / PAUSE))
        while not (os.stat(torn.path).st_size > BLOCK and any(read_some(torn))):
            await asyncio.sleep(0.02)
        pid = deaths.alive()[source.name]
        stop(pid)
        await asyncio.sleep(1.25 * PAUSE)  # the next read begins, and is not answered
        assert not begun.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankDied, match=rf"{source.name[:-1]}".replace("[", r"\[")):
            await begun
        await reader.drop([torn.fd])
        async with asyncio.timeout(SOON):
            whole, second = await reader.hold("trainer"), await other.hold("trainer")
            await other.fetch(second.fd, 2, copy)
            assert read(second, 2) == changed
            await reader.fetch(whole.fd, 2, second)
            assert read(whole, 2) == changed

    with_servers(tmp_path, work)


def read_some(place: Place) -> bytes:
    with open(place.path, "rb") as memory:
        memory.seek(HEAD.size)
        return memory.read(BLOCK)
