"""One role's model on one rank: the weights it starts from, the phase it is trained in, and frozen weights beside them.

RoleModel ── TitanModel, sharded by FSDP2 / HSDP / TP
  └─ Policy                                       one; trainer: also several, whose adapters an AdapterBank exchanges
       ├─ Phase                                   trainer: "cold_start", then "rl"; critic: "rl"; frozen roles: none
       ├─ FrozenWeights "reference", "teacher"    trainer only, for roles without a separate mesh
       └─ AveragedWeights "average"               trainer only, of the policy in RL, with algorithm.teacher_weights
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from titan_rl.actors.titan.entropy_control import EntropyControl
from titan_rl.actors.titan.model import AveragedWeights, FrozenAdapters, FrozenWeights, TitanModel, local, shared_keys
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.phase import Objective, Phase, Schedule, TrainState
from titan_rl.config.auto import resolved
from titan_rl.config.sections import Config, LoraSection, ParallelismSection
from titan_rl.wire.checkpoint_sums import FOLDER
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.parts import needed_part
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.types import Batch, PhaseName, RoleName

COLD_START_WARMUP_STEPS = 20


class Bank(Protocol):
    """Exchanges the adapters of several policies. One policy's are in use."""

    in_use: str

    def add(self, name: str, seed: int | None = None) -> None: ...
    def use(self, name: str) -> None: ...


@dataclass(slots=True)
class Policy:
    """What is trained on the model's parameters: all of it that is not in the parameters."""

    config: Config
    phase: Phase | None = None
    phase_name: PhaseName = "rl"
    frozen: dict[str, FrozenWeights] = field(default_factory=dict)

    def close(self) -> None:
        if self.phase is not None:
            self.phase.close()
            self.phase = None


