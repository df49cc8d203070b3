"""Weight sync to a vLLM engine that samples all the time: how long it pauses, and how much of the sync is hidden."""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from monarch.actor import this_host

from bench.ranks import Ranks
from bench.rows import Row
from bench.sync_plan import shape_of_size
from bench.sync_ranks import TrainerRank
from titan_rl.actors.sync.transport import is_remote
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config.sections import Config, GeneratorSection, WeightSyncSection
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.train.weight_sync import WeightSync as WeightsInTransit
from titan_rl.wire.errors import RunError
from titan_rl.wire.manifest import Publication
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Request, Sampling
from titan_rl.wire.weight_plan import Copy, Shard
from titan_rl.wire.weight_source import Offer

LARGEST_SERVED = 250  # megabytes: on two cores an engine step of a larger model takes longer than its sync
WAYS = {
    f"{transport}, verify {verify}{', delta' if delta else ''}": WeightSyncSection(
        transport=transport, verify=verify, delta=delta
    )
    for delta in (False, True)
    for verify in ("live", "transfer")
    for transport in ("shm", "rdma")
}
CHANGED = "layers.0.self_attn"  # the parameters that change between two delta syncs
RANKS = 2
SAMPLES = 8  # that the engine advances in each step


class PackingTrainers(Ranks):
    """The part of a trainer mesh that a weight sync calls."""

    async def shards(self) -> list[list[Shard]]:
        return await self.each("layout")

    async def stage(
        self, copies: Sequence[Mapping[int, tuple[Copy, ...]]], places: Sequence[str], sync: WeightSyncSection
    ) -> list[dict[int, Offer]]:
        remote = any(is_remote(place, sync.transport) for place in places)
        return await self.each("stage", sync, remote, own=copies)

    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, notes: Any = None
    ) -> Publication:
        packed = await self.each("publish", version, slot, serial)
        return Publication(version, slot, [runs for runs, _, _ in packed], max(wall for _, wall, _ in packed))


async def loading(megabytes: int, repeats: int) -> list[Row]:
    shape, rows = shape_of_size(megabytes), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
        settings = EngineSettings(
            model_dir=folder,
            shape=shape,
            max_model_len=512,
            dtype="bfloat16",
            max_num_seqs=SAMPLES,
            kv_cache_memory_mb=256,
        )
        trainers: Any = PackingTrainers("trainer", RANKS, TrainerRank)
        generators = await GeneratorMesh.spawn(this_host(), settings, replicas=1, env=vllm_cpu.ENV)
        try:
            await generators.start()
            await trainers.each("hold", {}, shape, RANKS)
            case, load = f"{megabytes} MB, {RANKS} ranks to an engine that samples", list[asyncio.Task[None]]()
            versions = count(1)
            for way, sync in WAYS.items():
                weights = WeightsInTransit(trainers, generators, Clock())
                await weights.connect(Config(generator=GeneratorSection(dtype="bfloat16"), weight_sync=sync), shape)
                await weights.sync(next(versions))
                load = load or [asyncio.create_task(sampling(generators, i)) for i in range(SAMPLES)]
                stats: list[SyncStats] = []
                during, alone = [], []  # (seconds, tokens sampled in them) with a sync, and without one
                for i in range(1 + repeats):
                    await trainers.each("negate", CHANGED if sync.delta else "")
                    marks = [await mark(generators)]
                    synced = await weights.sync(next(versions))
                    marks.append(await mark(generators))  # after the keys and values of open samples are recomputed
                    await asyncio.sleep(0.5)
                    marks.append(await mark(generators))
                    if i:  # the first touches the second slot's pages
                        stats.append(synced)
                        for spans, ((then, before), (now, after)) in zip((during, alone), pairwise(marks), strict=True):
                            spans.append((now - then, after - before))
                await trainers.each("drop")
                rows += served(case, way, stats, during, statistics.median(tokens / took for took, tokens in alone))
            return rows
        finally:
            await asyncio.gather(generators.close(), return_exceptions=True)
            await asyncio.gather(generators.stop(), trainers.end(), return_exceptions=True)


def served(
    case: str, way: str, stats: Sequence[SyncStats], during: Sequence[tuple[float, int]], alone: float
) -> Iterator[Row]:
    """`alone` is the engine's tokens per second without a sync. Apart from its pause, a sync mostly costs the step that
    recomputes the keys and values of unfinished samples."""
    row = partial(Row, "load", case, way=way)
    for part in ("seconds", "publish", "read", "pause"):
        yield row(f"{part}, s", [getattr(s, part) for s in stats])
    work = [1 - s.pause / (s.publish + s.read + s.pause) for s in stats]
    yield row("hidden: share of publish, read and pause", work)
    yield row("hidden: share of the sync's wall time", [1 - s.pause / s.seconds for s in stats])
    yield row("pause / an engine step", [s.pause * alone / SAMPLES for s in stats])
    lost = [took - tokens / alone for took, tokens in during]
    yield row("sampling lost, s", lost, note=f"{alone:.0f} tokens/s without")
    yield row("pause / sampling lost", [s.pause / most for s, most in zip(stats, lost, strict=True)])
    if changed := [s.changed for s in stats if s.changed is not None]:
        yield row("changed: share of the blocks", changed)


async def mark(generators: GeneratorMesh) -> tuple[float, int]:
    """Return the time and the number of tokens sampled until then."""
    (stats,) = await generators.stats()
    return time.perf_counter(), stats.tokens


async def sampling(generators: GeneratorMesh, seed: int) -> None:
    """Sample one completion after the other, until the engine is closed."""
    with suppress(RunError):
        for i in count():
            await generators.generate(Request(f"{seed}.{i}", [1, 5, 6, 7], [seed], Sampling(400)))
