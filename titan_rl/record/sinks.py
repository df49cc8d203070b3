"""What else gets a run's numbers, samples and spans: a tracker, a timeline."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

from titan_rl.config.sections import Config
from titan_rl.wire.parts import part
from titan_rl.wire.spans import Recorded

State = Literal["finished", "stopped", "failed"]
Axis = Literal["cold_start", "rl"]
"""What the steps of a point count. Fits count as RL: a run has one or the other."""
Warn = Callable[[str], None]


class Sink(Protocol):
    """Takes points and samples. Nothing here waits for a server."""

    @property
    def hints(self) -> list[str]:
        """Return where to look at the run."""
        ...

    def log(
        self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None: ...
    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None: ...
    def rewind(self) -> None:
        """Count another attempt: steps are repeated from now on."""

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Take the state in which the run ends; only the first call counts."""


def tracking(
    folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn
) -> AbstractAsyncContextManager[Sink | None]:
    """Start the trackers of a run, if this installation has any, and end them with the state in which it ends."""
    started = (part("trackers") if config.metrics.services else None) or _none
    return started(folder, config_name, config, resumed=resumed, warn=warn)


@asynccontextmanager
async def _none(folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn) -> AsyncIterator[None]:
    yield None


class HasSpans(Protocol):
    """The part of a mesh that the timeline uses."""

    def spans(self) -> Mapping[str, Awaitable[Recorded]]:
        """Ask each rank, by name, for the spans recorded since the last call."""
        ...


def timeline(path: Path, meshes: Sequence[HasSpans], note: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
    """Write what every rank did, and when, to a file while the body runs, if this installation can."""
    started = part("timeline")
    return started(path, meshes, note) if started else nullcontext()
