"""The generator mesh: replicas of one engine, each of tensor-parallel ranks, each a failure domain of its own.

    generate ── route ──> replica ── write ──> submit ─> engine ─> take ── read ──> the awaiting generate
                  ^          └── relieve ──> withdraw ──┘  │
                  └────────────── begun samples ───────────┘

A pull has two phases: every rank of every replica reads, then every engine switches. None takes a version before all
have it within reach, and none serves it before it has passed the check that weight_sync.verify asks for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.actor import HostMesh, ProcMesh
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.actors.engine import ENV, EngineInfo, EngineSettings, Report, Withdrawn
from titan_rl.actors.generator import Arrived, Generator, News, Switched, drain
from titan_rl.config import WeightSync
from titan_rl.manifest import Manifest
from titan_rl.meshes.faults import RunError, ask, ask_all, label
from titan_rl.meshes.procs import spawn
from titan_rl.meshes.routing import Load, Move, Routing
from titan_rl.spans import Recorded
from titan_rl.types import Completion, EngineStats, Request

if TYPE_CHECKING:
    from titan_rl.actors.landing import Source

DEFAULTS = WeightSync()
SUBMIT_SECONDS = 60  # a submit waits for one engine step at most
REPORT_SECONDS = 0.25  # how often an engine says how far it is, where that decides anything
GRACE_SECONDS = 5  # the rank's own deadline passes first: its error says what it was reading


class Pulled(NamedTuple):
    """What a pull cost: seconds of the slowest rank in each part, bytes over all ranks. And what each engine did since
    the pull before."""

    read: float
    write: float
    verify: float
    pause: float
    bytes: int
    changed: float  # share of the blocks that were transferred
    engines: list[EngineStats]


class Replica:
    """One engine: its processes, its open requests, and the tasks that carry those back and forth."""

    def __init__(self, name: str, procs: ProcMesh, settings: EngineSettings) -> None:
        self.name = name
        self.error: Exception | None = None  # once set, it stays: a replica does not come back
        self._procs = procs
        actors: Any = procs.spawn(name, Generator, settings)
        tp = settings.tensor_parallel_degree
        self._ranks: dict[str, Any] = {label(name, {"tp": rank}): actors.slice(tp=rank) for rank in range(tp)}
        self._open: dict[str, asyncio.Future[list[Completion]]] = {}
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        self._moves: asyncio.Queue[Move] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    def calls(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """The same call on every rank, by name."""
        return {name: getattr(rank, verb).call_one(*arguments) for name, rank in self._ranks.items()}

    async def head(self, verb: str, *arguments: Any, seconds: float | None) -> Any:
        """A call on rank 0, which decides for the others."""
        name, rank = next(iter(self._ranks.items()))
        return await ask(getattr(rank, verb).call_one(*arguments), actor=name, verb=verb, seconds=seconds)

    async def scatter(self, verb: str, each: Sequence[Any], *arguments: Any, seconds: float) -> list[Any]:
        """A call on every rank, each with its own first argument."""
        ranks = zip(self._ranks.items(), each, strict=True)
        calls = {name: getattr(rank, verb).call_one(own, *arguments) for (name, rank), own in ranks}
        return await ask_all(calls, verb=verb, seconds=seconds)

    async def read(self, manifests: Sequence[list[Manifest]] | None, seconds: float) -> "list[Arrived]":
        """Every rank brings a version within its reach; no manifests, nothing to read."""
        return await self.scatter(
            "read", manifests or [[]] * len(self._ranks), seconds, seconds=seconds + GRACE_SECONDS
        )

    def serve(
        self,
        heard: Callable[[Report], None],
        gave: Callable[[Move, list[Withdrawn]], None],
        within: float | None = None,
    ) -> None:
        """The engine is built: watch it, and carry requests. `heard` when one is done, and after `within` seconds."""
        self._serving = asyncio.create_task(self._serve(heard, gave, within))

    def put(self, request: Request) -> asyncio.Future[list[Completion]]:
        """On its way into the engine. What is withdrawn of it comes back as "abort"."""
        done = self._open[request.id] = asyncio.get_running_loop().create_future()
        if self.error:
            done.set_exception(self.error)
        else:
            self._outbox.put_nowait(request)
        return done

    def relieve(self, move: Move) -> None:
        """Ask for samples back, to be continued elsewhere."""
        self._moves.put_nowait(move)

    async def delivered(self) -> None:
        """What was put is in the engine, or the replica is lost."""
        assert self._serving is not None
        joining = asyncio.create_task(self._outbox.join())
        await asyncio.wait({joining, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()

    async def close(self) -> None:
        if self._serving is None or self.error:
            return
        self._serving.cancel()
        await asyncio.wait({self._serving})
        if self.error is None:
            self._fail(RunError("the generators are closed"))
            await ask_all(self.calls("close"), verb="close", seconds=10)

    async def stop(self) -> None:
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 10)

    async def _serve(
        self,
        heard: Callable[[Report], None],
        gave: Callable[[Move, list[Withdrawn]], None],
        within: float | None,
    ) -> None:
        """Until closed, or until the first failure, which every open request then gets."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask_all(self.calls("watch"), verb="watch", seconds=None))
                tasks.create_task(self._write())
                tasks.create_task(self._read(heard, within))
                tasks.create_task(self._relieve(gave))
        except* Exception as errors:
            self._fail(errors.exceptions[0])

    async def _write(self) -> None:
        """One message carries all requests of an event-loop tick: they enter the engine together, run after run."""
        while True:
            requests = await drain(self._outbox)
            await self.head("submit", requests, seconds=SUBMIT_SECONDS)
            for _ in requests:
                self._outbox.task_done()

    async def _read(self, heard: Callable[[Report], None], within: float | None) -> None:
        while True:
            news: News = await self.head("take", within, seconds=None)
            for request in news.done:
                self._open.pop(request.id).set_result(request.completions)
            asyncio.get_running_loop().call_soon(heard, news.report)  # behind what these results bring about

    async def _relieve(self, gave: Callable[[Move, list[Withdrawn]], None]) -> None:
        """As long as the engine stands still, so does this: nobody but it can tell what there is of its samples."""
        while True:
            move, withdrawn = await self._moves.get(), []
            try:
                withdrawn = await self.head("withdraw", move.samples, seconds=None)
            finally:
                gave(move, withdrawn)

    def _fail(self, error: Exception) -> None:
        self.error = error
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)


