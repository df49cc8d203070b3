"""Offers a run's commands on its socket: status, checkpoint, pause, resume, stop and scale."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from titan_rl.ext.control.server import Control
from titan_rl.ext.control.status import UNSAVED, Scale, Status
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.train.bring_up import Meshes
from titan_rl.train.stop import Stop, Stops


class Steered:
    def __init__(self, setup: Setup, control: Control, status: Status | None) -> None:
        """`status`: of a run of one policy."""
        self._setup, self._control, self._status = setup, control, status

    def started(self, meshes: Meshes) -> None:
        if self._status is not None:
            self._status.meshes = meshes

    def scales(self, generators: GeneratorMesh) -> None:
        self._control.offer(scale=Scale(self._setup, generators).answer)


@asynccontextmanager
async def steered(
    setup: Setup, socket: Path, stop: Stop | Stops, incidents: Incidents, announce: Callable[[str], object]
) -> AsyncIterator[Steered]:
    """Answer commands while the body runs. All policies of a run together are stopped and scaled only."""
    saves = setup.config.checkpoint.enable
    control, status = Control(setup.folder, socket, announce=announce), None
    control.offer(stop=stop.leave)
    if isinstance(stop, Stop):
        status = Status(stop, incidents, saves=saves)
        control.question(status=status.answer)
        control.offer(checkpoint=stop.checkpoint, pause=stop.pause, resume=stop.resume)
        if not saves:
            control.withhold("checkpoint", "pause", why=UNSAVED)
    async with control:
        yield Steered(setup, control, status)
