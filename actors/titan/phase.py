"""A phase of one model's optimization: optimizer, schedule, checkpoints, snapshots, and the step itself."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import (
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state

from titan_rl.actors.endpoint import busy_seconds
from titan_rl.actors.titan.bfloat16_moments import Bfloat16Moments
from titan_rl.actors.titan.copies import copies_of
from titan_rl.actors.titan.entropy_control import ENTROPY_CONTROL, EntropyControl
from titan_rl.actors.titan.experts import take_routed
from titan_rl.actors.titan.instruments import Instruments
from titan_rl.actors.titan.model import AveragedWeights, DeviceRows, TitanModel
from titan_rl.actors.titan.private import end_checkpoint_process
from titan_rl.actors.titan.reduction import Reduction, finish
from titan_rl.actors.titan.rotary_order import HALVES, of_earlier_version, reorder
from titan_rl.actors.titan.spec import adapter
from titan_rl.actors.titan.summed_writer import SummedCheckpoints, has_state
from titan_rl.kernels.statistics import Statistics
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import span
from titan_rl.wire.types import Batch

AVERAGE = "teacher_average"
"""Key of the policy's moving average in checkpoints and snapshots."""

Objective = Callable[[DeviceRows, Batch], tuple[torch.Tensor, Statistics]]


