"""The meshes of the models beside the policy."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from monarch.actor import HostMesh

from titan_rl.actors.roles import CriticRank, Frozen
from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.meshes.model_mesh import ModelMesh, TrainedMesh
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import Batch


class FrozenMesh(ModelMesh):
    """A reference, a teacher or a reward model."""

    @classmethod
    async def spawn(
        cls,
        host: HostMesh,
        name: str,
        parallelism: ParallelismSection,
        config: Config,
        shape: ModelShape,
        env: Mapping[str, str],
    ) -> Self:
        return await cls.place(host, name, parallelism, config.comm, env, Frozen, config, shape, parallelism)

    async def load(self, folder: str) -> None:
        await self._all("load", folder, seconds=self._comm.init_timeout_seconds)

    async def scores(
        self, batches: Sequence[Batch], temperature: float = 1.0
    ) -> tuple[list[list[np.ndarray]], list[int]]:
        """Log-probs or values by dp row and microbatch; the weights' checksum by rank."""
        answers = await self._scatter("scores", self.rows(batches), temperature)
        return [found for found, _ in self.heads(answers)], [checksum for _, checksum in answers]


class CriticMesh(TrainedMesh):
    @classmethod
    async def spawn(cls, host: HostMesh, config: Config, shape: ModelShape, env: Mapping[str, str]) -> Self:
        return await cls.place(host, "critic", config.critic.parallelism, config.comm, env, CriticRank, config, shape)

    async def begin(self, folder: str, at: int, snapshot: Snapshot | None = None) -> None:
        """Start from the weights in `folder`, or resume at the policy's step, or from the policy's snapshot."""
        await self._begin(snapshot, folder, at)

    async def scores(self, batches: Sequence[Batch]) -> list[list[np.ndarray]]:
        """Values by dp row and microbatch."""
        return self.heads(await self._scatter("scores", self.rows(batches)))

    async def save(self, step: int) -> None:
        await self._all("save", step, seconds=self._comm.train_timeout_seconds)
