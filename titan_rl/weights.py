"""Move weights from the trainer mesh to the generator mesh.

once          trainers.shards ─┐
              generator pieces ┴─ plan ── trainers.stage (register) ── generators.connect
every step    trainers.publish (pack) ── generators.pull (one-sided read, in-place write, new version)
"""

import time

from titan_rl.clock import Clock
from titan_rl.config import Config
from titan_rl.meshes.generators import GeneratorMesh
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.model_shape import ModelShape
from titan_rl.types import SyncStats
from titan_rl.weight_plan import Plan, pieces, plan


class WeightSync:
    """`connect` plans and registers; `sync` makes the generators serve what the trainers hold."""

    def __init__(self, trainers: TrainerMesh, generators: GeneratorMesh, clock: Clock) -> None:
        self._trainers = trainers
        self._generators = generators
        self._clock = clock

    async def connect(self, config: Config, shape: ModelShape) -> Plan:
        from titan_rl.actors.landing import Source  # brings torch

        tp = config.generator.tensor_parallel_degree
        layout = await self._trainers.shards()
        self.plan = plan(layout, [pieces(shape, tp=tp, rank=rank) for rank in range(tp)])
        ranks, readers = range(len(layout)), range(tp)
        staged = await self._trainers.stage([{g: self.plan.copies[t, g] for g in readers} for t in ranks])
        sources = [
            [Source(t, staged[t][g], self.plan.copies[t, g], config.generator.dtype) for t in ranks] for g in readers
        ]
        await self._generators.connect(sources)
        return self.plan

    async def sync(self, version: int) -> SyncStats:
        began = time.perf_counter()
        with self._clock("sync"):
            publish = await self._trainers.publish()
            pulled = await self._generators.pull(version)
        seconds = time.perf_counter() - began
        return SyncStats(version, pulled.bytes, publish, pulled.read, pulled.write, seconds, pulled.busy)
