"""What else gets a run's numbers and samples while they are written: a tracker, for example."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from titan_rl.config.sections import Config
from titan_rl.wire.parts import part

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
    started = part("trackers") or _none
    return started(folder, config_name, config, resumed=resumed, warn=warn)


@asynccontextmanager
async def _none(folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn) -> AsyncIterator[None]:
    yield None
