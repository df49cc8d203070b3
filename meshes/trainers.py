"""The trainer mesh: the policy, its optimizer, and the frozen weights that it may be lent."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from monarch.actor import HostMesh

from titan_rl.actors.trainer import Trainer
from titan_rl.config.sections import Config, WeightSyncSection
from titan_rl.meshes.model_mesh import TrainedMesh
from titan_rl.wire.manifest import Publication
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import Batch, PhaseName, StepStats
from titan_rl.wire.weight_plan import Copy, Shard

if TYPE_CHECKING:
    from titan_rl.actors.sync.transport import Offer


class TrainerMesh(TrainedMesh):
    @classmethod
    async def spawn(cls, host: HostMesh, config: Config, shape: ModelShape, env: Mapping[str, str]) -> Self:
        return await cls.place(host, "trainer", config.parallelism, config.comm, env, Trainer, config, shape)

    async def begin(self, phase: PhaseName, snapshot: Snapshot | None = None) -> tuple[int, str]:
        """Broadcast; every rank agrees on the step it resumed from, on disk or, scattered, in a snapshot."""
        if snapshot is not None and snapshot.phase != phase:
            raise ValueError(f"expected a snapshot of phase {phase}, found one of {snapshot.phase}")
        (state,) = set(await self._begin(snapshot, phase))
        return state

    async def accumulate(self, part: Sequence[Batch]) -> None:
        """Scatter a part of an update to the dp rows: gradients add up until `update`."""
        await self._scatter("accumulate", self.rows(part))

    async def update(self, whole: Batch, divisor: float) -> StepStats:
        """The update of what was accumulated; `whole` has its counts."""
        return self._slowest(await self._all("update", whole, divisor, seconds=self._comm.train_timeout_seconds))

    async def freeze(self, role: str, folder: str) -> None:
        """Lend the trainers a second set of weights."""
        await self._all("freeze", role, folder, seconds=self._comm.init_timeout_seconds)

    async def scores(
        self, batches: Sequence[Batch], weights: Literal["policy", "reference", "teacher"], temperature: float
    ) -> tuple[list[list[np.ndarray]], list[int]]:
        """Log-probs by dp row and microbatch; the weights' checksum by rank."""
        answers = await self._scatter("scores", self.rows(batches), weights, temperature)
        return [found for found, _ in self.heads(answers)], [checksum for _, checksum in answers]

    async def shards(self) -> list[list[Shard]]:
        """Gather the layout, by rank."""
        return await self._all("shards", seconds=self._comm.train_timeout_seconds)

    async def stage(
        self, copies: Sequence[Mapping[int, tuple[Copy, ...]]], places: Collection[str], sync: WeightSyncSection
    ) -> "list[dict[int, Offer]]":
        """Scatter each rank's part of the weight plan, and say where its readers are; gather where those find it."""
        return await self._scatter("stage", copies, places, sync)

    async def publish(self, version: int, slot: int, serial: int, again: bool = False) -> Publication | None:
        """Every rank packs its shards into a slot. None: the trainers have stepped since they published what is asked
        for `again`."""
        packed = await self._all("publish", version, slot, serial, again, seconds=self._comm.train_timeout_seconds)
        if None in packed:
            return None
        return Publication(version, slot, [manifests for manifests, _ in packed], max(seconds for _, seconds in packed))

    async def save(self, step: int, controller: str) -> None:
        await self._all("save", step, controller, seconds=self._comm.train_timeout_seconds)

    async def export(self, folder: str) -> None:
        await self._all("export", folder, seconds=self._comm.train_timeout_seconds)
