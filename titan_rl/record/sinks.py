"""What else gets a run's numbers, samples, events and spans: trackers, Prometheus, alerts, a timeline."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

from titan_rl.config.sections import Config
from titan_rl.wire.parts import part
from titan_rl.wire.spans import Recorded

State = Literal["finished", "stopped", "failed"]
Event = Literal["fault", "warning"]
"""The loss of a process, a mesh or steps; or a sign in the metrics that the run does not learn, such as a collapse."""
Axis = Literal["cold_start", "rl"]
"""What the steps of a point count. Fits count as RL: a run has one or the other."""
Warn = Callable[[str], None]


class Sink(Protocol):
    """Takes points and samples. Nothing here waits for a server."""

    @property
    def hints(self) -> Sequence[str]:
        """Return where to look at the run."""
        ...

    def log(
        self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None: ...
    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None: ...
    def event(self, event: Event, text: str) -> None: ...
    def rewind(self) -> None:
        """Count another attempt: steps are repeated from now on."""

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Take the state in which the run ends; only the first call counts."""


class Sinks:
    """Passes everything on to each sink of a run, in their order."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks

    @property
    def hints(self) -> list[str]:
        return [hint for sink in self._sinks for hint in sink.hints]

    def log(
        self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        for sink in self._sinks:
            sink.log(axis, step, scalars, histograms)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        for sink in self._sinks:
            sink.samples(step, rows)

    def event(self, event: Event, text: str) -> None:
        for sink in self._sinks:
            sink.event(event, text)

    def rewind(self) -> None:
        for sink in self._sinks:
            sink.rewind()

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.finish(state, summary)


NO_SINKS = Sinks()


@asynccontextmanager
async def tracking(
    folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn
) -> AsyncIterator[Sinks]:
    """Start the sinks that the config asks for and this installation has. End them with the state in which the run
    ends."""
    metrics = config.metrics
    wanted = {"trackers": metrics.services, "prometheus": metrics.prometheus, "alerts": metrics.alert}
    async with AsyncExitStack() as stack:
        sinks = list[Sink]()
        for name, value in wanted.items():
            started = part(name) if value else None
            if started is not None:
                context = started(folder, config_name, config, resumed=resumed, warn=warn)
                sinks.append(await stack.enter_async_context(context))
        yield Sinks(sinks)


class HasSpans(Protocol):
    """The part of a mesh that the timeline uses."""

    def spans(self) -> Mapping[str, Awaitable[Recorded]]:
        """Ask each rank, by name, for the spans recorded since the last call."""
        ...


def timeline(path: Path, meshes: Sequence[HasSpans], note: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
    """Write what every rank did, and when, to a file while the body runs, if this installation can."""
    started = part("timeline")
    return started(path, meshes, note) if started else nullcontext()