@dataclass(slots=True)
class TrainState:
    """Part of each checkpoint, so that the controller's state can never disagree with the weights."""

    step: int = 0
    controller: str = "{}"  # JSON: data cursors
    rotary: str = HALVES  # order of q's and k's rows; "" while a checkpoint without this key is loaded

    def state_dict(self) -> dict[str, Any]:
        order = {"rotary": self.rotary} if self.rotary else {}
        return {"step": self.step, "controller": self.controller, **order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.controller = state_dict["step"], state_dict["controller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate over a phase's steps. It changes once per step, not once per update."""

    lr: float
    steps: int
    warmup_steps: int
    decay_ratio: float
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: float = 0.0

    def schedulers(self, optimizers: OptimizersContainer, at: int = 0) -> LRSchedulersContainer:
        """Build TorchTitan's. They know no rate beyond the last step, where a phase may resume that makes no more."""
        config = LRSchedulersContainer.Config(
            warmup_steps=min(self.warmup_steps, self.steps),
            decay_ratio=self.decay_ratio,
            decay_type=self.decay_type,
            min_lr_factor=self.min_lr_factor,
        )
        return config.build(optimizers=optimizers, training_steps=max(self.steps, at, 1))


class Phase:
    def __init__(
        self,
        model: TitanModel,
        schedule: Schedule,
        *,
        folder: str,
        at: int | SnapshotPart,
        entropy: EntropyControl | None = None,
        average: AveragedWeights | None = None,
    ) -> None:
        """Resume from the checkpoint of step `at` in `folder`, or from this rank's part of a snapshot; 0 starts from
        scratch. `average` follows each step, and is saved too."""
        self._model, self._average = model, average
        self._folder = Path(model.config.job.dump_folder, folder)
        model.discard_gradients()  # an interrupted phase may have accumulated some
        config = model.config
        assert config.checkpoint.async_mode != "auto"  # resolved
        self._syncs_each = config.training.gradient_sync == "microbatch"
        self._optimizers = self._optimizer(schedule.lr)
        self._schedulers = schedule.schedulers(self._optimizers, at if isinstance(at, int) else 0)
        self._statistics: list[Statistics] = []  # one per microbatch accumulated for the next update
        self._seconds = self._busy = 0.0  # in the step so far
        self.state, self.entropy = TrainState(), entropy
        states = {TRAIN_STATE: self.state, ENTROPY_CONTROL: entropy, AVERAGE: average}
        states = {name: state for name, state in states.items() if state is not None}
        self._checkpoints = SummedCheckpoints.Config(
            enable=config.checkpoint.enable,
            folder=folder,
            interval=1,  # the controller decides when
            keep_latest_k=0,  # the controller purges: it knows all models
            last_save_model_only=False,
            async_mode=config.checkpoint.async_mode,
        ).build(
            dataloader=None,
            model_parts=[model.model],
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            states=dict(states),
            sd_adapter=adapter(model.spec, config.model.hf_assets_path or None),
            base_folder=config.job.dump_folder,
        )
        trained = model.adaptation.state(model.model)
        if config.checkpoint.enable:
            self._checkpoints.states[MODEL] = trained
        # The same states as in a checkpoint. The manager has none where checkpoint.enable is off.
        self._copies = copies_of(
            {
                MODEL: trained,
                OPTIMIZER: self._optimizers,
                LR_SCHEDULER: self._schedulers,
                **states,
            }
        )
        if isinstance(at, SnapshotPart):
            self._copies.restore(at)
        elif at > 0:
            self._load_checkpoint(at)
        for scheduler in self._schedulers:  # the optimizers have the rates of a step 0
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
        self._instruments = Instruments(model, folder, self.state.step)

    def step(self, batches: Sequence[Batch], objective: Objective) -> StepStats:
        """Take one optimizer update per batch, in order."""
        updates = []
        with span("step", step=self.state.step + 1):
            for batch in batches:
                self.accumulate(batch, objective)
                updates.append(self._update(batch, 1.0))
        return self._end(updates)

    def update(self, whole: Batch, divisor: float) -> StepStats:
        """Take a step of one update, which was accumulated in parts. Their losses are still to be divided by `divisor`;
        `whole` has the counts of all parts."""
        with span("step", step=self.state.step + 1):
            return self._end([self._update(whole, 1 / divisor)])

    def accumulate(self, batch: Batch, objective: Objective) -> None:
        """Run forward and backward over one update's microbatches, or over a streamed part of them."""
        last = len(batch.microbatches) - 1
        self._instruments.unshared += batch.unshared
        with self._timed():
            for i, rows in enumerate(batch.microbatches):
                self._model.sync_gradients(i == last or self._syncs_each)
                self._instruments.tokens += rows.tokens.size
                with span("forward"):
                    loss, measured = objective(self._model.placed(rows), batch)
                with span("backward"):
                    self._model.backward(loss)
                self._statistics.append(measured)

    def _end(self, updates: Sequence[Reduction]) -> StepStats:
        lr = float(self._schedulers.schedulers[0].get_last_lr()[0])
        self._schedulers.step()
        self.state.step += 1
        if self._average is not None:  # `_update` has settled: no copy of it is in progress
            self._average.update()
        seconds, busy = self._seconds, self._busy
        self._seconds = self._busy = 0.0
        hardware = self._instruments.end_step(self.state.step, seconds)
        stats = finish(updates, lr=lr, seconds=seconds, busy=busy)
        if self.entropy:
            stats.metrics["entropy_coef"] = self.entropy.coef
            self.entropy.observe(stats.metrics)
        return replace(stats, hardware=hardware)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, before = time.perf_counter(), busy_seconds()
        yield
        self._seconds += time.perf_counter() - began
        self._busy += busy_seconds() - before

    def _update(self, batch: Batch, scale: float) -> Reduction:
        with self._timed():
            with span("reduce"):
                self._model.scale_gradients(scale)
                mesh = self._model.dims.get_optional_mesh("loss")
                parts = self._model.row_parts.count if self._model.row_parts else 1
                reduction = Reduction.of(self._statistics, batch, mesh, scale, parts=parts)
                self._statistics = []
                routed = take_routed(self._model.model, self._model.dims)
                grad_norm = self._model.clip_gradients(self._model.config.training.max_norm)
            with span("optimizer"):
                self.settle()
                # The norm is the mesh's, so all ranks agree. One that is not finite would spoil the weights; one of 0
                # taught nothing, and Adam would still move them by its moments.
                if 0 < grad_norm < math.inf:
                    self._optimizers.step()
                self._optimizers.zero_grad()
        return replace(reduction, grad_norm=grad_norm, routed=routed)

    def save(self, step: int, controller: str, *, on_disk: bool = False) -> None:
        """Write a checkpoint. It is atomic: one without DCP's .metadata, which is written last, does not count. An
        asynchronous one is written while training continues, unless it must be `on_disk` first."""
        self._stands_at(step, controller)
        self.wait_for_saving()
        if dist.get_rank() == 0:  # after a rewind this step may be written again, and does not count until it is whole
            (self._folder / f"step-{step}" / ".metadata").unlink(missing_ok=True)
        self._checkpoints.save(step)
        if on_disk:
            self.wait_for_saving()

    def _load_checkpoint(self, step: int) -> None:
        folder = self._folder / f"step-{step}"
        earlier = of_earlier_version(folder)
        self.state.rotary = "" if earlier else HALVES
        if self.entropy and not has_state(folder, f"{ENTROPY_CONTROL}.coef"):
            self._checkpoints.exclude_from_loading = [ENTROPY_CONTROL]  # it was saved without a target
        self._checkpoints.load(step=step)
        self.state.rotary = HALVES
        if earlier:
            states = [optimizer.state for optimizer in self._optimizers]
            reorder(self._model.shape, self._model.model.named_parameters(), states)

    def snapshot(self, step: int, controller: str, part: SnapshotPart) -> int:
        """Begin to copy the content of a checkpoint into `part`; return its bytes. Forward and backward of the next
        step may run during the copy."""
        self._stands_at(step, controller)
        return self._copies.begin(part)

    def settle(self) -> None:
        """Wait until a snapshot or checkpoint is copied. Call it before anything changes the model or its optimizer."""
        self._checkpoints.maybe_wait_for_staging()
        self._copies.wait()

    def _stands_at(self, step: int, controller: str) -> None:
        if self.state.step != step:
            raise RuntimeError(f"expected to save step {self.state.step}, which the optimizer has taken, found {step}")
        self.state.controller = controller

    def wait_for_saving(self) -> None:
        """Block until the last checkpoint is on disk; raise if it failed."""
        try:
            self._checkpoints.maybe_wait_for_saving()
        finally:
            self._checkpoints.save_future = None  # TorchTitan keeps a failed one, and would raise at every later save

    def close(self) -> None:
        try:
            self.wait_for_saving()
        except BaseException as error:  # it does not count; the next phase may begin
            print(f"the last checkpoint failed: {type(error).__name__}: {error}", file=sys.stderr)
        self._checkpoints.close()
        end_checkpoint_process()
        self._copies.close()
        self._instruments.stop_profiler()

    def _optimizer(self, lr: float) -> OptimizersContainer:
        o = self._model.config.optimizer
        arguments = {"lr": lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        group = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=arguments)
        optimizers = OptimizersContainer.Config(param_groups=[group], implementation="fused").build(
            model_parts=[self._model.model]
        )
        if o.moments == "bfloat16":
            optimizers.optimizers = [Bfloat16Moments(each.param_groups) for each in optimizers]
        # Otherwise the first state_dict() creates the state by a step of zeros, which the bias correction would count.
        for optimizer in optimizers:
            init_optim_state(optimizer)
            for state in optimizer.state.values():
                state["step"].zero_()
            optimizer.register_load_state_dict_pre_hook(with_own_settings)
        return optimizers


def with_own_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the settings of `optimizer`, which are the config's: a resumed run may change them."""
    settings_of_groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    groups = [saved | settings for saved, settings in zip(state["param_groups"], settings_of_groups, strict=True)]
    return {**state, "param_groups": groups}
