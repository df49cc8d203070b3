"""Trainers and readers in Monarch processes, on this machine or on hosts of a Switch: a version goes from host to host.

    python -m support.passing_hosts ROWS SLICE_BYTES PULLS ADDRESS...

The first address has the trainers. Prints a line for each way, after a line of standard input.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from monarch.actor import Actor, concurrent_endpoint
from torch import Tensor

from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.relay import chains
from titan_rl.ext.remote_weights.ranks.remote_run import RemoteRun
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import EngineStats, ReaderCost, SyncStats
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Connection, Offer, Source

COLS, TP, BLOCK, SECONDS = 1024, 2, 1 << 20, 120


def copies(rows: int) -> dict[int, tuple[Copy, ...]]:
    """Give each of two readers half of the rows."""
    half = rows // TP
    return {r: (Copy("w", r * half, 0, half, COLS, "p", 0, 0),) for r in range(TP)}


class TrainerRank(Actor):
    @concurrent_endpoint
    async def stage(self, rows: int, slice_bytes: int) -> dict[int, Offer]:
        self.weights = {"w": torch.randn(rows, COLS).to(torch.bfloat16)}
        self.staging = Staging(self.weights, copies(rows), torch.bfloat16, slice_bytes=slice_bytes, block_bytes=BLOCK)
        return self.staging.offer(remote=True, how="rdma")

    @concurrent_endpoint
    async def publish(self, serial: int) -> dict[int, Manifest]:
        self.weights["w"][serial].neg_()
        return self.staging.pack(serial, serial % 2, serial)

    @concurrent_endpoint
    async def digests(self) -> list[int]:
        return [digest(half) for half in self.weights["w"].split(len(self.weights["w"]) // TP)]


class ReaderRanks(Actor):
    """Both tensor-parallel readers of a host, in one process."""

    @concurrent_endpoint
    async def connect(self, sources: list[list[Source]], sync: WeightSyncSection, rows: int) -> list[Connection]:
        from titan_rl.actors.endpoint import quiet_rdma

        self.live = [torch.zeros(rows // TP, COLS, dtype=torch.bfloat16) for _ in range(TP)]
        for landing in getattr(self, "landings", ()):
            landing.leave()
        with quiet_rdma():
            self.landings = [
                Landing({"p": live}, own, sync, f"rank {r}")
                for r, (live, own) in enumerate(zip(self.live, sources, strict=True))
            ]
        return [landing.connection for landing in self.landings]

    @concurrent_endpoint
    async def harm(self, how: str, slices: int) -> None:
        """After a number of slices have been passed to it, kill or stop this process; or forge each slice."""
        passed, count = RemoteRun.relayed, 0

        def relayed(run: RemoteRun, part: int, key: int) -> None:
            nonlocal count
            count += 1
            if how == "forge":
                run.place_of(part)[11] ^= 1
            elif how and count == slices:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            passed(run, part, key)

        RemoteRun.relayed = relayed if how else passed  # type: ignore[method-assign]

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def pull(self, manifests: list[list[Manifest]], notes: list[Any]) -> list[ReaderCost]:
        fetches = zip(self.landings, manifests, notes or [None] * TP, strict=True)
        fetched = await asyncio.gather(*(landing.fetch_weights(own, SECONDS, note) for landing, own, note in fetches))
        return [*fetched, *[await landing.write_weights(SECONDS) for landing in self.landings]]

    @concurrent_endpoint
    async def digests(self) -> list[int]:
        return [digest(live) for live in self.live]


def digest(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.contiguous().view(torch.uint8).numpy().data)


class Hosts:
    """The controller: a trainer rank, and readers by name."""

    def __init__(self, trainer: Any, readers: Mapping[str, Any], rows: int) -> None:
        self.trainer, self.readers, self.rows, self.serial = trainer, dict(readers), rows, 0

    async def connect(self, *, relay: bool, slice_bytes: int) -> None:
        offers = await done(self.trainer.stage.call_one(self.rows, slice_bytes))
        sources = [[Source(0, offers[r], copies(self.rows)[r], "bfloat16", BLOCK)] for r in range(TP)]
        sync = WeightSyncSection(transport="rdma", relay=relay)
        self.connections = dict(
            zip(
                self.readers,
                await asyncio.gather(
                    *(done(reader.connect.call_one(sources, sync, self.rows)) for reader in self.readers.values())
                ),
                strict=True,
            )
        )
        self.chains = chains.Relays() if relay else None
        self.said = ""

    async def pull(self, dies: str = "") -> SyncStats:
        """Bring a new version to all readers. One `dies` meanwhile, and is left out from then on."""
        self.serial += 1
        packed = await done(self.trainer.publish.call_one(self.serial))
        manifests = [[packed[r]] for r in range(TP)]
        replicas: Any = [
            SimpleNamespace(name=name, tp=TP, memory=each[0].copy.memory if each[0].copy else None, connections=each)
            for name, each in self.connections.items()
        ]
        notes = self.chains.notes(replicas, 1) if self.chains else chains.Notes()

        began = time.perf_counter()
        calls = {n: r.pull.call_one(manifests, notes.replicas.get(n, [])) for n, r in self.readers.items()}
        if dies:
            del calls[dies], self.readers[dies], self.connections[dies]
        costs: dict[str, list[ReaderCost]] = dict(
            zip(calls, await asyncio.gather(*map(done, calls.values())), strict=True)
        )
        seconds = time.perf_counter() - began
        failed = [(name, cost.fell_back) for name, each in costs.items() for cost in each if cost.fell_back]
        stats = SyncStats(
            self.serial,
            seconds=seconds,
            bytes=sum(cost.remote for each in costs.values() for cost in each),
            relayed=sum(cost.relayed for each in costs.values() for cost in each),
            engines=dict.fromkeys(costs, EngineStats()),
            fell_back=tuple(why for _, why in failed),
            unreached=tuple(name for name, _ in failed),
        )
        self.said = self.chains.pulled(notes, stats) if self.chains else ""
        return stats

    async def equal(self) -> bool:
        """Return whether every reader has the trainer's weights."""
        expected = await done(self.trainer.digests.call_one())
        found = await asyncio.gather(*(done(reader.digests.call_one()) for reader in self.readers.values()))
        return all(each == expected for each in found)


