"""Move weights from the trainer mesh to the generator mesh.

once          trainers.shards ─┐
              generator pieces ┴─ plan ── trainers.stage (two slots) ── generators.connect
every step    trainers.publish (pack into the free slot) ── generators.pull (read, write in place, verify, new version)

A slot is packed again only when everybody who began to read it has let go, so version n + 1 may be published while
readers are still busy with n.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from titan_rl.clock import Clock
from titan_rl.config import Config
from titan_rl.manifest import Publication
from titan_rl.meshes.faults import DeadlinePassed
from titan_rl.meshes.generators import GeneratorMesh, Pulled
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.model_shape import ModelShape
from titan_rl.types import SyncStats
from titan_rl.weight_plan import Plan, pieces, plan


class Slots:
    """Who reads which of two slots."""

    def __init__(self) -> None:
        self._readers: tuple[dict[str, int], dict[str, int]] = ({}, {})  # by slot: the version that each reads
        self._left = asyncio.Event()

    async def free(self, slot: int, seconds: float) -> None:
        """Wait until nobody reads a slot."""
        readers = self._readers[slot]
        try:
            async with asyncio.timeout(seconds):
                while readers:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            who = " and ".join(f"{name}, which still reads version {version}" for name, version in readers.items())
            raise DeadlinePassed(
                f"weights.publish waits on {who}",
                f"It waited {seconds:g} s. If this is slow rather than stuck, raise [comm] train_timeout_seconds.",
            ) from None

    @contextmanager
    def reading(self, publication: Publication, name: str) -> Iterator[None]:
        """While `name` reads. Who failed or died reads no more; who did not answer in time may well be at it still."""
        readers = self._readers[publication.slot]
        readers[name] = publication.version
        try:
            yield
        except (DeadlinePassed, asyncio.CancelledError):
            raise
        except BaseException:
            self._leave(readers, name)
            raise
        else:
            self._leave(readers, name)

    def _leave(self, readers: dict[str, int], name: str) -> None:
        del readers[name]
        self._left.set()


class WeightSync:
    """`connect` plans and connects; `sync` makes the generators serve what the trainers hold."""

    def __init__(self, trainers: TrainerMesh, generators: GeneratorMesh, clock: Clock) -> None:
        self.transports = ""  # for the terminal
        self._trainers = trainers
        self._generators = generators
        self._clock = clock
        self._slots = Slots()
        self._serial = 0  # of the last publication begun
        self._newest: Publication | None = None
        self._publishing, self._pulling = asyncio.Lock(), asyncio.Lock()

    async def connect(self, config: Config, shape: ModelShape) -> Plan:
        from titan_rl.actors.landing import Source  # brings torch

        tp, sync = config.generator.tensor_parallel_degree, config.weight_sync
        layout, places = await asyncio.gather(self._trainers.shards(), self._generators.places())
        self.plan = plan(layout, [pieces(shape, tp=tp, rank=rank) for rank in range(tp)])
        outgoing = [self.plan.outgoing(t) for t in range(len(layout))]
        staged = await self._trainers.stage(outgoing, sorted(set(places)), sync)
        sources = [
            [
                Source(t, staged[t][g], copies, config.generator.dtype, sync.block_kb << 10)
                for t, copies in self.plan.incoming(g).items()
            ]
            for g in range(tp)
        ]
        chosen = Counter(await self._generators.connect(sources, sync))
        self.transports = ", ".join(chosen if len(chosen) == 1 else (f"{name} x {n}" for name, n in chosen.items()))
        self._readers, self._delta = tp, sync.delta
        self._seconds = config.comm.train_timeout_seconds
        return self.plan

    async def publish(self, version: int) -> Publication:
        """Pack what the trainers hold into the slot that is not the newest, as soon as nobody reads it."""
        async with self._publishing:
            slot = 1 - self._newest.slot if self._newest else 0
            await self._slots.free(slot, self._seconds)
            self._serial += 1
            self._newest = await self._trainers.publish(version, slot, self._serial)
            return self._newest

    async def pull(self, publication: Publication) -> Pulled:
        """Make every generator serve a publication; one publication after the other."""
        async with self._pulling:
            manifests = [publication.of(reader) for reader in range(self._readers)]
            lease = partial(self._slots.reading, publication)
            return await self._generators.pull(publication.version, manifests, lease)

    async def sync(self, version: int) -> SyncStats:
        began = time.perf_counter()
        with self._clock("sync"):
            published = await self.publish(version)
            pulled = await self.pull(published)
        return SyncStats(
            version,
            pulled.bytes,
            published.seconds,
            pulled.read,
            pulled.write,
            time.perf_counter() - began,
            pulled.busy,
            pulled.verify,
            pulled.pause,
            pulled.changed if self._delta else None,
        )
