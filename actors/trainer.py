"""One trainer rank as a Monarch actor: thin endpoints over Policy and Staging.

The controller imports this module to spawn the actor, so torch and TorchTitan are imported in `start`, on the rank.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from monarch.actor import Actor, endpoint

from titan_rl.actors.fallible import fallible
from titan_rl.config import Config
from titan_rl.model_shape import ModelShape
from titan_rl.types import Batch, PhaseName, StepStats
from titan_rl.weight_plan import Copy, Shard

if TYPE_CHECKING:
    import numpy as np
    from monarch.rdma import RDMABuffer


class Trainer(Actor):
    def __init__(self, config: Config, shape: ModelShape) -> None:
        self._config = config
        self._shape = shape

    @endpoint
    @fallible
    async def start(self) -> int:
        """Build the model; answers with the bytes of parameters that this rank holds."""
        from titan_rl.actors.policy import Policy
        from titan_rl.actors.quiet import quiet

        quiet()
        self._policy = Policy(self._config, self._shape)
        return self._policy.nbytes

    @endpoint
    @fallible
    async def begin(self, phase: PhaseName) -> tuple[int, str]:
        """Start or resume a phase: the step it stands at, and the controller's state saved with that step."""
        state = self._policy.begin(phase)
        return state.step, state.controller

    @endpoint
    @fallible
    async def step(self, batches: list[Batch]) -> StepStats:
        """One optimizer update a batch."""
        return self._policy.step(batches)

    @endpoint
    @fallible
    async def freeze(self, role: Literal["reference", "teacher"], folder: str) -> None:
        self._policy.freeze(role, folder)

    @endpoint
    @fallible
    async def scores(
        self, batch: Batch, weights: Literal["policy", "reference", "teacher"], temperature: float
    ) -> "tuple[list[np.ndarray], int]":
        """Each place's log-prob, and the checksum of frozen weights."""
        return self._policy.scores(batch, weights, temperature)

    @endpoint
    @fallible
    async def save(self, step: int, controller: str) -> None:
        self._policy.save(step, controller)

    @endpoint
    @fallible
    async def export(self, folder: str) -> None:
        self._policy.export(folder)

    @endpoint
    @fallible
    async def shards(self) -> list[Shard]:
        """Which rectangles of which tensors this rank holds: the trainer's half of the weight plan."""
        from titan_rl.actors.staging import shards_of

        policy = self._policy
        return shards_of(policy.model.named_parameters(), policy.names, policy.rope_head_dims)

    @endpoint
    @fallible
    async def stage(self, copies: Mapping[int, tuple[Copy, ...]]) -> "dict[int, list[RDMABuffer]]":
        """Allocate and register this rank's staging buffer: per reader, the slices of its run."""
        import torch

        from titan_rl.actors.quiet import quiet_rdma
        from titan_rl.actors.staging import Staging

        policy = self._policy
        parameters = {policy.names[name]: p for name, p in policy.model.named_parameters()}
        dtype = getattr(torch, self._config.generator.dtype)
        self._staging = Staging(parameters, copies, dtype, self._config.weight_sync.slice_mb << 20)
        with quiet_rdma():
            return self._staging.register()

    @endpoint
    @fallible
    async def publish(self) -> float:
        """Pack this rank's shards for the readers; answers with the seconds it took."""
        began = time.perf_counter()
        self._staging.pack()
        return time.perf_counter() - began

    @endpoint
    @fallible
    async def close(self) -> None:
        self._policy.close()
