"""One trainer rank as a Monarch actor: thin endpoints over Policy and Staging.

The controller imports this module to spawn the actor, so torch and TorchTitan are imported in `start`, on the rank.
"""

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from monarch.actor import Actor, endpoint

from titan_rl.actors.fallible import fallible
from titan_rl.config.sections import Config, WeightSyncSection
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import Recorded, span
from titan_rl.wire.types import Batch, PhaseName, StepStats
from titan_rl.wire.weight_plan import Copy, Shard

if TYPE_CHECKING:
    import numpy as np

    from titan_rl.actors.sync.transport import Offer


class Trainer(Actor):
    def __init__(self, config: Config, shape: ModelShape) -> None:
        self._config = config
        self._shape = shape
        self._packed: tuple[PhaseName, int] | None = None  # which weights

    @endpoint
    @fallible
    async def start(self) -> int:
        """Build the model; answers with the bytes of parameters that this rank holds."""
        from titan_rl.actors.quiet import quiet
        from titan_rl.actors.titan.policy import Policy

        quiet()
        self._policy = Policy(self._config, self._shape)
        return self._policy.nbytes

    @endpoint
    @fallible
    async def begin(self, part: SnapshotPart | None, phase: PhaseName) -> tuple[int, str]:
        """Start or resume a phase, or go on from a snapshot: the step it stands at, and the controller's state saved
        with that step."""
        state = self._policy.begin(phase, part)
        return state.step, state.controller

    @endpoint
    @fallible
    async def step(self, batches: list[Batch]) -> StepStats:
        """One optimizer update a batch."""
        return self._policy.step(batches)

    @endpoint
    @fallible
    async def accumulate(self, part: Batch) -> None:
        """Forward and backward over a part of an update."""
        self._policy.accumulate(part)

    @endpoint
    @fallible
    async def update(self, whole: Batch, divisor: float) -> StepStats:
        """The optimizer update of what was accumulated."""
        return self._policy.update(whole, divisor)

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
        with span("scores", weights=weights):
            return self._policy.scores(batch, weights, temperature)

    @endpoint
    @fallible
    async def save(self, step: int, controller: str) -> None:
        with span("save", step=step):
            self._policy.save(step, controller)

    @endpoint
    @fallible
    async def snapshot(self, part: SnapshotPart, step: int, controller: str) -> int:
        """Begin to copy this rank's state; answers with its bytes."""
        return self._policy.snapshot(step, controller, part)

    @endpoint
    @fallible
    async def export(self, folder: str) -> None:
        self._policy.export(folder)

    @endpoint
    @fallible
    async def shards(self) -> list[Shard]:
        """Which rectangles of which tensors this rank holds: the trainer's half of the weight plan."""
        from titan_rl.actors.sync.staging import shards_of

        policy = self._policy
        return shards_of(policy.model.named_parameters(), policy.names, policy.rope_head_dims)

    @endpoint
    @fallible
    async def stage(
        self, copies: Mapping[int, tuple[Copy, ...]], places: Collection[str], sync: WeightSyncSection
    ) -> "dict[int, Offer]":
        """Allocate this rank's staging memory for readers at these places; answers where each finds its run."""
        import torch

        from titan_rl.actors.quiet import quiet_rdma
        from titan_rl.actors.sync.staging import Staging
        from titan_rl.actors.sync.transport import is_remote

        policy = self._policy
        parameters = {policy.names[name]: p for name, p in policy.model.named_parameters()}
        self._staging = Staging(
            parameters,
            copies,
            getattr(torch, self._config.generator.dtype),
            slice_bytes=sync.slice_mb << 20,
            block_bytes=sync.block_kb << 10,
            checksums=sync.verify != "off" or sync.delta,
        )
        with quiet_rdma():
            return self._staging.offer(remote=any(is_remote(place, sync.transport) for place in places))

    @endpoint
    @fallible
    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False
    ) -> tuple[dict[int, Manifest], float] | None:
        """Pack this rank's shards into a slot: what each reader's run now is, and the seconds it took. None: what was
        packed last is asked for `again`, and the weights are no more what they were."""
        if again and self._packed != self._policy.at:
            return None
        began, self._packed = time.perf_counter(), self._policy.at
        with span("publish", version=version):
            manifests = self._staging.pack(version, slot, serial)
        return manifests, time.perf_counter() - began

    @endpoint
    @fallible
    async def spans(self) -> Recorded:
        """What this process recorded since it was asked before."""
        return span.take()

    @endpoint
    @fallible
    async def close(self) -> None:
        self._policy.close()
