"""The controller's calls to the model meshes: columns of a step's samples, updates, snapshots and checkpoints.

    samples ──scatter──> reference, teacher, critic, trainer ──gather──> the samples with one more column each

Frozen weights come from a folder that nothing writes to, and every answer carries a checksum that guards them.
"""

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from titan_rl.batch.experience import minibatches
from titan_rl.batch.packing import TOKEN_MEAN, UpTo, Weighting, divisor, pack, unpack
from titan_rl.config.methods import advantage_of
from titan_rl.config.sections import Config
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.shapes import shares_prompts
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.lines import Unwritable, no_room
from titan_rl.record.run_folder import Resume
from titan_rl.tasks.prompts import with_answer
from titan_rl.train.hf_folder import export_policy
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.checkpoint_sums import export_damage
from titan_rl.wire.errors import RankFailed, RunError
from titan_rl.wire.parts import needed_part
from titan_rl.wire.reports import StepStats
from titan_rl.wire.side_columns import for_other_weights
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import Batch, Group, PhaseName, Prompt, Sample

ERROR_CHARACTERS = 300
FrozenRole = Literal["reference", "teacher", "average", ""]
TEACHERS: dict[str, FrozenRole] = {"folder": "teacher", "reference": "reference", "average": "average", "policy": ""}
"""algorithm.teacher_weights -> the name under which trainers know these weights; "" are their own."""


TeacherScores = Callable[[Sequence[Sample], int], Awaitable[list[np.ndarray]]]
"""Returns the log-probs of the teacher's weights; with a number of top tokens entries, each before those."""


