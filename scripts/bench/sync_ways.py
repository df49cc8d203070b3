"""A weight sync between real processes: trainer ranks (FSDP, fp32) to readers (tensor parallelism, bf16), every way."""

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.ranks import Ranks
from bench.rows import Row, in_turn
from bench.sharded import shards
from bench.sync_plan import shape_of_size
from bench.sync_ranks import READERS, Reader, TrainerRank
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.broadcast.rosters import Roster
from titan_rl.wire.weight_plan import WeightPlan, plan

LARGEST = 1000  # megabytes: larger models leave out the way that makes several copies of the whole model
BARE_SHM, BARE_RDMA = "bare shared memory", "bare RDMABuffer reads"
GLOO, TENSORS, MESSAGE = "gloo all-gather and broadcast", "RDMABuffer a tensor", "state dict in a message"
PLAIN, COPY, CAST = "plain passes", "copy of equal size, CPU s", "cast of the packed bytes, CPU s"
Move = Callable[[], Awaitable[dict[str, float] | None]]  # moves the weights once; returns seconds of its parts


def ways_of(verify: Sequence[str]) -> list[tuple[str, str]]:
    """Return which transports are timed with which checks. Broadcasts are one way only: others would need other
    groups, to be made anew in each turn."""
    return [(how, v) for v in verify for how in ("shm", "rdma", "broadcast") if how != "broadcast" or v == "off"]


@dataclass
class MeshPair:
    """Trainers, readers and measurements. Each way has a method to prepare it and one to move the weights."""

    made: WeightPlan
    trainers: Ranks
    readers: Ranks
    serial: int = 0  # last publication
    whole: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds by way
    parts: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[str, list[str]] = field(default_factory=dict)

    def to_readers(self, offered: Sequence[Mapping[int, Any]]) -> list[dict[int, Any]]:
        """Transpose: return the runs of each reader from each trainer rank."""
        return [{t: offered[t][r] for t in self.made.incoming(r)} for r in range(self.made.readers)]

    async def prepare_titan_rl(self, verify: Sequence[str], bare: bool) -> None:
        outgoing = [self.made.outgoing(t) for t in range(self.made.ranks)]
        sync = replace(WeightSyncSection(), transport="broadcast", verify=verify[0])
        offered = self.to_readers(await self.trainers.each("stage", sync, True, own=outgoing))
        for transport, how in ways_of(verify):
            await self.readers.each("connect", transport, how, own=offered)
        if bare:
            await self.readers.each("prepare_bare", own=offered)

    async def titan_rl(self, way: str) -> dict[str, float]:
        """Publish into slot 0, which has no readers now: the other slot would cost memory here, but no time."""
        self.serial += 1
        receivers = {pair: (READERS,) for pair, run in self.made.copies.items() if run}
        roster = Roster(1, receivers) if way.startswith("broadcast") else None
        published = await self.trainers.each("publish", self.serial, 0, self.serial, roster)
        manifests = self.to_readers([runs for runs, _, _ in published])
        pulled = await self.readers.each("pull", way, roster, own=manifests)
        parts = {"publish, CPU s": max(cpu for _, _, cpu in published)}
        return parts | {part: max(parts[part] for parts in pulled) for part in pulled[0]}

    async def bare_rdma(self) -> None:
        await self.readers.each("read_bare")

    async def prepare_shm(self) -> None:
        await self.readers.each("map", own=self.to_readers(await self.trainers.each("map")))

    async def bare_shm(self) -> dict[str, float]:
        publish = max(await self.trainers.each("pack_mapped"))
        return {"publish, CPU s": publish, "write, CPU s": max(await self.readers.each("write_mapped"))}

    async def prepare_tensors(self) -> None:
        offered = await self.trainers.each("register_tensors")
        wanted = [{t: offered[t] for t in self.made.incoming(r)} for r in range(self.made.readers)]
        await self.readers.each("prepare_tensors", own=wanted)

    async def tensors(self) -> dict[str, float]:
        publish = max(await self.trainers.each("cast_tensors"))
        await self.readers.each("read_tensors")
        return {"publish, CPU s": publish}

    async def message(self) -> None:
        await self.readers.each("receive", dict(enumerate(await self.trainers.each("state_dict"))))

    async def gloo(self) -> None:
        await asyncio.gather(self.trainers.each("gather_and_broadcast"), self.readers.each("take_broadcast"))


