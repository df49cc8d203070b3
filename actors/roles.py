"""Monarch endpoints of the models beside the policy: frozen ones that only score, and the critic.

Like trainer.py, imported by the controller: torch and TorchTitan are imported on the rank.
"""

from typing import TYPE_CHECKING

from monarch.actor import Actor, endpoint

from titan_rl.actors.fallible import fallible
from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import Recorded, span
from titan_rl.wire.types import Batch, StepStats

if TYPE_CHECKING:
    import numpy as np


class Frozen(Actor):
    """Reference, teacher or reward model on a mesh of its own. It has no optimizer, and no verb that changes it."""

    def __init__(self, config: Config, shape: ModelShape, parallelism: ParallelismSection) -> None:
        self._config, self._shape, self._parallelism = config, shape, parallelism

    @endpoint
    @fallible
    async def start(self) -> int:
        """Build the model; answers with the bytes of parameters that this rank holds."""
        from titan_rl.actors.quiet import quiet
        from titan_rl.actors.titan.model import TitanModel

        quiet()
        self._model = TitanModel(self._config, self._shape, self._parallelism)
        self._model.model.eval().requires_grad_(False)
        return self._model.nbytes

    @endpoint
    @fallible
    async def load(self, folder: str) -> None:
        self._model.read(folder)

    @endpoint
    @fallible
    async def scores(self, batch: Batch, temperature: float) -> "tuple[list[np.ndarray], int]":
        """Each place's log-prob or score, and the checksum of the weights that said so."""
        with span("scores"):
            found = [self._model.score(rows, temperature=temperature) for rows in batch.microbatches]
            return found, self._model.checksum()

    @endpoint
    @fallible
    async def spans(self) -> Recorded:
        """What this process recorded since it was asked before."""
        return span.take()

    @endpoint
    @fallible
    async def close(self) -> None:
        """Nothing is open; the mesh closes like every other."""


class CriticRank(Actor):
    def __init__(self, config: Config, shape: ModelShape) -> None:
        self._config, self._shape = config, shape

    @endpoint
    @fallible
    async def start(self) -> int:
        from titan_rl.actors.quiet import quiet
        from titan_rl.actors.titan.critic import Critic

        quiet()
        self._critic = Critic(self._config, self._shape)
        return self._critic.nbytes

    @endpoint
    @fallible
    async def begin(self, part: SnapshotPart | None, folder: str, at: int) -> None:
        self._critic.begin(folder, at, part)

    @endpoint
    @fallible
    async def scores(self, batch: Batch) -> "list[np.ndarray]":
        with span("scores"):
            return self._critic.scores(batch)

    @endpoint
    @fallible
    async def step(self, batches: list[Batch]) -> StepStats:
        return self._critic.step(batches)

    @endpoint
    @fallible
    async def save(self, step: int) -> None:
        with span("save", step=step):
            self._critic.save(step)

    @endpoint
    @fallible
    async def snapshot(self, part: SnapshotPart, step: int, controller: str) -> int:
        """Begin to copy this rank's state; answers with its bytes. The controller's part is the policy's to keep."""
        return self._critic.snapshot(step, part)

    @endpoint
    @fallible
    async def spans(self) -> Recorded:
        """What this process recorded since it was asked before."""
        return span.take()

    @endpoint
    @fallible
    async def close(self) -> None:
        self._critic.close()