async def done(future: Any, seconds: float = 2 * SECONDS) -> Any:
    return await asyncio.wait_for(future.as_asyncio(), seconds)


async def race(addresses: Sequence[str], rows: int, slice_bytes: int, pulls: int) -> None:
    """Print, for each way, the seconds of each pull and the bytes that the readers got from each other."""
    from monarch.actor import attach_to_workers

    def spawned(number: int, actor: type[Actor]) -> Any:
        mesh = attach_to_workers(ca="trust_all_connections", workers=[addresses[number]], name=f"host{number}")
        return mesh.spawn_procs(per_host={"rank": 1}, name="ranks").spawn("rank", actor)

    trainer, readers = spawned(0, TrainerRank), {f"g{n}": spawned(n, ReaderRanks) for n in range(1, len(addresses))}
    hosts = Hosts(trainer, readers, rows)
    for relay in (False, True):
        await hosts.connect(relay=relay, slice_bytes=slice_bytes)
        await hosts.pull()
        sys.stdin.readline()  # counters are read between the lines
        print("ready", flush=True)
        sys.stdin.readline()
        stats = [await hosts.pull() for _ in range(pulls)]
        found = {
            "relay": relay,
            "seconds": [each.seconds for each in stats],
            "bytes": sum(each.bytes for each in stats),
            "relayed": sum(each.relayed for each in stats),
            "fell_back": [why for each in stats for why in each.fell_back],
            "equal": await hosts.equal(),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    from monarch.actor import enable_transport
    from monarch.config import configure

    enable_transport("tcp")
    configure(rdma_allow_tcp_fallback=True)
    asyncio.run(race(sys.argv[4:], *map(int, sys.argv[1:4])))
    os._exit(0)  # workers end with their hosts