class GeneratorMesh:
    """With slots (see Routing) it steals: what a sample draws then depends on timing, for it may move."""

    def __init__(
        self, replicas: Sequence[Replica], *, init_seconds: float, seconds: float, slots: int | None = None
    ) -> None:
        self.replicas = replicas
        self._steals = slots is not None
        self._routing = Routing(len(replicas), slots)
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._moving = 0
        self._moved = asyncio.Event()
        self._switching = False
        self._init_seconds = init_seconds
        self._seconds = seconds

    @classmethod
    async def spawn(
        cls,
        host: HostMesh,
        settings: EngineSettings,
        *,
        replicas: int,
        env: Mapping[str, str],
        env_of: Callable[[dict[str, int]], Mapping[str, str]] | None = None,
        init_seconds: float = 300,
        seconds: float = 600,
        steal: bool = False,
    ) -> "GeneratorMesh":
        """`env_of` adds to `env` what differs by {"replica": i, "tp": j}: a GPU, say. `seconds` bounds one pull.
        `steal`: an idle replica takes over samples of a slow one."""
        tp = settings.tensor_parallel_degree

        def place(replica: int) -> ProcMesh:
            def extra(point: dict[str, int]) -> Mapping[str, str]:
                return env_of({"replica": replica, **point}) if env_of else {}

            return spawn(host, name=f"generator{replica}", shape={"tp": tp}, env={**ENV, **env}, env_of=extra)

        procs = [place(replica) for replica in range(replicas)]
        if tp > 1:
            async with asyncio.timeout(init_seconds):
                await asyncio.gather(*map(setup_torch_elastic_env_async, procs))
        made = [Replica(f"generator{index}", mesh, settings) for index, mesh in enumerate(procs)]
        slots = settings.max_num_seqs if steal else None
        return cls(made, init_seconds=init_seconds, seconds=seconds, slots=slots)

    async def start(self) -> list[EngineInfo]:
        """Build every engine; answers rank by rank, replica by replica."""
        info = await self._all("start", seconds=self._init_seconds)
        for index, replica in enumerate(self.replicas):
            replica.serve(partial(self._heard, index), self._gave, REPORT_SECONDS if self._steals else None)
        return info

    async def places(self) -> list[str]:
        """Gather where each rank is: ranks of equal places can map each other's memory."""
        return await self._all("place", seconds=self._seconds)

    async def connect(self, sources: "Sequence[list[Source]]", sync: WeightSync = DEFAULTS) -> list[str]:
        """Scatter, by tensor-parallel rank, where the weights are read from; every replica reads the same. Answers with
        the transport of every run that is read."""
        connecting = (r.scatter("connect", sources, sync, seconds=self._init_seconds) for r in self.replicas)
        return [name for ranks in await asyncio.gather(*connecting) for names in ranks for name in names]

    async def generate(self, request: Request) -> list[Completion]:
        """Route: to the replica with the least to do, the first among equals."""
        self._check()
        self._routing.add(request)
        loop = asyncio.get_running_loop()
        answer = self._answers[request.id] = loop.create_future()
        loop.call_soon(self._send)  # once all requests of this tick are there
        try:
            return await answer
        finally:
            del self._answers[request.id]
            self._routing.forget(request.id)

    async def pull(
        self,
        version: int,
        manifests: Sequence[list[Manifest]] | None = None,
        lease: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> Pulled:
        """Every rank reads its weights while sampling goes on; then every engine writes them, checks them, and serves
        `version`. `manifests` are by tensor-parallel rank; a replica holds its lease as long as it may read."""
        self._check()
        all_read = asyncio.Barrier(len(self.replicas))

        async def pulled(replica: Replica) -> tuple[list[Arrived], Switched]:
            with lease(replica.name):
                try:
                    arrived = await replica.read(manifests, self._seconds)
                except BaseException:
                    await all_read.abort()  # the others' turn never comes
                    raise
                await all_read.wait()
                await self._settle()
                return arrived, await replica.head("switch", version, self._seconds, seconds=self._seconds)

        answers = await asyncio.gather(*map(pulled, self.replicas))
        self._switching = False  # not after a refusal: who serves nothing can take nothing over
        self._routing.resume(asyncio.get_running_loop().time())
        ranks, switched = [rank for arrived, _ in answers for rank in arrived], [switch for _, switch in answers]
        return Pulled(
            read=max(rank.seconds - rank.verify for rank in ranks),
            write=max(engine.write for engine in switched),
            verify=max(rank.verify for rank in ranks) + max(engine.verify for engine in switched),
            pause=max(engine.pause for engine in switched),
            bytes=sum(rank.bytes for rank in ranks),
            changed=sum(rank.changed for rank in ranks) / max(1, sum(rank.blocks for rank in ranks)),
            engines=[engine.engine for engine in switched],
        )

    async def sleep(self) -> None:
        """Every engine stops, whatever is unfinished, until the next pull."""
        await asyncio.gather(*(replica.head("sleep", seconds=self._seconds) for replica in self.replicas))

    async def fingerprint(self) -> list[dict[str, str]]:
        """SHA-256 of every live parameter, rank by rank, replica by replica."""
        return await self._all("fingerprint", seconds=self._seconds)

    async def stats(self) -> list[EngineStats]:
        """By replica."""
        return list(await asyncio.gather(*(r.head("stats", seconds=self._seconds) for r in self.replicas)))

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Asks each rank of each replica, by name, what it recorded since it was asked before."""
        calls = {name: call for replica in self.replicas for name, call in replica.calls("spans").items()}
        return {name: ask(call, actor=name, verb="spans", seconds=None) for name, call in calls.items()}

    def loads(self) -> list[Load]:
        """By replica: what it has to do, and has done."""
        return self._routing.loads()

    async def close(self) -> None:
        """End every engine between two steps. Open requests fail."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RunError("the generators are closed"))

    async def stop(self) -> None:
        """End the processes."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def _send(self) -> None:
        for index, part, whole in self._routing.send(asyncio.get_running_loop().time()):
            self.replicas[index].put(part).add_done_callback(partial(self._done, index, part.id, whole))

    def _done(self, index: int, id: str, whole: str, part: asyncio.Future[list[Completion]]) -> None:
        error, answer = part.exception(), self._answers.get(whole)
        completions = None if error else self._routing.done(index, id, part.result())
        if answer is None or answer.done():  # nobody waits any more
            return
        if error:
            answer.set_exception(error)
        elif completions is not None:
            answer.set_result(completions)

    def _heard(self, index: int, report: Report) -> None:
        now = asyncio.get_running_loop().time()
        self._routing.report(index, report, now)
        self._send()
        while not self._switching and (move := self._routing.steal(now)) is not None:
            self._moving += 1
            self.replicas[move.victim].relieve(move)

    def _gave(self, move: Move, withdrawn: list[Withdrawn]) -> None:
        self._moving -= 1
        self._routing.moved(move, withdrawn)
        self._send()
        self._moved.set()

    async def _settle(self) -> None:
        """From here to the end of a pull no sample is on its way between two engines: one that drains finishes what it
        has before it switches, and nothing that was begun on the old weights may come to it afterwards."""
        self._switching = True
        while self._moving:
            self._moved.clear()
            await self._moved.wait()
        if self._steals:
            await asyncio.gather(*(replica.delivered() for replica in self.replicas))

    async def _all(self, verb: str, *arguments: Any, seconds: float) -> list[Any]:
        """Broadcast a verb to all ranks of all replicas, and gather the answers."""
        calls = {name: call for replica in self.replicas for name, call in replica.calls(verb, *arguments).items()}
        return await ask_all(calls, verb=verb, seconds=seconds)

    def _check(self) -> None:
        """A lost replica ends the run: half of the engines would sample the groups of all."""
        for replica in self.replicas:
            if replica.error:
                raise replica.error
