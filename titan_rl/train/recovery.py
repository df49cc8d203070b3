"""Continues a run that lost a mesh: respawns the mesh and rewinds the run to its newest whole state.

    attempt ── trainer, critic or a frozen role is lost ──> respawn ──> attempt, from the newest snapshot or checkpoint
       ├────── there is room for more trainers (regrowth.py) ──> respawn ──> attempt, from the last checkpoint
       └────── anything else ──> the run ends

Rewinding is resuming within the process: prompts that were in flight are issued again, and steps after the snapshot are
made again; in a synchronous run they give the same losses. Generators stay, and receive the weights once more. (A lost
generator replica is healed by its own mesh and never gets here.)
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.incidents import ROLLBACK, Incident
from titan_rl.record.run_folder import Resume, aside, sound_resume
from titan_rl.train.health import Rewind
from titan_rl.train.regrowth import Regrow
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.errors import RankDied, RunError
from titan_rl.wire.types import PhaseName


class Recovery:
    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._open: list[Incident] = []  # losses after which no attempt is running yet
        self._lost: set[ModelMesh] = set()  # meshes to respawn; another may be lost meanwhile
        self._connected = True  # whether the generators are connected to the current trainers
        self._reached = -1  # the last step that was running when something was lost
        self._failed_at: int | None = None  # the step of the last failure, if it was an exception
        self._growing: Regrow | None = None  # until an attempt is running with more trainers
        self._rows = run.meshes.trainers.dp  # when they were started last
        self.attempt = 0
        self.bad_prompts: dict[PhaseName, set[int]] = {"cold_start": set(), "rl": set()}
        """Ids of the prompts of undone steps. The next attempts leave them out."""

    @property
    def resume(self) -> Resume:
        """Where the next attempt resumes: on disk, or further on in memory."""
        return Resume.find(self._run.setup.folder, self._run.config, self._run.snapshots.newest())

    async def drive(self, attempt: Callable[[Resume], Coroutine[Any, Any, None]]) -> None:
        """Make attempts until one finishes, or until a loss cannot be replaced."""
        mending = False
        while True:
            try:
                if mending:
                    await self._run.watch.drive(self._mend())
                    mending = False
                self.attempt += 1
                resume = await self._run.watch.drive(self._sound_resume())
                await self._run.watch.drive(attempt(resume))
                return
            except RunError as error:
                self._remedy_or_end(error)
                mending = True

    async def restored(self, error: RunError) -> Resume:
        """Replace the mesh whose loss `error` reports. Return where the next attempt resumes."""
        self._remedy_or_end(error)
        await self._run.watch.drive(self._mend())
        self.attempt += 1
        return await self._run.watch.drive(self._sound_resume())

    def _remedy_or_end(self, error: RunError) -> None:
        try:
            self._remedy(error)
        except RunError:
            for incident in self._open:
                self._run.incidents.given_up(incident, "the run ends")
            raise

    async def _sound_resume(self) -> Resume:
        """Where this attempt resumes. The first does as was decided before any process was spawned."""
        run = self._run
        if self.attempt == 1:
            return run.setup.resume
        if run.config.checkpoint.async_mode != "disabled":
            for mesh in (run.meshes.trainers, run.meshes.critic):
                with suppress(RunError):  # it failed, or these ranks are new
                    if mesh is not None:
                        await mesh.wait_for_saving()  # else a step might become whole after the decision
        resume, notes = await asyncio.to_thread(sound_resume, run.setup.folder, run.config, run.snapshots.newest())
        for note in notes:
            run.incidents.note(note)
        return resume

    def began(self, step: int) -> None:
        """Note that an attempt resumed after `step` with everything up."""
        outcome = f"the run continues after step {step}{self._run.meshes.trainers.size}"
        for incident in self._open:
            self._run.incidents.back(incident, outcome, max(0, self._reached - 1 - step))
        self._open, self._reached, self._growing = [], -1, None

    def _remedy(self, error: RunError) -> None:
        """Note what must be respawned; raise if that is impossible or pointless."""
        if isinstance(error, Regrow):
            self._growing = error
            self._lost.add(self._run.meshes.trainers)
            return
        growing, self._growing = self._growing, None
        if growing is not None and self._run.regrowth.failed(error, self._run.incidents.note):
            self._lost.add(self._run.meshes.trainers)
            return
        mesh = self._run.meshes.named(error.mesh)
        role = ROLLBACK if isinstance(error, Rewind) else error.mesh
        if (mesh is None and not isinstance(error, Rewind)) or self._run.stop.requested or self._repeats(error):
            raise error
        if not self._run.incidents.may_respawn(role):
            raise self._run.incidents.over_budget(role, error)
        self._reached = max(self._reached, self._run.stop.step)
        self._open.append(self._run.incidents.lost(role, error))

        if isinstance(error, Rewind):
            self._undo(error.before, error.phase)
            self.bad_prompts[error.phase].update(error.prompts)
        if mesh is not None:
            self._lost.add(mesh)

    def _undo(self, step: int, phase: PhaseName) -> None:
        """Hide the checkpoints of `step` and later of a phase, from this run and from one that resumes it."""
        self._run.snapshots.forget(but=self._run.snapshots.newest(before=step))
        for later, path in Checkpoints.of(self._run.setup.folder, self._run.config, phase).paths():
            if later >= step:
                path.rename(aside(path.with_name(f"undone-{later}")))

    def _repeats(self, error: RunError) -> bool:
        """Return True if an exception came back at the same step, or came at the first step: that is a bug, which a
        respawned mesh would hit again."""
        if isinstance(error, RankDied | Rewind) or not error.kind:
            return False
        again = self._run.stop.step in (self._failed_at, 0) or self.resume.nothing
        self._failed_at = self._run.stop.step
        return again

    async def _mend(self) -> None:
        trainers, snapshots = self._run.meshes.trainers, self._run.snapshots
        await snapshots.settle()
        if self.resume.nothing:  # live trainers rewind in place, but only new ones have the initial weights
            self._lost.add(trainers)
        if self._run.weights is not None:
            await self._run.weights.abandon(trainers_lost=trainers in self._lost)
        if trainers in self._lost:
            await self._run.meshes.leave_gpus_to_trainers()
        await self._run.meshes.turn_of_trainers()  # colocated engines leave them the memory to start in
        replaced = set(self._lost)
        await self._replace_lost()
        await snapshots.bring()
        if self.resume.nothing and trainers not in replaced:  # hosts with the parts were lost, one after the other
            self._lost.add(trainers)
            if self._run.weights is not None:
                await self._run.weights.abandon(trainers_lost=True)
            await self._replace_lost()
        if not self._connected and self._run.weights is not None:
            await self._run.weights.connect(self._run.config, self._run.setup.shape)
            self._connected = True

    async def _replace_lost(self) -> None:
        for mesh in list(self._lost):
            grows = mesh is self._run.meshes.trainers and self._growing
            with self._run.terminal.phase(str(grows or f"{mesh.name}: respawned")):
                await mesh.respawn()
            self._lost.discard(mesh)
            self._connected = self._connected and mesh is not self._run.meshes.trainers
        rows = self._run.meshes.trainers.dp
        if rows != self._rows:
            self._run.snapshots.forget()  # they are in parts for another number of ranks
        if rows < self._rows:
            self._run.regrowth.shrank()
        self._rows = rows