class Distills(Protocol):
    """A teacher: its column and side columns of samples, more samples for a cold start, and the step's metrics."""

    async def answers(
        self, samples: Sequence[Sample], groups: Sequence[Group], scores: TeacherScores
    ) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]: ...

    def supervised(self, made: Sequence[tuple[Prompt, Sample]]) -> list[Sample]: ...
    def take_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs samples for the dp rows of a mesh."""

    config: Config
    rows: int | UpTo  # per microbatch
    pad_id: int
    share: bool  # places of prompts

    @classmethod
    def of(cls, config: Config, resolved: Config, pad_id: int) -> "Packer":
        """Microbatches have training.local_batch_size rows, or the most that fit in memory."""
        rows = config.training.local_batch_size or UpTo(resolved.training.local_batch_size)
        return cls(config, rows, pad_id, shares_prompts(config))

    def update(self, samples: Sequence[Sample], dp: int, *, whole: bool = True) -> list[Batch]:
        """Pack an update of the algorithm, or a streamed part of it."""
        algorithm = self.config.algorithm
        length = algorithm.length_constant or self.config.rollout.max_new_tokens
        together = 2 if algorithm.kind in ("preference", "reward") or algorithm.online_pairs else 1
        return self._packed(samples, dp, together, Weighting(algorithm.aggregation, length, whole))

    def supervised(self, samples: Sequence[Sample], dp: int) -> list[Batch]:
        return self._packed(samples, dp, 1, TOKEN_MEAN)

    def _packed(self, samples: Sequence[Sample], dp: int, together: int, weighting: Weighting) -> list[Batch]:
        return pack(
            samples,
            shards=dp,
            seq_len=self.config.training.seq_len,
            rows_per_microbatch=self.rows,
            pad_id=self.pad_id,
            together=together,
            weighting=weighting,
            share=self.share,
        )


class Learner:
    def __init__(self, run: RunParts) -> None:
        self._config, self._setup, self._meshes, self._clock = run.config, run.setup, run.meshes, run.clock
        self._snapshots, self._incidents = run.snapshots, run.incidents
        self.packer = Packer.of(run.config, run.setup.resolved, run.setup.tokenizer.pad)
        self._phase: PhaseName = "rl"
        self._from: Snapshot | None = None
        self.failed_saves = 0  # in a row; above 0 a checkpoint is owed
        self._begun: int | None = None  # the step whose save was begun last in this attempt
        self._checksums: dict[tuple[str, int], list[int]] = {}  # by role and number of ranks
        self._samples: list[Sample] = []  # accumulated for the step's update
        self._tokens = self._sequences = 0  # accumulated for the step's update
        self._done = 0  # steps of the phase
        self.teacher: Distills | None = None
        if run.config.algorithm.needs_teacher:
            self.teacher = needed_part("teacher", "algorithm.advantage")(run.config, run.setup.tokenizer)

    async def resume(self, phase: PhaseName, resume: Resume) -> tuple[int, dict[str, Any]]:
        """Bring the trainers to where a phase resumes. Return that step, and the controller's state saved with it."""
        step, snapshot = resume.state(phase)
        self._phase, self._from, self._begun = phase, snapshot, None
        self._samples, self._tokens, self._sequences = [], 0, 0  # an earlier attempt may have left its step unfinished
        if self.teacher is not None:
            self.teacher.take_metrics()  # that step's
        self._snapshots.forget(but=snapshot)
        start, state = await self._meshes.trainers.begin_phase(phase, snapshot or step)
        self._done = start
        return start, json.loads(state)

    async def begin(self, step: int) -> None:
        """Give every role its weights: the algorithm's starting weights, or those after step `at`."""
        algorithm, meshes = self._config.algorithm, self._meshes
        folder = ""
        if algorithm.needs_reference or (algorithm.needs_critic and not self._config.critic.hf_assets_path):
            folder = str(await self._anchor(step))
        if algorithm.needs_reference:
            mesh, frozen_role = self._mesh_of_role("reference")
            await mesh.load_weights(folder, frozen_role)
        if algorithm.loads_teacher:
            mesh, frozen_role = self._mesh_of_role("teacher")
            await mesh.load_weights(self._config.teacher.hf_assets_path, frozen_role)
        if meshes.reward_model is not None:
            await meshes.reward_model.load_weights(self._config.reward_model.hf_assets_path)
        if meshes.critic is not None:
            if step == 0 and self._from is None:
                await meshes.critic.load_weights(self._config.critic.hf_assets_path or folder)
            await meshes.critic.begin_phase("rl", self._from or step)

    async def judge(self, samples: Sequence[Sample], groups: Sequence[Group] = ()) -> list[Sample]:
        """Return the samples, of these groups, with a column from each role that the algorithm needs. All roles compute
        at once."""
        algorithm, scores = self._config.algorithm, {}
        if algorithm.compares_with_reference:
            scores["reference"] = self.scores(samples, *self._mesh_of_role("reference"))
        if self.teacher is not None:
            scores["teacher"] = self.teacher.answers(samples, groups, self._teacher_scores)
        if algorithm.kind == "rl" and algorithm.proximal == "trainer" and algorithm.updates > 1:
            scores["proximal"] = self.scores(samples)
        if algorithm.kind == "rl" and advantage_of(algorithm.advantage).needs == "score_norm":
            scores["score_norm"] = self._score_norms(samples)
        if algorithm.name == "kto":
            scores["kl"] = self._unrelated_kl(samples)
        if self._meshes.critic is not None:
            scores["value"] = self.scores(samples, self._meshes.critic)
        if not scores:
            return list(samples)
        with self._clock("judge"):
            columns = dict(zip(scores, await asyncio.gather(*scores.values()), strict=True))
        if self.teacher is not None:
            columns["teacher"], extras = columns["teacher"]
            samples = [replace(s, extras={**s.extras, **more}) for s, more in zip(samples, extras, strict=True)]
        return [s.with_columns(**{name: column[i] for name, column in columns.items()}) for i, s in enumerate(samples)]

    async def _teacher_scores(self, samples: Sequence[Sample], top: int) -> list[np.ndarray]:
        teacher = self._mesh_of_role(TEACHERS[self._config.algorithm.teacher_weights])
        return await self.scores(samples, *teacher, top=top)

    async def step(self, updates: Sequence[Sequence[Sample]], loss: Callable[..., Any] | None = None) -> StepStats:
        """Update policy and critic, each on its mesh, at the same time. Add the critic's metrics to the policy's.
        `loss`: a user's, for the policy."""
        critic, trainers = self._meshes.critic, self._meshes.trainers
        with self._clock("train"):
            await self._keep_batches(updates)
            batches = [self.batches(samples, trainers) for samples in updates]
            if loss is not None:
                batches = [[replace(batch, loss=loss) for batch in each] for each in batches]
            policy = trainers.step(batches)
            if critic is None:
                stats = await policy
            else:
                stats, learnt = await asyncio.gather(
                    policy, critic.step([self.batches(samples, critic) for samples in updates])
                )
                critic_metrics = {"value/loss": learnt.loss, "value/grad_norm": learnt.grad_norm, "value/lr": learnt.lr}
                # router/*, which both may have, is the policy's.
                stats.metrics.update(learnt.metrics | critic_metrics | stats.metrics)
                stats = replace(stats, skipped=stats.skipped + learnt.skipped)
        self._done += 1
        return stats

    async def accumulate(self, samples: Sequence[Sample]) -> None:
        """Take a part of the step's samples. If the step is streamed, run forward and backward over them now."""
        if not self._config.training.stream_groups or self._config.record.batches:
            self._samples += samples
        if not self._config.training.stream_groups:
            return
        trainers = self._meshes.trainers
        with self._clock("train"):
            part = self.batches(samples, trainers, whole=False)
            await trainers.accumulate(part)
        self._tokens += part[0].tokens
        self._sequences += part[0].sequences

    async def update(self, group_size: int = 0, loss: Callable[..., Any] | None = None) -> StepStats:
        """Make the step's updates from the accumulated samples. `group_size`: of these groups, if it is not
        rollout.group_size. `loss`: a user's."""
        stats = await self._updated(group_size or self._config.rollout.group_size, loss)
        if self.teacher is not None:
            stats.metrics.update(self.teacher.take_metrics())
        return stats

    async def _updated(self, group_size: int, loss: Callable[..., Any] | None) -> StepStats:
        samples, self._samples = self._samples, []
        if not self._config.training.stream_groups:
            return await self.step(minibatches(samples, self._config.algorithm, group_size), loss)
        whole = Batch([], max(self._tokens, 1), max(self._sequences, 1))
        self._tokens = self._sequences = 0
        with self._clock("train"):
            await self._keep_batches([samples])
            aggregation = self._config.algorithm.aggregation
            stats = await self._meshes.trainers.update(whole, divisor(aggregation, whole.tokens, whole.sequences))
        self._done += 1
        return stats

    async def _keep_batches(self, updates: Sequence[Sequence[Sample]]) -> None:
        """Write the samples of the step that is made next, if record.batches asks for it."""
        if keep := self._config.record.batches:
            kept = needed_part("kept batches", "record.batches")(self._setup.folder, keep)
            await asyncio.to_thread(kept.write, self._done + 1, updates)

    async def supervise(self, samples: Sequence[Sample]) -> StepStats:
        """Take a step of the cold start: cross-entropy."""
        mesh = self._meshes.trainers
        with self._clock("train"):
            return await mesh.step([self.packer.supervised(samples, mesh.dp)])

    async def snapshot(self, step: int, controller: Callable[[], str]) -> None:
        """Begin a snapshot of the state after this step, if fault.snapshot_interval divides the step."""
        interval = self._config.fault.snapshot_interval
        if interval and step % interval == 0:
            try:
                await self._snapshots.take(self._phase, step, controller())
            except RankFailed as error:
                if not error.kind:
                    raise  # it died
                self._incidents.note(f"there is no snapshot of step {step}: {error}")

    async def save(self, step: int, controller: str, *, last: bool = False, on_disk: bool = False) -> bool:
        """Save the critic's checkpoint, then the policy's. Return False if that failed: it is tried again after the
        next step, up to fault.max_failed_saves times in a row, and no weights are lost. The `last` one, or one that
        must be `on_disk` now, is waited for even if checkpoint.async_mode writes it while training continues."""
        on_disk = on_disk or last
        try:
            with self._clock("save"):
                await self._last_saves_written()
                await self._purge()
                if step == self._begun and step in self._checkpoints.whole_steps():
                    return True  # it was written in the background
                self._begun = step
                self._check_room()
                for mesh in self._saved_meshes:
                    await mesh.save(step, controller if mesh is self._meshes.trainers else "{}", on_disk=on_disk)
        except RankFailed as error:
            self.failed_saves += 1
            if not error.kind:
                raise  # it died
            with suppress(RankFailed):
                await self._last_saves_written()
            await self._purge()
            folder = self._checkpoints.folders[0]
            if last or self.failed_saves > self._config.fault.max_failed_saves:
                if full := Unwritable.of_rank(folder, error):
                    raise RunError(f"the checkpoint of step {step}: {full}", full.details) from None
                raise RunError(f"the checkpoint of step {step} cannot be written: {error}", error.details) from None
            reason = error.details.strip().rpartition("\n")[2][:ERROR_CHARACTERS]
            reason += no_room(folder, reason)
            self._incidents.note(
                f"the checkpoint of step {step} failed, and is tried again after the next: {error}: {reason}"
            )
            return False
        self.failed_saves = 0
        await self._purge(step)
        return True

    def _check_room(self) -> None:
        """Raise before a checkpoint is begun that the disk has no room for: torch's writer hides the reason."""
        folder, needed = self._setup.folder, self._setup.checkpoint_bytes
        if (free := shutil.disk_usage(folder).free) < needed:
            why = f"{os.strerror(errno.ENOSPC)}: a checkpoint takes about {needed:,} bytes"
            raise RankFailed(f"{folder} has {free:,} bytes free", why, kind="OSError")

    @property
    def _saved_meshes(self) -> list[ModelMesh]:
        """The meshes whose checkpoints make a step, in the order of saving."""
        trainers, critic = self._meshes.trainers, self._meshes.critic
        return [critic, trainers] if critic is not None and self._phase == "rl" else [trainers]

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints.of(self._setup.folder, self._config, self._phase)

    async def _last_saves_written(self) -> None:
        """Wait until no checkpoint is being written. Raise if one has failed since it was begun."""
        if self._config.checkpoint.async_mode != "disabled":
            results = await asyncio.gather(*(m.wait_for_saving() for m in self._saved_meshes), return_exceptions=True)
            for error in results:
                if isinstance(error, BaseException):
                    raise error

    async def _purge(self, writing: int | None = None) -> None:
        """Delete half-written and old checkpoints, of all trained models alike. TorchTitan's own purge knows one model:
        it would delete the critic's half of a step that the policy has, and count checkpoints that are not whole."""
        if self._config.checkpoint.enable:
            await asyncio.to_thread(self._checkpoints.purge, self._config.checkpoint.keep_latest_k, writing)

    def batches(
        self, samples: Sequence[Sample], mesh: ModelMesh, *, whole: bool = True, replay: bool = True
    ) -> list[Batch]:
        """Return samples packed for a mesh. Only the policy can `replay` what the engine did: other weights do it their
        own way."""
        batches = self.packer.update(samples, mesh.dp, whole=whole)
        return batches if replay and mesh is self._meshes.trainers else [for_other_weights(batch) for batch in batches]

    async def scores(
        self,
        samples: Sequence[Sample],
        mesh: ModelMesh | None = None,
        frozen_role: str = "",
        *,
        sharpness: int = 1,
        top: int = 0,
    ) -> list[np.ndarray]:
        """Return log-probs, or a reward model's or critic's values. `mesh` is the trainers' by default; `sharpness`
        divides the temperature. With `top`, return entries of the trained tokens, each before the most likely ones."""
        mesh = mesh or self._meshes.trainers
        batches = self.batches(samples, mesh, replay=not frozen_role)
        temperature = self._config.rollout.temperature if self._config.algorithm.kind == "rl" else 1.0
        answers, checksums = await mesh.scores(batches, temperature / sharpness, frozen_role, top)
        self._check_unchanged(frozen_role or mesh.name, checksums)  # 0 for weights that are trained
        return unpack(batches, answers, samples, trained=top > 0)

    async def _score_norms(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return each token's 1 - 2 p + sum p^2 over the vocabulary. The sum comes from two forwards: the log-prob is
        z - lse(z), at half the temperature 2 z - lse(2 z), and log sum p^2 = lse(2 z) - 2 lse(z)."""
        logprobs, sharper = [await self.scores(samples, sharpness=by) for by in (1, 2)]
        wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(logprobs, sharper, strict=True)]
        return [np.maximum(1 - 2 * np.exp(a) + np.exp(2 * a - b), 0.0) for a, b in wide]

    async def _unrelated_kl(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return KTO's estimate of the KL, for each token: the mean of log pi - log ref of the answers to each prompt's
        predecessor in the step, at least 0. A pair shares a row, so answers are cut where half a row ends."""
        most, pairs = self._config.training.seq_len // 2 + 1, [samples[i : i + 2] for i in range(0, len(samples), 2)]
        unrelated = [
            with_answer(prompt, answer, most)
            for pair, previous in zip(pairs, pairs[-1:] + pairs[:-1], strict=True)
            for prompt, answer in zip(pair, previous, strict=True)
        ]
        policy, reference = await asyncio.gather(
            self.scores(unrelated), self.scores(unrelated, *self._mesh_of_role("reference"))
        )
        ratios = [
            float((p.astype(np.float64) - r)[np.asarray(s.mask) > 0].sum())
            for s, p, r in zip(unrelated, policy, reference, strict=True)
        ]
        return [np.full(len(s.tokens), max(np.mean(ratios), 0.0)) for s in samples]

    def _mesh_of_role(self, role: FrozenRole) -> tuple[ModelMesh, str]:
        """Return the mesh with a role's weights, and the name that they have there if that mesh is the trainers'."""
        mesh = {"reference": self._meshes.reference, "teacher": self._meshes.teacher}.get(role)
        return (self._meshes.trainers, role) if mesh is None else (mesh, "")

    async def _anchor(self, step: int) -> Path:
        """Return the folder of the policy that the algorithm starts from. It is written once, for resumed runs too."""
        config = self._config
        if config.model.hf_assets_path and config.cold_start.steps == 0:
            return Path(config.model.hf_assets_path).absolute()
        folder = self._setup.folder / "start"
        if step == 0:
            return await export_policy(self._setup, self._meshes.trainers, folder)
        damaged = "it is missing"
        if folder.is_dir():
            damaged = await asyncio.to_thread(export_damage, folder, read=True)
        if damaged:
            raise RunError(
                f"{folder} cannot be used: {damaged}. It holds the policy that RL began with, which is the reference",
                "Restore it, or start from scratch with --job.fresh.",
            )
        return folder

    def _check_unchanged(self, role: str, checksums: list[int]) -> None:
        known = self._checksums.setdefault((role, len(checksums)), checksums)
        if known != checksums:
            raise RunError(
                f"the {role}'s weights changed during the run",
                f"Expected the checksums {known}, found {checksums}. The folder is read only once, so "
                "something else wrote to this memory.",
            )
