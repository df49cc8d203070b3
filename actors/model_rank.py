"""One rank of the trainer, the critic or a frozen role as a Monarch actor: thin endpoints over RoleModel and Staging.

The controller imports this module to spawn the actor; torch and TorchTitan are imported in `start`, on the rank.
"""

import inspect
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, endpoint

from titan_rl.actors import meeting
from titan_rl.actors.endpoint import fallible, quiet, quiet_rdma, show_spans_to_profilers
from titan_rl.actors.imports import compile_deferred, without_gc
from titan_rl.config.auto import compiles
from titan_rl.config.sections import Config, ParallelismSection, WeightSyncSection
from titan_rl.wire.gpus import PLANNED
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import needed_part
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import Recorded, span
from titan_rl.wire.types import Batch, PhaseName, RoleName
from titan_rl.wire.weight_plan import Copy, Shard
from titan_rl.wire.weight_source import Offer

if TYPE_CHECKING:
    import numpy as np

    from titan_rl.actors.sync.staging import Staging


def verb(method: Any) -> Any:
    """Make a method an endpoint whose failure fails its call, and nothing else. Of several policies, the call names the
    one whose adapters the model has meanwhile."""

    @wraps(method)
    async def of_policy(self: Any, *arguments: Any, policy: str = "") -> Any:
        if policy:
            self._model.use(policy)
        return await method(self, *arguments)

    signature = inspect.signature(method)  # Monarch checks a call's arguments against it
    policy = inspect.Parameter("policy", inspect.Parameter.KEYWORD_ONLY, default="")
    vars(of_policy)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), policy])
    return endpoint(fallible(of_policy))


class ModelRank(Actor):
    def __init__(
        self,
        role: RoleName,
        config: Config,
        shape: ModelShape,
        parallelism: ParallelismSection,
        policies: Mapping[str, Config] | None = None,
    ) -> None:
        self._given = role, config, shape, parallelism, policies
        self._stagings: dict[str, Staging] = {}  # by policy
        self._packed: dict[str, tuple[PhaseName, int]] = {}  # by policy: phase and step of the weights packed last

    @verb
    async def open_meeting(self) -> str:
        """Rank 0 of a mesh that spans hosts. Listen where the ranks will meet; return the address."""
        return meeting.listen()

    @verb
    async def start(self, met_at: str) -> int:
        """Build the model; return the bytes of parameters that this rank holds. `met_at`: the address at which the
        ranks meet, if they are on several hosts."""
        if met_at:
            meeting.meet_at(met_at)
        else:
            meeting.be_reachable()
        config = self._given[1]
        compiled = compiles(config, os.environ.get(PLANNED, "cpu"))
        with without_gc(), nullcontext() if compiled else compile_deferred():
            from titan_rl.actors.titan.role_model import RoleModel

        quiet()
        show_spans_to_profilers(config.profiling.enable_profiling)
        self._model = RoleModel(*self._given)
        return self._model.nbytes

    @verb
    async def load_weights(self, folder: str, frozen_role: str) -> None:
        self._model.load_weights(folder, frozen_role)

    @verb
    async def begin_phase(self, at: int | SnapshotPart, phase: PhaseName) -> tuple[int, str]:
        """Return the step that the phase resumes after, and the controller's state saved with that step."""
        state = self._model.begin_phase(phase, at)
        return state.step, state.controller

    @verb
    async def step(self, batches: list[Batch]) -> StepStats:
        return self._model.step(batches)

    @verb
    async def accumulate(self, part: Batch) -> None:
        self._model.accumulate(part)

    @verb
    async def update(self, whole: Batch, divisor: float) -> StepStats:
        return self._model.phase.update(whole, divisor)

    @verb
    async def scores(
        self, batch: Batch, temperature: float, frozen_role: str, top: int
    ) -> "tuple[list[np.ndarray], int]":
        """Return each place's log-prob or value, or entries of the `top` tokens; and the checksum of frozen weights."""
        with span("scores", weights=frozen_role or "own"):
            return self._model.scores(batch, temperature, frozen_role, top)

    @verb
    async def save(self, step: int, controller: str, on_disk: bool) -> None:
        with span("save", step=step):
            self._model.phase.save(step, controller, on_disk=on_disk)

    @verb
    async def wait_for_saving(self) -> None:
        self._model.phase.wait_for_saving()

    @verb
    async def snapshot(self, part: SnapshotPart, step: int, controller: str) -> int:
        return self._model.phase.snapshot(step, controller, part)

    @verb
    async def pixel_sums(self, images: Sequence[str]) -> list[str]:
        return self._model.pixel_sums(images)

    @verb
    async def unsound(self) -> list[str]:
        return self._model.unsound()

    @verb
    async def export(self, folder: str) -> None:
        self._model.export(folder)

    @verb
    async def export_added(self, folder: str) -> None:
        self._model.export_added(folder)

    @verb
    async def shards(self) -> list[Shard]:
        """Return the rectangles of tensors that this rank holds: the trainer's half of the weight plan."""
        return self._model.held

    @verb
    async def stage(
        self, copies: Mapping[int, tuple[Copy, ...]], places: Collection[str], sync: WeightSyncSection
    ) -> dict[int, Offer]:
        """Allocate this rank's staging memory for readers at these places; return where each finds its bytes."""
        import torch

        from titan_rl.actors.sync.staging import Staging
        from titan_rl.actors.sync.transport import is_remote

        model = self._model
        staging = self._stagings[model.policy_name] = Staging(
            model.by_hf_name,
            copies,
            getattr(torch, model.config.generator.dtype),
            block_bytes=sync.block_kb << 10,
            checksums=sync.verify != "off" or sync.delta,
            view=model.packed,
        )
        with quiet_rdma():
            remote = any(is_remote(place, sync.transport) for place in places)
            return staging.offer(remote=remote, how=sync.transport)

    @verb
    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, note: Any = None
    ) -> tuple[dict[int, Manifest], float] | None:
        """Pack this rank's shards into a slot; return a manifest per reader, and the seconds it took. With `again`, the
        last packed weights are packed once more; return None if they have changed since. With a note,
        begin to send them."""
        policy = self._model.policy_name
        staging = self._stagings[policy]
        if again and self._packed.get(policy) != self._model.phase_step:
            return None
        if again:
            staging.forget_frozen()
        began, self._packed[policy] = time.perf_counter(), self._model.phase_step
        with span("publish", version=version):
            manifests = staging.pack(version, slot, serial)
        if note is not None:
            staging.announce(slot, serial, note, self._model.config.comm.train_timeout_seconds / 2)
        if self._model.config.placement.kind == "colocated":
            self._model.release_memory()  # before engines on the same device wake and take these weights
        return manifests, time.perf_counter() - began

    @verb
    async def served(self, batch: Batch | None, call: str, *arguments: Any) -> Any:
        """Carry out a call of a client that trains its models here, with a batch if it takes one."""
        self._served = getattr(self, "_served", None) or needed_part("served models", "serve")(self._model)
        method = getattr(self._served, call)
        return method(*arguments) if batch is None else method(batch, *arguments)

    @verb
    async def spans(self) -> Recorded:
        return span.take()

    @verb
    async def close(self) -> None:
        self._model.close()
