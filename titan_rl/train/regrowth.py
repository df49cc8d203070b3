"""Gives a trainer mesh the dp rows back that it lost with their hosts, once there are hosts for them again.

    a host is lost ──> the mesh shrinks ── a host is back, and stays ── the next checkpoint is on disk
        ──> the mesh starts again with more rows, after that step: none is repeated

A host that comes and goes cannot keep the run busy with this: it must stay twice as long each time that the mesh has
shrunk, and as long as the mesh may be lost twice more (fault.max_restarts). In memory there is nothing to grow from:
snapshots are in parts for the smaller number of ranks.
"""

from collections.abc import Callable

from titan_rl.config.sections import Config
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.record.incidents import Incidents
from titan_rl.train.rank_places import RankPlaces
from titan_rl.wire.errors import RunError

STEADY = 5  # times fault.detect_seconds that a host must have been back
SPARE = 2  # losses of the trainer that the run must survive afterwards


class Regrow(RunError):
    """Asks to start the trainer again with more dp rows, after a step that is on disk."""


class Regrowth:
    def __init__(
        self, trainers: ModelMesh, rank_places: RankPlaces | None, config: Config, incidents: Incidents
    ) -> None:
        """`rank_places`: None if the mesh cannot be placed again, so its number of rows stays."""
        self._trainers, self._rank_places = trainers, rank_places
        self._fault, self._incidents = config.fault, incidents
        self._saves = config.checkpoint.enable
        self._shrunk = 0  # how often the mesh has lost rows

    def shrank(self) -> None:
        self._shrunk += 1

    @property
    def due(self) -> bool:
        """Return True if the mesh should start again at the next step that is on disk."""
        if self._rank_places is None or not self._trainers.size or not self._saves:
            return False
        seconds = STEADY * self._fault.detect_seconds * 2 ** max(0, self._shrunk - 1)
        spared = self._incidents.left(self._trainers.name) >= min(SPARE, self._fault.max_restarts)
        return spared and self._rank_places.rows(seconds) > self._trainers.dp

    def after(self, step: int) -> Regrow:
        """Return what asks for the start."""
        assert self._rank_places is not None
        rows = f"{self._rank_places.rows()} instead of {self._trainers.dp} dp rows"
        return Regrow(f"{self._trainers.name}: started again after step {step}, with {rows}")

    def failed(self, error: RunError, note: Callable[[str], None]) -> bool:
        """Take note that the mesh did not start with more rows. Return True if the new hosts are left out from here on,
        False if the reason is the loss of another one."""
        if (
            self._rank_places is None
            or error.mesh != self._trainers.name
            or not (excluded := self._rank_places.leave_out())
        ):
            return False
        note(f"{error}; the {self._trainers.name} does without {', '.join(excluded)} until its worker is started again")
        return True
