"""Fake trainers and readers under a real WeightSync."""

from pathlib import Path
from typing import Any

from support.fake_engines import FakeEngine, fake_mesh, fake_replica
from support.weight_layouts import TINY, hf_sizes
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.replica import Replica
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RankFailed
from titan_rl.wire.manifest import Publication
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.spans import Clock
from titan_rl.wire.weight_plan import Shard
from titan_rl.wire.weight_source import NO_NOTES, Connection, Notes


class FakeTrainers:
    """A mesh of one rank, which offers nothing but its generation."""

    def __init__(self) -> None:
        self.alive = 1  # the generation that can be read from; 0: none
        self.notes: list[Notes] = []
        self.places: Any = ()  # the readers' places, from `stage`

    async def shards(self) -> list[list[Shard]]:
        return [[Shard(name, 0, rows, 0, cols) for name, (rows, cols) in hf_sizes(TINY).items()]]

    async def stage(self, copies: Any, places: Any, sync: Any) -> list[Any]:
        self.places = places
        return [{0: self.alive}]

    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, notes: Notes = NO_NOTES
    ) -> Publication:
        self.notes.append(notes)
        return Publication(version, slot, [{}], 0.0, notes)


class Reader(FakeEngine):
    """Connects to trainers that are alive, and fails to open the memory of dead ones."""

    def __init__(self, trainers: FakeTrainers) -> None:
        super().__init__()
        self.trainers = trainers
        self.connects: Connection | None = None
        self.fell_back, self.notes = "", list[Any]()

    async def do_connect(self, sources: Any, sync: Any, siblings: Any, slot: int = 0) -> Connection:
        if [source.offer for source in sources] != [self.trainers.alive]:
            raise RankFailed("generator0[tp=0] failed in connect: FileNotFoundError", rank="generator0[tp=0]")
        return self.connects or await super().do_connect(sources, sync, siblings)

    async def do_fetch_weights(self, manifests: Any, timeout: float, note: Any, slot: int = 0) -> ReaderCost:
        self.notes.append(note)
        return ReaderCost(blocks=1, fell_back=self.fell_back)


async def running(trainers: FakeTrainers, folder: Path) -> tuple[GeneratorMesh, WeightSync, list[Reader]]:
    made = [Reader(trainers)]

    async def make(index: int, _: bool) -> Replica:
        made.append(Reader(trainers))
        return fake_replica(index, made[-1], mesh._policy)

    mesh = fake_mesh(made[:1], folder, make=make, max_restarts=1)
    await mesh.start()
    weights = WeightSync(trainers, mesh, Clock())  # type: ignore[arg-type]
    await weights.connect(c.Config(), TINY)
    await weights.sync(0)
    return mesh, weights, made
