"""The models beside the policy, seen from the controller: who says what of a step's samples, and who learns from it.

    samples ──scatter──> reference, teacher, critic, trainer ──gather──> the samples with one more column each

Frozen weights are named by a folder that nothing writes to, and watched by a checksum that comes with every answer.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_rl.batch.experience import minibatches
from titan_rl.batch.packing import divisor, pack, unpack
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.record.run_folder import Resume
from titan_rl.train.export import export
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.errors import RankFailed, RunError
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import Batch, PhaseName, Sample, StepStats

WHY = 300  # characters of an error


class Learner:
    def __init__(self, run: RunParts) -> None:
        self._config, self._setup, self._meshes, self._clock = run.config, run.setup, run.meshes, run.clock
        self._snapshots, self._incidents = run.snapshots, run.incidents
        self._phase: PhaseName = "rl"
        self._from: Snapshot | None = None
        self._failed_saves = 0  # in a row
        self._checksums: dict[str, list[int]] = {}
        self._held: list[Sample] = []  # of the step, until its update
        self._tokens = self._sequences = 0  # accumulated for the step's update

    async def resume(self, phase: PhaseName, resume: Resume) -> tuple[int, dict[str, Any]]:
        """Bring the trainers to where a phase resumes. Return that step, and what the controller kept there."""
        at, snapshot = resume.state(phase)
        self._phase, self._from = phase, snapshot
        self._held, self._tokens, self._sequences = [], 0, 0  # of a step that an earlier attempt did not finish
        self._snapshots.forget(but=snapshot)
        start, kept = await self._meshes.trainers.begin(phase, snapshot)
        assert start == at, f"the trainers resumed {phase} at step {start}, expected {at}"
        return start, json.loads(kept)

    async def begin(self, at: int) -> None:
        """Give every role its weights, as the algorithm begins or where it resumes."""
        algorithm, meshes = self._config.algorithm, self._meshes
        folder = ""
        if algorithm.needs_reference or (algorithm.needs_critic and not self._config.critic.hf_assets_path):
            folder = str(await self._anchor(at))
        if algorithm.needs_reference:
            await self._lend("reference", folder)
        if algorithm.needs_teacher:
            await self._lend("teacher", self._config.teacher.hf_assets_path)
        if meshes.reward_model is not None:
            await meshes.reward_model.load(self._config.reward_model.hf_assets_path)
        if meshes.critic is not None:
            await meshes.critic.begin(self._config.critic.hf_assets_path or folder, at, self._from)

    async def judge(self, samples: Sequence[Sample]) -> list[Sample]:
        """Every role's column, all roles at once."""
        algorithm = self._config.algorithm
        asked: dict[str, Awaitable[list[np.ndarray]]] = {}
        if algorithm.needs_reference:
            asked["reference"] = self._frozen("reference", samples)
        if algorithm.needs_teacher:
            asked["teacher"] = self._frozen("teacher", samples)
        if algorithm.kind == "rl" and algorithm.proximal == "trainer" and algorithm.updates > 1:
            asked["proximal"] = self._policy(samples)
        if self._meshes.critic is not None:
            asked["value"] = self._values(samples)
        if not asked:
            return list(samples)
        with self._clock("judge"):
            columns = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        return [s.with_columns(**{name: column[i] for name, column in columns.items()}) for i, s in enumerate(samples)]

    async def step(self, updates: Sequence[Sequence[Sample]]) -> StepStats:
        """Policy and critic, each on its mesh, at the same time; the critic's metrics join the policy's."""
        trainers, critic = self._meshes.trainers, self._meshes.critic
        with self._clock("train"):
            policy = trainers.step([self.batches(samples, trainers) for samples in updates])
            if critic is None:
                return await policy
            stats, learnt = await asyncio.gather(
                policy, critic.step([self.batches(samples, critic) for samples in updates])
            )
        own = {"value/loss": learnt.loss, "value/grad_norm": learnt.grad_norm, "value/lr": learnt.lr}
        stats.metrics.update(learnt.metrics | own)
        return replace(stats, skipped=stats.skipped + learnt.skipped)

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """Take a part of the step's samples. If the step is streamed, run forward and backward over them now."""
        if not self._config.training.stream_groups:
            self._held += samples
            return
        trainers = self._meshes.trainers
        with self._clock("train"):
            part = self.batches(samples, trainers, whole=False)
            await trainers.accumulate(part)
        self._tokens += part[0].tokens
        self._sequences += part[0].sequences

    async def update(self) -> StepStats:
        """Make the step's updates from what was accumulated."""
        if not self._config.training.stream_groups:
            samples, self._held = self._held, []
            return await self.step(minibatches(samples, self._config.algorithm))
        whole = Batch([], max(self._tokens, 1), max(self._sequences, 1))
        self._tokens = self._sequences = 0
        with self._clock("train"):
            aggregation = self._config.algorithm.aggregation
            return await self._meshes.trainers.update(whole, divisor(aggregation, whole.tokens, whole.sequences))

    async def supervise(self, samples: Sequence[Sample]) -> StepStats:
        """A cold start's step: cross-entropy, whatever the algorithm that comes after it."""
        mesh = self._meshes.trainers
        with self._clock("train"):
            return await mesh.step([self._packed(samples, mesh)])

    async def snapshot(self, step: int, controller: Callable[[], str]) -> None:
        """Keep the state behind this step in memory, if it is the step's turn."""
        interval = self._config.fault.snapshot_interval
        if interval and step % interval == 0:
            try:
                await self._snapshots.take(self._phase, step, controller())
            except RankFailed as error:
                if not error.kind:
                    raise  # it died
                self._incidents.note(f"there is no snapshot of step {step}: {error}")

    async def save(self, step: int, controller: str, *, last: bool = False) -> bool:
        """The policy's checkpoint after the others: it is the one that counts. A checkpoint that cannot be written is
        tried again after the next step, a few times; the weights are none the worse for it."""
        try:
            with self._clock("save"):
                if self._meshes.critic is not None and self._phase == "rl":
                    await self._meshes.critic.save(step)
                await self._meshes.trainers.save(step, controller)
        except RankFailed as error:
            self._failed_saves += 1
            if not error.kind:
                raise  # it died
            if last or self._failed_saves > self._config.fault.max_failed_saves:
                raise RunError(f"the checkpoint of step {step} cannot be written: {error}", error.details) from None
            why = error.details.strip().rpartition("\n")[2][:WHY]
            self._incidents.note(
                f"the checkpoint of step {step} failed, and is tried again after the next: {error}: {why}"
            )
            return False
        self._failed_saves = 0
        return True

    @property
    def owes_a_checkpoint(self) -> bool:
        return self._failed_saves > 0

    def batches(self, samples: Sequence[Sample], mesh: ModelMesh, *, whole: bool = True) -> list[Batch]:
        algorithm = self._config.algorithm
        return self._packed(
            samples,
            mesh,
            aggregation=algorithm.aggregation,
            length=algorithm.length_constant or self._config.rollout.max_new_tokens,
            together=2 if algorithm.kind in ("preference", "reward") else 1,
            whole=whole,
        )

    def _packed(self, samples: Sequence[Sample], mesh: ModelMesh, **how: Any) -> list[Batch]:
        training = self._config.training
        return pack(
            samples,
            shards=mesh.dp,
            seq_len=training.seq_len,
            rows_per_microbatch=training.local_batch_size,
            pad_id=self._setup.tokenizer.pad,
            **how,
        )

    async def scores(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """What the trained model itself says: log-probs, or a reward model's values."""
        return await self._policy(samples)

    # -- one role each ----------------------------------------------------------------------------------------

    async def _frozen(self, role: Literal["reference", "teacher"], samples: Sequence[Sample]) -> list[np.ndarray]:
        mesh = self._meshes.reference if role == "reference" else self._meshes.teacher
        if mesh is None:
            batches = self.batches(samples, self._meshes.trainers)
            answers, checksums = await self._meshes.trainers.scores(batches, role, self._temperature)
        else:
            batches = self.batches(samples, mesh)
            answers, checksums = await mesh.scores(batches, self._temperature)
        self._watch(role, checksums)
        return unpack(batches, answers, samples)

    async def _policy(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        batches = self.batches(samples, self._meshes.trainers)
        answers, _ = await self._meshes.trainers.scores(batches, "policy", self._temperature)
        return unpack(batches, answers, samples)

    async def _values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        assert self._meshes.critic is not None
        batches = self.batches(samples, self._meshes.critic)
        return unpack(batches, await self._meshes.critic.scores(batches), samples)

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature if self._config.algorithm.kind == "rl" else 1.0

    async def _lend(self, role: Literal["reference", "teacher"], folder: str) -> None:
        mesh = self._meshes.reference if role == "reference" else self._meshes.teacher
        if mesh is None:
            await self._meshes.trainers.freeze(role, folder)
        else:
            await mesh.load(folder)

    async def _anchor(self, at: int) -> Path:
        """The policy as the algorithm began, as a folder: written once, and found again by a run that resumes."""
        config = self._config
        if config.model.hf_assets_path and config.cold_start.steps == 0:
            return Path(config.model.hf_assets_path).absolute()
        folder = self._setup.folder / "start"
        if at == 0:
            return await export(self._setup, self._meshes.trainers, folder)
        if not folder.is_dir():
            raise RunError(
                f"{folder} is gone: it holds the policy as RL began, which the reference must be",
                "Restore it, or start over with --job.fresh.",
            )
        return folder

    def _watch(self, role: str, checksums: list[int]) -> None:
        if self._checksums.setdefault(role, checksums) != checksums:
            raise RunError(
                f"the {role}'s weights changed during the run",
                f"Their checksums were {self._checksums[role]}, and are {checksums}. Its folder is read only once: "
                "this is memory that something else wrote to.",
            )
