"""How a run's user steers it while it runs, besides by signals."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.train.bring_up import Meshes
from titan_rl.train.stop import Stop, Stops
from titan_rl.wire.parts import part


class Steering(Protocol):
    def started(self, meshes: Meshes) -> None:
        """Take the meshes, which are up."""

    def scales(self, generators: GeneratorMesh) -> None:
        """Offer to change the number of replicas."""


class Unsteered:
    """Takes no commands: a run ends by itself or by a signal."""

    def started(self, meshes: Meshes) -> None: ...
    def scales(self, generators: GeneratorMesh) -> None: ...


def steering(
    setup: Setup, socket: Path, stop: Stop | Stops, incidents: Incidents, announce: Callable[[str], object]
) -> AbstractAsyncContextManager[Steering]:
    """Take commands over a socket while the body runs, if this installation can."""
    return (part("control") or _unsteered)(setup, socket, stop, incidents, announce)


@asynccontextmanager
async def _unsteered(*_: object) -> AsyncIterator[Unsteered]:
    yield Unsteered()
