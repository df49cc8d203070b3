"""A stretch of optimization of one model: optimizer, schedule, checkpoints; and how one step of it goes."""

from titan_rl.actors import titan_cpu  # noqa: F401

# isort: split
# titan_cpu is imported for its patches, before any torchtitan import.
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import utils as dist_utils

from titan_rl.actors.model_spec import adapter
from titan_rl.actors.reduction import Reduction, finish
from titan_rl.actors.titan_model import DeviceRows, TitanModel
from titan_rl.kernels.statistics import Statistics
from titan_rl.types import Batch, StepStats

Objective = Callable[[DeviceRows, Batch], tuple[torch.Tensor, Statistics]]


@dataclass(slots=True)
class TrainState:
    """Saved inside each checkpoint, so that the controller's part can never disagree with the weights."""

    step: int = 0
    controller: str = "{}"  # JSON: data cursors

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "controller": self.controller}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.controller = state["step"], state["controller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate over a phase's steps. It moves once a step, however many updates the step has."""

    lr: float
    steps: int
    warmup_steps: int
    decay_ratio: float
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: float = 0.0


class Phase:
    def __init__(self, model: TitanModel, schedule: Schedule, *, folder: str, at: int | None = None) -> None:
        """Resumes from the latest checkpoint in `folder`, or from step `at`; 0 does not look."""
        self._model = model
        config = model.config
        self._optimizers = self._optimizer(schedule.lr)
        self._schedulers = LRSchedulersContainer.Config(
            warmup_steps=min(schedule.warmup_steps, schedule.steps),
            decay_ratio=schedule.decay_ratio,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        ).build(optimizers=self._optimizers, training_steps=max(schedule.steps, 1))
        self.state = TrainState()
        self._checkpoints = CheckpointManager.Config(
            enable=config.checkpoint.enable,
            folder=folder,
            interval=1,  # the controller decides when
            keep_latest_k=config.checkpoint.keep_latest_k,
            last_save_model_only=False,
        ).build(
            dataloader=None,
            model_parts=[model.model],
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            states={"train_state": self.state},
            sd_adapter=adapter(model.spec, config.model.hf_assets_path or None),
            base_folder=config.job.dump_folder,
        )
        if at is None:
            self._checkpoints.load()
        elif at > 0:
            self._checkpoints.load(step=at)

    def step(self, batches: Sequence[Batch], objective: Objective) -> StepStats:
        """One optimizer update a batch, in order."""
        began = time.perf_counter()
        lr = float(self._schedulers.schedulers[0].get_last_lr()[0])
        updates = [self._update(batch, objective) for batch in batches]
        self._schedulers.step()
        self.state.step += 1
        return finish(updates, lr=lr, seconds=time.perf_counter() - began)

    def _update(self, batch: Batch, objective: Objective) -> Reduction:
        statistics = []
        for rows in batch.microbatches:
            loss, measured = objective(DeviceRows.of(rows, self._model.device), batch)
            with self._model.context():
                loss.backward()
            statistics.append(measured)
        reduction = Reduction.of(statistics, batch, self._model.dims.get_optional_mesh("loss"))
        grad_norm = dist_utils.clip_grad_norm_(
            list(self._model.model.parameters()),
            self._model.config.training.max_norm,
            foreach=True,
            pp_mesh=self._model.dims.get_optional_mesh("pp"),
            ep_enabled=self._model.dims.ep_enabled,
        )
        self._checkpoints.maybe_wait_for_staging()
        self._optimizers.step()
        self._optimizers.zero_grad()
        return reduction.with_grad_norm(float(grad_norm))

    def save(self, step: int, controller: str) -> None:
        """Atomic: a checkpoint without DCP's .metadata, written last, does not count."""
        if self.state.step != step:
            raise RuntimeError(f"asked to save step {step}, but the optimizer has taken {self.state.step}")
        self.state.controller = controller
        self._checkpoints.save(step)

    def wait_for_saving(self) -> None:
        self._checkpoints.maybe_wait_for_saving()

    def close(self) -> None:
        self._checkpoints.maybe_wait_for_saving()
        self._checkpoints.close()

    def _optimizer(self, lr: float) -> OptimizersContainer:
        o = self._model.config.optimizer
        arguments = {"lr": lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        group = ParamGroupConfig(pattern=r".*", optimizer_name=o.name, optimizer_kwargs=arguments)
        return OptimizersContainer.Config(param_groups=[group], implementation=o.implementation).build(
            model_parts=[self._model.model]
        )
