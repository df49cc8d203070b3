"""A run goes on though a mesh is lost: the mesh is spawned anew, and the run rewinds to where its state is whole.

    attempt ── trainer, critic or a frozen role is lost ──> respawn ──> attempt, from the newest snapshot or checkpoint
       └────── anything else ──> the run ends

Rewinding is resuming, within the process: prompts that were under way are issued again, and steps after the snapshot
are made again, in a synchronous run to the same losses. Generators stay, and are given the weights once more. (Their
own losses never come here: meshes/healing.py.)
"""

from collections.abc import Callable, Coroutine
from typing import Any

from titan_rl.meshes.faults import Watch
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.preflight.setup import Resume, Setup, aside
from titan_rl.record.incidents import ROLLBACK, Incident, Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.health import Rewind
from titan_rl.train.launch import Meshes
from titan_rl.train.stop import Stop
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.errors import RankDied, RunError


class Recovery:
    def __init__(
        self,
        setup: Setup,
        meshes: Meshes,
        weights: WeightSync | None,
        snapshots: Snapshots,
        watch: Watch,
        incidents: Incidents,
        stop: Stop,
        terminal: Terminal,
    ) -> None:
        self._setup, self._meshes, self._weights, self._snapshots = setup, meshes, weights, snapshots
        self._watch, self._incidents, self._stop, self._terminal = watch, incidents, stop, terminal
        self._open: list[Incident] = []  # their work is not under way again yet
        self._lost: set[ModelMesh] = set()  # and not respawned yet: another may be lost while one is
        self._connected = True  # generators to these trainers
        self._reached = -1  # the last step that was begun when something was lost
        self._failed_at: int | None = None  # the step that was lost last, if by an error
        self.attempt = 0

    def point(self) -> Resume:
        """Where the run stands: on disk, or further on in memory."""
        resume, snapshot = Resume.find(self._setup.folder, self._setup.config), self._snapshots.newest()
        return resume if snapshot is None else resume.or_later(snapshot.phase, snapshot.step)

    async def drive(self, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Attempt after attempt, until one comes to its end, or until what was lost cannot be replaced."""
        work: Callable[[], Coroutine[Any, Any, None]] = attempt
        while True:
            self.attempt += work is attempt
            try:
                await self._watch.drive(work())
                if work is attempt:
                    return
                work = attempt
            except RunError as error:
                try:
                    self._remedy(error)
                except RunError:
                    for incident in self._open:
                        self._incidents.given_up(incident, "the run ends")
                    raise
                work = self._mend

    def began(self, step: int) -> None:
        """An attempt goes on after this step: everything is up."""
        for incident in self._open:
            self._incidents.back(incident, f"the run goes on after step {step}", max(0, self._reached - 1 - step))
        self._open, self._reached = [], -1

    def _remedy(self, error: RunError) -> None:
        """What is to be mended; raises where that is not possible, or makes no sense."""
        mesh = self._meshes.named(error.mesh)
        role = ROLLBACK if isinstance(error, Rewind) else error.mesh
        if (mesh is None and not isinstance(error, Rewind)) or self._stop.requested or self._repeats(error):
            raise error
        if not self._incidents.may_respawn(role):
            raise self._incidents.over_budget(role, error)
        self._reached = max(self._reached, self._stop.step)
        self._open.append(self._incidents.lost(role, error))

        if isinstance(error, Rewind):
            self._undo(error.before)
        if mesh is not None:
            self._lost.add(mesh)

    def _undo(self, step: int) -> None:
        """This one and all later ones: their checkpoints are no longer found, by this run or by one that resumes it."""
        self._snapshots.forget(but=self._snapshots.newest(before=step))
        checkpoints = self._setup.folder / self._setup.config.checkpoint.folder
        for path in [*checkpoints.glob("step-*"), *checkpoints.glob("critic/step-*")]:
            if int(path.name.removeprefix("step-")) >= step:
                path.rename(aside(path.with_name(f"undone-{path.name.removeprefix('step-')}")))

    def _repeats(self, error: RunError) -> bool:
        """An exception that comes back at the same step is a bug: nothing that is spawned anew would mend it. Nor does
        it help the first step of all."""
        if isinstance(error, RankDied | Rewind) or not error.kind:
            return False
        again = self._stop.step in (self._failed_at, 0) or self.point().nothing
        self._failed_at = self._stop.step
        return again

    async def _mend(self) -> None:
        trainers = self._meshes.trainers
        if self._weights is not None:
            await self._weights.abandon()
        if self.point().nothing:  # live trainers rewind in place, but only new ones hold the weights of the beginning
            self._lost.add(trainers)
        for mesh in list(self._lost):
            with self._terminal.phase(f"{mesh.name}: respawned"):
                await mesh.respawn()
            self._lost.discard(mesh)
            self._connected = self._connected and mesh is not trainers
        if not self._connected and self._weights is not None:
            await self._weights.connect(self._setup.config, self._setup.shape)
            self._connected = True
