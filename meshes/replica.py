"""One replica of the generator mesh: an engine of tensor-parallel ranks, which is one failure domain.

put ── submit ──> engine ── take ──> the awaiting put
relieve ── withdraw ──> engine ──> gave
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from monarch.actor import ProcMesh

from titan_rl.actors.vllm.engine import EngineReport, EngineSettings, Withdrawn
from titan_rl.actors.vllm.generator import Generator, News, drain
from titan_rl.config.sections import WeightSyncSection
from titan_rl.meshes.faults import ask, ask_all, death_behind, label
from titan_rl.meshes.routing import Move
from titan_rl.meshes.spawn import end
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.types import Completion, Request
from titan_rl.wire.weight_source import Connection, Source

BEATS = 10  # signs of life that an idle engine gives before it counts as hung
GRACE_SECONDS = 5  # a rank's own deadline passes first, because its error says what it was reading


class Replica:
    """One engine: its processes, its open requests, and the tasks that carry requests in and answers out."""

    def __init__(
        self,
        index: int,
        name: str,
        procs: ProcMesh,
        settings: EngineSettings,
        *,
        hang_seconds: float = 60.0,
        seconds: float = 600.0,
        init_seconds: float = 300.0,
        host: str = "",
    ) -> None:
        """`host` is the name of its host. `hang_seconds` bounds the silence of a warm engine, one that has served
        weights. Until then every call has at least `init_seconds`: a fresh process still imports modules and reads them
        from disk."""
        self.index, self.name = index, name
        self.error: Exception | None = None  # final once set: another replica may take this one's index
        self.state = "starting"
        self.since = time.monotonic()
        self._procs = procs
        self._hang_seconds, self._seconds, self._init_seconds = hang_seconds, seconds, init_seconds
        self._warm = False
        self.host, self._connections = host, list[Connection]()
        self.home = ""  # equal for replicas that could share what they read from other hosts; see locate()
        actors: Any = procs.spawn(name, Generator, settings)
        tp = settings.tensor_parallel_degree
        self._ranks: dict[str, Any] = {label(name, {"tp": rank}): actors.slice(tp=rank) for rank in range(tp)}
        self._open: dict[str, asyncio.Future[list[Completion]]] = {}
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        self._moves: asyncio.Queue[Move] = asyncio.Queue()
        self._owed = 0  # moves whose samples were not given back yet
        self._repaid = asyncio.Event()  # set whenever none is owed
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

    @property
    def owes(self) -> bool:
        """True while samples were asked back and not given. A lost replica owes nothing."""
        return self._owed > 0 and self.error is None

    def patience(self, seconds: float) -> float:
        """Return the deadline of a call that may take a warm engine `seconds`."""
        return seconds if self._warm else max(seconds, self._init_seconds)

    def calls(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """Make the same call on every rank. Returns the futures by rank name."""
        return {name: getattr(rank, verb).call(*arguments) for name, rank in self._ranks.items()}

    async def head(self, verb: str, *arguments: Any, seconds: float | None) -> Any:
        """Call rank 0, which decides for the other ranks."""
        name, rank = next(iter(self._ranks.items()))
        limit = seconds and self.patience(seconds)
        return await ask(getattr(rank, verb).call(*arguments), actor=name, verb=verb, seconds=limit)

    async def scatter(self, verb: str, each: Sequence[Any], *arguments: Any, seconds: float) -> list[Any]:
        """Call every rank, each with its own first argument."""
        ranks = zip(self._ranks.items(), each, strict=True)
        calls = {name: getattr(rank, verb).call(own, *arguments) for (name, rank), own in ranks}
        return await ask_all(calls, verb=verb, seconds=self.patience(seconds))

    async def locate(self, how: str, seconds: float) -> None:
        """Find out where its ranks are, which are all on one host. Under "rdma", workers count as hosts."""
        place = await self.head("place", seconds=seconds)
        self.home, self._connections = f"{place} {self.host}" if how == "rdma" else place, []

    async def connect(
        self, sources: Sequence[list[Source]], sync: WeightSyncSection, siblings: Sequence["Replica"], seconds: float
    ) -> None:
        """Tell each rank where to read weights, and with which ranks of the `siblings` it shares what it reads."""
        given = [[c.copy for each in siblings for c in each._connections[r : r + 1] if c.copy] for r in range(self.tp)]
        calls = {
            name: rank.connect.call(own, sync, copies)
            for (name, rank), own, copies in zip(self._ranks.items(), sources, given, strict=True)
        }
        self._connections = await ask_all(calls, verb="connect", seconds=self.patience(seconds))

    @property
    def connected(self) -> bool:
        return bool(self._connections)

    @property
    def transports(self) -> list[str]:
        """Return the transport of every run that its ranks read."""
        return [transport for connection in self._connections for transport in connection.transports]

    @property
    def memory(self) -> tuple[str, int] | None:
        """Return what names the memory of its first rank that reads from other hosts: equal for replicas that share
        their reads. None: it reads nothing from other hosts."""
        return next((connection.copy.memory for connection in self._connections if connection.copy), None)

    async def fetch_weights(self, manifests: Sequence[list[Manifest]] | None, seconds: float) -> list[ReaderCost]:
        """Let every rank fetch a version, while sampling continues. Without manifests there is nothing to fetch."""
        each, seconds = manifests or [[]] * len(self._ranks), self.patience(seconds)
        return await self.scatter("fetch_weights", each, seconds, seconds=seconds + GRACE_SECONDS)

    async def switch_weights(self, version: int, seconds: float) -> ReaderCost:
        """Write the fetched weights, verify them, and serve them as `version`. From then on the replica is warm."""
        seconds = self.patience(seconds)
        cost = await self.head("switch", version, seconds, seconds=seconds)
        self._warm = True
        return cost

    async def take_weights(
        self, manifests: Sequence[list[Manifest]] | None, version: int, seconds: float
    ) -> tuple[list[ReaderCost], ReaderCost]:
        """Fetch and switch in one call: only for the one rank of the one replica, which waits for no other."""
        (own,), seconds = manifests or [[]], self.patience(seconds)
        fetched, switched = await self.head("take_weights", own, version, seconds, seconds=2 * seconds + GRACE_SECONDS)
        self._warm = True
        return [fetched], switched

    def serve(
        self,
        heard: Callable[[EngineReport], None],
        gave: Callable[[Move, list[Withdrawn]], None],
        lost: Callable[[Exception], None],
        within: float | None = None,
    ) -> None:
        """Watch the built engine and carry its requests. Calls `heard` when a request is done, and at least every
        `within` seconds; `gave` with the samples that a move withdrew; `lost` at the first failure, which fails every
        open request. With `within`, its reports have the lengths of unfinished samples."""
        lengths, within = within is not None, min(self._hang_seconds / BEATS, within or self._hang_seconds)

        async def carry() -> Exception:
            first: Exception = RunError(f"{self.name} ended")
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ask_all(self.calls("watch"), verb="watch", seconds=None))
                    tasks.create_task(self._submit_requests())
                    tasks.create_task(self._take_answers(heard, within, lengths=lengths))
                    tasks.create_task(self._withdraw_samples(gave))
            except* Exception as errors:
                first = errors.exceptions[0]
            return first

        async def run() -> None:
            try:
                self.give_up(await death_behind(await carry(), self.ranks))
            finally:  # no one waits for samples that are never given
                while not self._moves.empty():
                    self._give(self._moves.get_nowait(), [], gave)

        self._lost = lost
        self._serving = asyncio.create_task(run())
        self._set_state("serving")

    def put(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Queue a request for the engine. Samples that are withdrawn from it come back with finish "abort"."""
        done = self._open[request.id] = asyncio.get_running_loop().create_future()
        if self.error:
            done.set_exception(self.error)
        else:
            self._outbox.put_nowait(request)
        return done

    def relieve(self, move: Move) -> None:
        """Ask for samples back, to be continued elsewhere. A lost replica gives none."""
        if self.error is None:
            self._owed += 1
            self._repaid.clear()
            self._moves.put_nowait(move)

    async def repay(self) -> None:
        """Wait until everything that was asked back is given, or the replica is lost."""
        if self.owes:
            await self._repaid.wait()

    async def delivered(self) -> None:
        """Wait until everything that was put is in the engine, or the replica is lost."""
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
        """Kill the processes, whatever they are doing."""
        await end(self.ranks, self._procs)

    def fail(self, error: Exception) -> None:
        """Take no more requests, and fail the open ones."""
        self.error = self.error or error
        self._set_state("lost")
        self._repaid.set()
        if self._serving is not None and self._serving is not asyncio.current_task():
            self._serving.cancel()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Fail, and report the loss as if a call had failed."""
        self.fail(error)
        self._lost(error)

    def _set_state(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    async def _submit_requests(self) -> None:
        """Send all requests of an event-loop tick in one message: they enter the engine together, run after run."""
        while True:
            requests = await drain(self._outbox)
            await self.head("submit", requests, seconds=self._hang_seconds)
            for _ in requests:
                self._outbox.task_done()

    async def _take_answers(self, heard: Callable[[EngineReport], None], within: float, *, lengths: bool) -> None:
        """Resolve what is done. Every answer is a sign of life. A call made before the engine is warm keeps its longer
        deadline; it is the only one, because a live engine answers within `within` seconds."""
        while True:
            news: News = await self.head("take", within, lengths, seconds=within + self._hang_seconds)
            for request in news.done:
                answer = self._open.pop(request.id)
                if request.refused:
                    answer.set_exception(RequestRefused(f"request {request.id}: {request.refused}"))
                else:
                    found = request.completions
                    answer.set_result([c if c.finite else replace(c, replica=self.name) for c in found])
            asyncio.get_running_loop().call_soon(heard, news.report)  # after the callbacks of these results

    async def _withdraw_samples(self, gave: Callable[[Move, list[Withdrawn]], None]) -> None:
        """Ask the engine, because only it knows how far its samples are: once for all moves that wait, because each
        call takes a step of the engine. An engine that drains keeps samples until it has finished them."""
        while True:
            moves, withdrawn = await drain(self._moves), list[Withdrawn]()
            try:
                await self._outbox.join()  # the engine must know the samples before it can give them back
                samples = [sample for move in moves for sample in move.samples]
                withdrawn = await self.head("withdraw", samples, seconds=self._seconds)
            finally:
                for move in moves:
                    own = set(move.samples)
                    self._give(move, [each for each in withdrawn if each.sample in own], gave)

    def _give(self, move: Move, withdrawn: list[Withdrawn], gave: Callable[[Move, list[Withdrawn]], None]) -> None:
        self._owed -= 1
        if self._owed == 0:
            self._repaid.set()
        gave(move, withdrawn)
