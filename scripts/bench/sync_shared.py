"""A weight sync over a link to the replicas of one host: each reads for itself, or one for all of them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.ranks import Ranks
from bench.rows import Row, in_turn
from bench.sync_plan import shape_of_size, shards
from bench.sync_ranks import Reader, TrainerRank
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire.weight_plan import plan

RANKS = 2
ALONE, SHARED, BARE = "each replica reads", "one replica reads for all", "bare RDMABuffer reads, once"


async def sharing(megabytes: int, replicas: int, repeats: int) -> list[Row]:
    shape = shape_of_size(megabytes)
    made = plan([shards(shape, rank, fsdp=RANKS) for rank in range(RANKS)], [pieces(shape, tp=1, rank=0)])
    trainers, readers = Ranks("trainer", RANKS, TrainerRank), Ranks("reader", replicas, Reader)
    try:
        await trainers.each("hold", shape, RANKS, own=[made.outgoing(t) for t in range(RANKS)])
        (nbytes, *_) = await readers.each("hold", made.incoming(0), shape, 1)
        staged = await trainers.each("stage", WeightSyncSection(), True, own=[made.outgoing(t) for t in range(RANKS)])
        offered = {t: staged[t][0] for t in made.incoming(0)}
        await readers.one(0, "prepare_bare", offered)
        await readers.each("share", offered, [], ALONE)
        copy = await readers.one(0, "share", offered, [], SHARED)
        await asyncio.gather(*(readers.one(r, "share", offered, [copy], SHARED) for r in range(1, replicas)))
        seconds: dict[str, list[float]] = {way: [] for way in (ALONE, SHARED, BARE)}
        arrived: dict[str, list[float]] = {way: [] for way in (ALONE, SHARED)}
        for turn, (serial, way) in in_turn(list(enumerate(seconds, start=1)), 1 + repeats):
            number = 3 * turn + serial
            published = await trainers.each("publish", number, 0, number)
            manifests = {t: published[t][0][0] for t in made.incoming(0)}
            began = time.perf_counter()
            crossed = await moved(readers, way, manifests, replicas)
            took = time.perf_counter() - began
            if turn:  # the first round touches pages and opens connections
                seconds[way].append(took)
                if way != BARE:
                    arrived[way].append(sum(crossed) / 1e6)
        if len(set(await readers.each("digest"))) != 1:
            raise RuntimeError("expected equal live parameters in all replicas, found others")
    finally:
        await trainers.end()
        await readers.end()
    return list(compare(seconds, arrived, nbytes, f"{megabytes} MB, {RANKS} ranks to {replicas} replicas of a host"))


async def moved(readers: Ranks, way: str, manifests: Mapping[int, Any], replicas: int) -> list[int]:
    """Move the weights into all replicas. Return the bytes that crossed the link for each."""
    if way == BARE:
        await readers.one(0, "read_bare")
        return []
    waves = [range(replicas)] if way == ALONE else [range(1), range(1, replicas)]
    crossed = list[int]()
    for wave in waves:
        crossed += await asyncio.gather(*(readers.one(r, "fetch", manifests, way) for r in wave))
    await readers.each("write", way)
    return crossed


def compare(
    seconds: Mapping[str, Sequence[float]], arrived: Mapping[str, Sequence[float]], nbytes: int, case: str
) -> list[Row]:
    row, floor = partial(Row, "share", case), min(seconds[BARE])
    rows = [
        row("MB into the host", values, way, note=f"{nbytes / 1e6:.1f} MB of parameters")
        for way, values in arrived.items()
    ]
    for way, values in seconds.items():
        rows.append(row("read, write and verify, s" if way != BARE else "read, s", values, way, min(values) / floor))
    return sorted(rows, key=lambda each: each.way)