async def syncing(megabytes: int, ranks: int, readers: int, repeats: int) -> list[Row]:
    shape = shape_of_size(megabytes)
    trainer = [shards(shape, rank, fsdp=ranks) for rank in range(ranks)]
    made = plan(trainer, [pieces(shape, tp=readers, rank=rank) for rank in range(readers)])
    meshes = MeshPair(made, Ranks("trainer", ranks, TrainerRank), Ranks("reader", readers, Reader))
    world = ranks + readers
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = str(Path(folder) / "store")
            await asyncio.gather(
                meshes.trainers.each("join", store, 0, world, ranks),
                meshes.readers.each("join", store, ranks, world, ranks),
            )
            await meshes.trainers.each("hold", shape, ranks, own=[made.outgoing(t) for t in range(ranks)])
            nbytes = await meshes.readers.each("hold", shape, readers, own=[made.incoming(r) for r in range(readers)])
            for prepare, ways in groups(meshes, megabytes):
                await prepare()
                await time_group(meshes, ways, repeats)
                await asyncio.gather(meshes.trainers.each("drop"), meshes.readers.each("drop"))
        finally:
            await meshes.trainers.end()
            await meshes.readers.end()
    if len({tuple(digest) for digest in meshes.digests.values()}) != 1:
        raise RuntimeError(f"expected equal live parameters from every way, found {meshes.digests}")
    return compare(meshes, nbytes, f"{megabytes} MB, {ranks} ranks to {readers} readers")


def groups(meshes: MeshPair, megabytes: int) -> list[tuple[Callable[[], Awaitable[None]], Mapping[str, Move]]]:
    """Ways that are prepared together and timed in turn. All ways at once would need ten times the model's memory."""

    def titan_rl(*verify: str) -> dict[str, Move]:
        return {f"titan_rl, {how}, verify {v}": partial(meshes.titan_rl, f"{how} {v}") for how, v in ways_of(verify)}

    nothing = {GLOO: meshes.gloo} | ({MESSAGE: meshes.message} if megabytes <= LARGEST else {})
    return [
        (partial(meshes.prepare_titan_rl, ["off"], True), titan_rl("off") | {BARE_RDMA: meshes.bare_rdma}),
        (partial(meshes.prepare_titan_rl, ["transfer", "live"], False), titan_rl("transfer", "live")),
        (meshes.prepare_shm, {BARE_SHM: meshes.bare_shm}),
        (meshes.prepare_tensors, {TENSORS: meshes.tensors}),
        (partial(asyncio.sleep, 0), nothing),
    ]


async def time_group(meshes: MeshPair, ways: Mapping[str, Move], repeats: int) -> None:
    for turn, way in in_turn(ways, 1 + repeats):  # the first round touches pages and opens connections
        await meshes.readers.each("zero")
        cast = max(await meshes.trainers.each("memcpy"))
        meshes.parts[PLAIN, COPY].append(max(await meshes.readers.each("memcpy")))
        meshes.parts[PLAIN, CAST].append(cast)
        began = time.perf_counter()
        inside = await ways[way]() or {}
        took = time.perf_counter() - began
        if turn:
            meshes.whole[way].append(took)
            for part, value in inside.items():
                meshes.parts[way, part].append(value)
        elif way != BARE_RDMA:
            meshes.digests[way] = await meshes.readers.each("digest")


def compare(meshes: MeshPair, nbytes: Sequence[int], case: str) -> list[Row]:
    row = partial(Row, "sync", case)
    least = {way: min(values) for way, values in meshes.whole.items()}
    best = min(least.keys() & {GLOO, TENSORS, MESSAGE}, key=least.__getitem__)
    rows = [row(f"slowest rank: {part}", values, way) for (way, part), values in meshes.parts.items()]
    copied, cast = min(meshes.parts[PLAIN, COPY]), min(meshes.parts[PLAIN, CAST])  # just before each move
    floors = {"the memcpy rate": copied, "the rate of both plain passes": copied + cast}
    for way, values in meshes.whole.items():
        rows.append(row("all, s", values, way, note=f"{sum(nbytes) / least[way] / 1e9:.2f} GB/s at best"))
        if way.startswith("titan_rl") or way == BARE_SHM:
            work = sum(min(v) for (of, part), v in meshes.parts.items() if of == way and part.endswith(", CPU s"))
            rows += [row(f"publish and write: share of {rate}", [floor / work], way) for rate, floor in floors.items()]
            rows.append(row("times faster than the best other", [least[best] / least[way]], way, note=best))
    ours = "titan_rl, rdma, verify off"
    read = min(meshes.parts[ours, "read, s"])
    rows.append(row(f"rate of the read / {BARE_RDMA}", [least[BARE_RDMA] / read], ours))
    share = [2 * meshes.made.received(r) / n for r, n in enumerate(nbytes)]
    rows.append(row("bytes read / bytes of the parameters", share, "titan_rl"))
    return sorted(rows, key=lambda row: row.way)
