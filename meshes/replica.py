"""One replica of the generator mesh: an engine of tensor-parallel ranks, which is one failure domain.

put ───────┬─ submit ──> engine ── take ──> the future that put returned
withdraw ──┘
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from monarch.actor import ProcMesh

from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.actors.vllm.generator import Generator, drain
from titan_rl.config.sections import WeightSyncSection
from titan_rl.meshes.faults import ask, ask_all, death_behind, label
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.spawn import end
from titan_rl.record.incidents import Incidents
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.types import Completion, Request
from titan_rl.wire.weight_source import FORCES_LINKS, Connection, Source

BEATS = 10  # answers of an idle engine within hang_seconds
GRACE_SECONDS = 5  # a rank's deadline passes first, because its error names its source


@dataclass(frozen=True, slots=True)
class GeneratorPolicy:
    """Deadlines of a generator mesh, and how it treats lost replicas."""

    init_seconds: float = 300
    seconds: float = 600  # limit of a pull
    hang_seconds: float = 60
    incidents: Incidents | None = None  # records losses and limits respawns; None: losing a replica ends the mesh
    min_replicas: int = 1  # fewer end the mesh


class State(StrEnum):
    STARTING = "starting"  # processes and engine
    SYNCING = "syncing"  # the engine is built, and fetches the weights that the others serve
    SERVING = "serving"
    RETIRING = "retiring"  # takes no request, and returns the requests that it has
    LOST = "lost"


class Replica:
    """One engine: its processes, its open requests, and the tasks that carry requests in and answers out."""

    def __init__(
        self,
        index: int,
        name: str,
        procs: ProcMesh,
        settings: EngineSettings,
        policy: GeneratorPolicy,
        host: Host | None = None,
    ) -> None:
        self.index, self.name, self.host = index, name, host.name if host else ""
        self.error: Exception | None = None  # final once set: another replica may take this one's index
        self.set_state(State.STARTING)
        self._procs, self._policy, self._host = procs, policy, host
        self._warm = (
            False  # it has served weights; before, its process still imports modules and reads weights from disk
        )
        self.connections = list[Connection]()  # by rank; none before `connect`
        self.home = ""  # equal for replicas that can share reads from other hosts; see locate()
        actors: Any = procs.spawn(name, Generator, settings)
        tp = settings.tensor_parallel_degree
        self._ranks: dict[str, Any] = {label(name, {"tp": rank}): actors.slice(tp=rank) for rank in range(tp)}
        self._open: dict[str, asyncio.Future[list[Completion]]] = {}
        self._outbox: asyncio.Queue[Request | str] = asyncio.Queue()  # requests, and ids to withdraw
        self._serving: asyncio.Task[None] | None = None
        self._lost: Callable[[Exception], None] = lambda _: None

    @property
    def tp(self) -> int:
        return len(self._ranks)

    @property
    def ranks(self) -> list[str]:
        return list(self._ranks)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def patience(self, seconds: float) -> float:
        """Return the deadline of a call that may take a warm engine `seconds`."""
        return seconds if self._warm else max(seconds, self._policy.init_seconds)

    def calls(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """Make the same call on every rank. Returns the futures by rank name."""
        return {name: getattr(rank, verb).call(*arguments) for name, rank in self._ranks.items()}

    async def head(self, verb: str, *arguments: Any, seconds: float | None) -> Any:
        """Call rank 0, which decides for the other ranks."""
        name, rank = next(iter(self._ranks.items()))
        limit = seconds and self.patience(seconds)
        return await ask(getattr(rank, verb).call(*arguments), actor=name, verb=verb, seconds=limit)

    async def scatter(self, verb: str, each: Iterable[tuple[Any, ...]], seconds: float) -> list[Any]:
        """Call every rank, each with its own arguments."""
        ranks = zip(self._ranks.items(), each, strict=True)
        calls = {name: getattr(rank, verb).call(*arguments) for (name, rank), arguments in ranks}
        return await ask_all(calls, verb=verb, seconds=self.patience(seconds))

    async def locate(self, how: str, seconds: float) -> None:
        """Find out where its ranks are, which are all on one host. Where links are forced, workers count as hosts."""
        place = await self.head("place", seconds=seconds)
        self.home, self.connections = f"{place} {self.host}" if how in FORCES_LINKS else place, []

    async def connect(
        self,
        sources: Sequence[list[Source]],
        sync: WeightSyncSection,
        siblings: Sequence["Replica"],
        seconds: float,
        slot: int = 0,
    ) -> None:
        """Give each rank its sources of a slot's weights, and ranks of `siblings` with which it shares its reads."""
        copies = [[c.copy for each in siblings for c in each.connections[r : r + 1] if c.copy] for r in range(self.tp)]
        each = ((own, sync, shared, slot) for own, shared in zip(sources, copies, strict=True))
        self.connections = await self.scatter("connect", each, seconds)

    @property
    def memory(self) -> tuple[str, int] | None:
        """Return the name of the memory into which its first rank reads from other hosts: equal for replicas that share
        their reads. None: it reads nothing from other hosts."""
        return next((connection.copy.memory for connection in self.connections if connection.copy), None)

    async def fetch_weights(
        self, manifests: Sequence[list[Manifest]] | None, seconds: float, notes: Sequence[Any] = (), slot: int = 0
    ) -> list[ReaderCost]:
        """Let every rank fetch a version, while sampling continues. Without manifests there is nothing to fetch.
        `notes`: for each rank, if the version is sent to it."""
        seconds, wanted = self.patience(seconds), manifests or [[]] * self.tp
        each = [(own, seconds, note, slot) for own, note in zip(wanted, notes or [None] * self.tp, strict=True)]
        return await self.scatter("fetch_weights", each, seconds + GRACE_SECONDS)

    async def switch_weights(self, version: int, seconds: float, slot: int = 0) -> ReaderCost:
        """Write a slot's fetched weights, verify them, and serve them as `version`. The replica is warm then."""
        seconds = self.patience(seconds)
        cost = await self.head("switch", version, seconds, slot, seconds=seconds)
        self._warm = True
        return cost

    def serve(self, lost: Callable[[Exception], None]) -> None:
        """Watch the built engine and carry its requests. The first failure fails every open request and calls
        `lost`."""

        async def carry() -> None:
            error: Exception = RunError(f"{self.name} ended")
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ask_all(self.calls("watch"), verb="watch", seconds=None))
                    tasks.create_task(self._submit())
                    tasks.create_task(self._take_answers(self._policy.hang_seconds / BEATS))
            except* Exception as errors:
                error = errors.exceptions[0]
            self.give_up(await death_behind(error, self.ranks))

        self._lost = lost
        self._serving = asyncio.create_task(carry())
        self.set_state(State.SERVING)

    def put(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Queue a request for the engine."""
        done = self._open[request.id] = asyncio.get_running_loop().create_future()
        if self.error:
            done.set_exception(self.error)
        else:
            self._outbox.put_nowait(request)
        return done

    def withdraw(self, id: str) -> None:
        """Make the engine return a request. Its unfinished samples have finish "abort". An engine that drains keeps it
        until its samples have finished."""
        if self.error is None:
            self._outbox.put_nowait(id)

    async def idle(self) -> None:
        """Wait until its requests are answered, returned or lost."""
        if self._open:
            await asyncio.wait(self._open.values())

    async def delivered(self) -> None:
        """Wait until all requests are in the engine, or the replica is lost."""
        assert self._serving is not None
        joining = asyncio.create_task(self._outbox.join())
        await asyncio.wait({joining, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()

    async def close(self) -> None:
        """Close the engine between two steps. Open requests fail."""
        if self._serving is None or self.error:
            return
        self._serving.cancel()
        await asyncio.wait({self._serving})
        if self.error is None:
            self.fail(RunError("the generators are closed"))
            await ask_all(self.calls("close"), verb="close", seconds=10)

    async def stop(self) -> None:
        """Stop the processes by way of Monarch."""
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 10)

    async def kill(self) -> None:
        """Kill the processes, in any state."""
        await end(self.ranks, self._procs, host=self._host)

    def fail(self, error: Exception) -> None:
        """Take no more requests, and fail the open ones."""
        self.error = self.error or error
        self.set_state(State.LOST)
        if self._serving is not None and self._serving is not asyncio.current_task():
            self._serving.cancel()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Fail, and report the loss as if a call had failed."""
        self.fail(error)
        self._lost(error)

    def set_state(self, state: State) -> None:
        self.state, self.since = state, time.monotonic()

    async def _submit(self) -> None:
        """Send everything of an event-loop tick in one message: requests enter the engine together, run after run."""
        while True:
            items = await drain(self._outbox)
            requests = [item for item in items if isinstance(item, Request)]
            await self.head(
                "submit", requests, [i for i in items if isinstance(i, str)], seconds=self._policy.hang_seconds
            )
            for _ in items:
                self._outbox.task_done()

    async def _take_answers(self, within: float) -> None:
        """Resolve finished requests. A live engine answers within `within` seconds; only the call made before it is
        warm has a longer deadline."""
        while True:
            taken: list[Done] = await self.head("take", within, seconds=within + self._policy.hang_seconds)
            for request in taken:
                answer = self._open.pop(request.id)
                if request.refused:
                    answer.set_exception(RequestRefused(f"request {request.id}: {request.refused}"))
                else:
                    completions = request.completions
                    answer.set_result([c if c.finite else replace(c, replica=self.name) for c in completions])