class RoleModel(TitanModel):
    def __init__(
        self,
        role: RoleName,
        config: Config,
        shape: ModelShape,
        parallelism: ParallelismSection,
        policies: Mapping[str, Config] | None = None,
    ) -> None:
        """`policies`: the config of each, if the model has the adapters of several. `use` chooses one."""
        if role != "trainer":
            config = replace(config, lora=LoraSection())
        super().__init__(config, shape, parallelism)
        self.role: RoleName = role
        if role == "trainer":
            self.begin()
        elif role != "critic":
            self.model.eval().requires_grad_(False)
        self._policies = {"": Policy(config)}
        self._bank: Bank | None = None
        if policies:
            own = {name: resolved(each, self.device.type) for name, each in policies.items()}
            self._policies = {name: Policy(each) for name, each in own.items()}
            (first, each), *others = own.items()
            self.adaptation.begin(self.model, each.debug.seed)
            self._bank = bank = needed_part("adapters of policies", "policies")(self, first)
            for name, each in others:
                bank.add(name, each.debug.seed)
            self.config = self._policy.config

    def use(self, policy: str) -> None:
        """Choose the policy of the next verbs: its adapters with their gradients, its config and its phase. Verbs are
        whole forwards, backwards and updates, so policies whose verbs interleave compute as if each were alone."""
        assert self._bank is not None, "the model has one policy"
        if policy != self._bank.in_use:
            self._settle()
            self._bank.use(policy)
            self.config = self._policy.config

    @property
    def policy_name(self) -> str:
        """Return the name of the policy in use; "" if there is only one."""
        return self._bank.in_use if self._bank is not None else ""

    @property
    def _policy(self) -> Policy:
        return self._policies[self.policy_name]

    def load_weights(self, folder: str, frozen_role: str = "") -> None:
        """Read a Hugging Face folder into the model; or keep its weights next to the model's own, under the name
        `frozen_role` that `scores` takes."""
        if frozen_role:
            self._settle()
            if frozen_role == "reference" and self.adaptation.freezes:
                begun = folder if self.config.cold_start.steps else ""  # no adapters, or the cold start's
                self._policy.frozen[frozen_role] = FrozenAdapters(self, begun)
            else:
                self._policy.frozen[frozen_role] = FrozenWeights(self, folder)
            return
        self.close()
        head = True
        if self.role == "critic":
            head = shape_of_folder(folder, "critic.hf_assets_path").head == "value"  # a reward model: its head is kept
        self.read(folder, head=head)
        if not head:
            self.zero_value_head()

    def begin_phase(self, name: PhaseName, at: int | SnapshotPart) -> TrainState:
        """Begin a phase on the current weights (at=0), or resume it from a checkpoint's step or from a snapshot."""
        self._policy.close()
        inner = "/critic" if self.role == "critic" else "/cold_start" if name == "cold_start" else ""
        folder = FOLDER + inner
        schedule, algorithm, policy = schedule_of(self.role, self.config, name), self.config.algorithm, self._policy
        entropy = average = None
        if self.role == "trainer" and name == "rl" and algorithm.kind == "rl":
            if algorithm.entropy_target > 0:
                entropy = EntropyControl(algorithm)
            if algorithm.averages:
                average = policy.frozen["average"] = AveragedWeights(self, algorithm.teacher_decay)
        policy.phase = Phase(self, schedule, folder=folder, at=at, entropy=entropy, average=average)
        policy.phase_name = name
        return policy.phase.state

    @property
    def phase_step(self) -> tuple[PhaseName, int]:
        """The phase, and the steps taken in it: they identify the current weights."""
        return self._policy.phase_name, self.phase.state.step

    def step(self, batches: list[Batch]) -> StepStats:
        return self.phase.step(batches, self._objective)

    def accumulate(self, part: Batch) -> None:
        self.phase.accumulate(part, self._objective)

    @property
    def _objective(self) -> Objective:
        kind = "supervised" if self._policy.phase_name == "cold_start" else self.config.algorithm.kind
        objectives = Objectives(self, self.config, self.phase.entropy)
        return objectives.named("value" if self.role == "critic" else kind)

    def scores(
        self, batch: Batch, temperature: float, frozen_role: str = "", top: int = 0
    ) -> tuple[list[np.ndarray], int]:
        """Return each place's log-prob or value, or entries of the `top` tokens, under the model's own weights or those
        of `frozen_role`; and the checksum of the weights if they are frozen, else 0."""
        if frozen_role:
            self._settle()
            with self._policy.frozen[frozen_role].swapped_in():
                return self._scores(batch, temperature, top), 0 if frozen_role == "average" else self.checksum()
        scores = self._scores(batch, temperature, top)
        if self.role in ("trainer", "critic"):
            self.reshard()
            return scores, 0
        return scores, self.checksum()

    def _scores(self, batch: Batch, temperature: float, top: int) -> list[np.ndarray]:
        return [self.score(rows, temperature=temperature, top=top) for rows in batch.microbatches]

    def export(self, folder: str) -> None:
        self.write(folder)
        if self._policy.phase is not None:
            self._policy.phase.wait_for_saving()

    def export_added(self, folder: str) -> None:
        """Write the added parameters alone, such as adapters, into a folder that exists."""
        self.write_added(folder)

    def unsound(self) -> list[str]:
        """Return the tensors of which this rank has a value that is not finite."""
        self.reshard()
        return [name for name, p in self.tensors if not bool(torch.isfinite(local(p)).all())]

    def close(self) -> None:
        for policy in self._policies.values():
            policy.close()

    def _settle(self) -> None:
        """Wait for a snapshot in progress: the weights are about to be exchanged in place."""
        if self._policy.phase is not None:
            self._policy.phase.settle()

    @property
    def phase(self) -> Phase:
        if self._policy.phase is None:
            raise RuntimeError(f"the {self.role} has begun no phase: call begin_phase() before step() or save()")
        return self._policy.phase


def schedule_of(role: RoleName, config: Config, phase: PhaseName) -> Schedule:
    """Return the learning rate of a role's phase."""
    if role == "critic":
        return shared_keys(Schedule, config.critic, steps=config.training.steps, decay_ratio=0.0)
    if phase == "cold_start":
        cold = config.cold_start
        return Schedule(lr=cold.lr, steps=cold.steps, warmup_steps=COLD_START_WARMUP_STEPS, decay_ratio=0.0)
    return shared_keys(Schedule, config.lr_scheduler, lr=config.optimizer.lr, steps=config.training.steps)
