"""One critic rank: a model with a value head, its own optimizer and schedule, checkpointed beside the policy."""

import numpy as np

from titan_rl.actors.titan.model import TitanModel
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.phase import Phase, Schedule
from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.types import Batch, StepStats


class Critic(TitanModel):
    def __init__(self, config: Config, shape: ModelShape) -> None:
        super().__init__(config, shape.with_value_head(), config.critic.parallelism)
        self._objectives = Objectives(self, config)
        self._phase: Phase | None = None

    def begin(self, folder: str, at: int, part: SnapshotPart | None = None) -> None:
        """Start from the weights in `folder`, or resume at the step that the policy stands at, or from a snapshot."""
        self.close()
        if at == 0 and part is None:
            judges = (
                shape_of_folder(folder, "critic.hf_assets_path").head == "value"
            )  # a reward model: its head is kept
            self.read(folder, head=judges)
            if not judges:
                self.zero_value_head()
        critic = self.config.critic
        schedule = Schedule(
            lr=critic.lr, steps=self.config.training.steps, warmup_steps=critic.warmup_steps, decay_ratio=0.0
        )
        self._phase = Phase(self, schedule, folder=f"{self.config.checkpoint.folder}/critic", at=at, part=part)

    def scores(self, batch: Batch) -> list[np.ndarray]:
        """Values, place by place."""
        found = [self.score(rows) for rows in batch.microbatches]
        self.reshard()
        return found

    def step(self, batches: list[Batch]) -> StepStats:
        return self._in_phase().step(batches, self._objectives.value)

    def save(self, step: int) -> None:
        self._in_phase().save(step, "{}")

    def snapshot(self, step: int, part: SnapshotPart) -> int:
        return self._in_phase().snapshot(step, "{}", part)

    def close(self) -> None:
        if self._phase is not None:
            self._phase.close()

    def _in_phase(self) -> Phase:
        if self._phase is None:
            raise RuntimeError("the critic has not begun: call begin() before step() or save()")
        return self._phase
