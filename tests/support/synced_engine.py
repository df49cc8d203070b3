"""An engine that takes one version of its weights after the other, in a program that a test forks."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.family_ranks import tensors_of
from titan_rl.actors.sync.halves import Halves
from titan_rl.actors.sync.held_shards import local_tensors
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.vllm_params import verify_complete
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire.model_shape import ModelShape, planned, shape_of_folder
from titan_rl.wire.types import Completion, Request, Sampling
from titan_rl.wire.weight_plan import Shard, plan
from titan_rl.wire.weight_source import Source

BLOCK_BYTES = 1 << 14


class SyncedEngine:
    """An engine with the config.json of a folder, and the tensors that its next sync moves."""

    def __init__(
        self, model_dir: Path, first: Path, dtype: str = "float32", images: str = "", vision: str = "none"
    ) -> None:
        self.shape: ModelShape = shape_of_folder(str(model_dir), "folder", vision=vision)
        shape, room = self.shape, {"max_model_len": 128, "kv_cache_memory_mb": 32, "dtype": dtype}
        self.engine = Engine(EngineSettings(model_dir=str(model_dir), shape=shape, images=images, **room))
        verify_complete(self.engine.info.shapes, self.engine.layout.shapes)
        self.weights: dict[str, Any] = {name: w.clone() for name, w in tensors_of(first, shape).items()}
        shards = [Shard(name, 0, len(w), 0, w[0].numel()) for name, w in self.weights.items()]
        copies = plan([planned(shards, shape, dtype)], [self.engine.layout.pieces]).outgoing(0)

        def view(params: Any) -> Any:
            return Halves(local_tensors(params), shape, dtype) if shape.halves(dtype) else local_tensors(params)

        self._staging = Staging(self.weights, copies, getattr(torch, dtype), block_bytes=BLOCK_BYTES, view=view)
        source = Source(0, self._staging.offer(remote=False)[0], copies[0], dtype, BLOCK_BYTES)
        self._landing = Landing(self.engine.params(), [source], WeightSyncSection(verify="live"))

    async def _sync(self, version: int) -> None:
        await self._landing.fetch_weights([self._staging.pack(version, version % 2, version + 1)[0]], 30)
        self.engine.suspend()
        await self._landing.write_weights(30)
        self.engine.set_version(version)

    def take(self, folder: Path, version: int) -> None:
        """Sync the tensors of a folder."""
        for name, w in tensors_of(folder, self.shape).items():
            self.weights[name].copy_(w)
        asyncio.run(self._sync(version))

    def sampled(self, folders: Sequence[Path]) -> Iterator[list[Completion]]:
        """Sync the tensors of one folder after the other, and yield four samples by each."""
        for version, folder in enumerate(folders):
            self.take(folder, version)
            self.engine.add([Request("r", [1, 5, 6, 7], list(range(4)), Sampling(40, 1.0))])
            completions: list[Completion] = []
            while self.engine.busy:
                completions += [c for done in self.engine.step() for c in done.completions]
            yield completions
