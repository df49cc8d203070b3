"""One trainer rank: a TorchTitan model, the phases of optimization that it goes through, and weights swapped in for it.

Policy ── TitanModel, sharded by FSDP2 / HSDP / TP
  ├─ Phase "cold_start", then "rl"
  └─ FrozenWeights "reference", "teacher"       where these have no mesh of their own
"""

from typing import Literal

import numpy as np

from titan_rl.actors.titan.model import FrozenWeights, TitanModel
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.phase import Objective, Phase, Schedule, TrainState
from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.types import Batch, PhaseName, StepStats

Weights = Literal["policy", "reference", "teacher"]


class Policy(TitanModel):
    def __init__(self, config: Config, shape: ModelShape) -> None:
        super().__init__(config, shape, config.parallelism)
        if folder := config.model.hf_assets_path:
            self.read(folder, head=shape.head == "lm")
            self.zero_value_head()
        else:
            self.initialize()
        self._objectives = Objectives(self, config)
        self._frozen: dict[str, FrozenWeights] = {}
        self._phase: Phase | None = None
        self._phase_name: PhaseName = "rl"

    def begin(self, name: PhaseName, part: SnapshotPart | None = None) -> TrainState:
        """Start or resume a phase on the current weights, or go on from a snapshot of it."""
        if self._phase is not None:
            self._phase.close()
        folder = self.config.checkpoint.folder
        if name == "cold_start":
            folder += "/cold_start"
        self._phase, self._phase_name = Phase(self, self._schedule(name), folder=folder, part=part), name
        return self._phase.state

    @property
    def at(self) -> tuple[PhaseName, int]:
        """Which weights these are: those after so many steps of a phase."""
        return self._phase_name, self._in_phase().state.step

    def _schedule(self, name: PhaseName) -> Schedule:
        cold, s = self.config.cold_start, self.config.lr_scheduler
        if name == "cold_start":
            return Schedule(lr=cold.lr, steps=cold.steps, warmup_steps=cold.warmup_steps, decay_ratio=cold.decay_ratio)
        return Schedule(
            lr=self.config.optimizer.lr,
            steps=self.config.training.steps,
            warmup_steps=s.warmup_steps,
            decay_ratio=s.decay_ratio,
            decay_type=s.decay_type,
            min_lr_factor=s.min_lr_factor,
        )

    def step(self, batches: list[Batch]) -> StepStats:
        return self._in_phase().step(batches, self._objective)

    def accumulate(self, part: Batch) -> None:
        self._in_phase().accumulate(part, self._objective)

    def update(self, whole: Batch, divisor: float) -> StepStats:
        return self._in_phase().update(whole, divisor)

    @property
    def _objective(self) -> Objective:
        kind = "supervised" if self._phase_name == "cold_start" else self.config.algorithm.kind
        return self._objectives.named(kind)

    def freeze(self, role: Weights, folder: str) -> None:
        """Keep the folder's weights beside the trained ones, for `scores`."""
        self._settle()
        self._frozen[role] = FrozenWeights(self, folder)

    def scores(self, batch: Batch, weights: Weights, temperature: float) -> tuple[list[np.ndarray], int]:
        """Each place's log-prob under the policy, or under weights frozen before; and, of those, the checksum."""
        if weights == "policy":
            found = [self.score(rows, temperature=temperature) for rows in batch.microbatches]
            self.reshard()
            return found, 0
        self._settle()
        with self._frozen[weights].swapped_in() as frozen:
            return [frozen.score(rows, temperature=temperature) for rows in batch.microbatches], frozen.checksum()

    def save(self, step: int, controller: str) -> None:
        self._in_phase().save(step, controller)

    def snapshot(self, step: int, controller: str, part: SnapshotPart) -> int:
        return self._in_phase().snapshot(step, controller, part)

    def export(self, folder: str) -> None:
        self.write(folder)
        if self._phase is not None:
            self._phase.wait_for_saving()

    def close(self) -> None:
        if self._phase is not None:
            self._phase.close()

    def _settle(self) -> None:
        """The weights are about to be exchanged in place."""
        if self._phase is not None:
            self._phase.settle()

    def _in_phase(self) -> Phase:
        if self._phase is None:
            raise RuntimeError("the policy is in no phase yet: call begin() before step() or save()")
        return self._phase
