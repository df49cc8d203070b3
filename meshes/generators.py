"""The generator mesh: replicas of one engine, each of tensor-parallel ranks, each a failure domain of its own.

    generate ── route ──> replica ── write ──> submit ─> engine ─> take ── read ──> the awaiting generate

A pull has two phases: every rank of every replica reads, then every engine switches. None takes a version before all
have it within reach, and none serves it before it has passed the check that weight_sync.verify asks for.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.actor import HostMesh, ProcMesh
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.actors.engine import ENV, Done, EngineInfo, EngineSettings, EngineStats
from titan_rl.actors.generator import Arrived, Generator, Switched, drain
from titan_rl.config import WeightSync
from titan_rl.manifest import Manifest
from titan_rl.meshes.faults import RunError, ask, ask_all, label
from titan_rl.meshes.procs import spawn
from titan_rl.types import Completion, Request

if TYPE_CHECKING:
    from titan_rl.actors.landing import Source

DEFAULTS = WeightSync()
SUBMIT_SECONDS = 60  # a submit waits for one engine step at most
GRACE_SECONDS = 5  # the rank's own deadline passes first: its error says what it was reading


class Pulled(NamedTuple):
    """What a pull cost: seconds of the slowest rank in each part, bytes over all ranks. And how long the busiest engine
    has sampled since the pull before."""

    read: float
    write: float
    verify: float
    pause: float
    bytes: int
    changed: float  # share of the blocks that were transferred
    busy: float


class Replica:
    """One engine: its processes, its open requests, and the tasks that carry those back and forth."""

    def __init__(self, name: str, procs: ProcMesh, settings: EngineSettings) -> None:
        self.name = name
        self.load = 0  # samples x their most new tokens, over the open requests
        self.error: Exception | None = None  # once set, it stays: a replica does not come back
        self._procs = procs
        actors: Any = procs.spawn(name, Generator, settings)
        tp = settings.tensor_parallel_degree
        self._ranks: dict[str, Any] = {label(name, {"tp": rank}): actors.slice(tp=rank) for rank in range(tp)}
        self._open: dict[str, asyncio.Future[list[Completion]]] = {}
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
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

    def serve(self) -> None:
        """The engine is built: watch it, and carry requests."""
        self._serving = asyncio.create_task(self._serve())

    async def generate(self, request: Request) -> list[Completion]:
        if request.id in self._open:
            raise ValueError(f"request {request.id}: its id is that of an unfinished request")
        done = self._open[request.id] = asyncio.get_running_loop().create_future()
        cost = len(request.seeds) * request.sampling.max_new_tokens
        self.load += cost
        self._outbox.put_nowait(request)
        try:
            return await done
        finally:
            del self._open[request.id]
            self.load -= cost

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

    async def _serve(self) -> None:
        """Until closed, or until the first failure, which every open request then gets."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask_all(self.calls("watch"), verb="watch", seconds=None))
                tasks.create_task(self._write())
                tasks.create_task(self._read())
        except* Exception as errors:
            self._fail(errors.exceptions[0])

    async def _write(self) -> None:
        """One message carries all requests of an event-loop tick: they enter the engine together, run after run."""
        while True:
            await self.head("submit", await drain(self._outbox), seconds=SUBMIT_SECONDS)

    async def _read(self) -> None:
        while True:
            done: list[Done] = await self.head("take", seconds=None)
            for request in done:
                waiting = self._open.get(request.id)
                if waiting is not None and not waiting.done():  # else nobody waits any more
                    waiting.set_result(request.completions)

    def _fail(self, error: Exception) -> None:
        self.error = error
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)


class GeneratorMesh:
    def __init__(self, replicas: Sequence[Replica], *, init_seconds: float, seconds: float) -> None:
        self.replicas = replicas
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
    ) -> "GeneratorMesh":
        """`env_of` adds to `env` what differs by {"replica": i, "tp": j}: a GPU, say. `seconds` bounds one pull."""
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
        return cls(made, init_seconds=init_seconds, seconds=seconds)

    async def start(self) -> list[EngineInfo]:
        """Build every engine; answers rank by rank, replica by replica."""
        info = await self._all("start", seconds=self._init_seconds)
        for replica in self.replicas:
            replica.serve()
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
        return await min(self.replicas, key=lambda replica: replica.load).generate(request)

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
                return arrived, await replica.head("switch", version, self._seconds, seconds=self._seconds)

        answers = await asyncio.gather(*map(pulled, self.replicas))
        ranks, switched = [rank for arrived, _ in answers for rank in arrived], [switch for _, switch in answers]
        return Pulled(
            read=max(rank.seconds - rank.verify for rank in ranks),
            write=max(engine.write for engine in switched),
            verify=max(rank.verify for rank in ranks) + max(engine.verify for engine in switched),
            pause=max(engine.pause for engine in switched),
            bytes=sum(rank.bytes for rank in ranks),
            changed=sum(rank.changed for rank in ranks) / max(1, sum(rank.blocks for rank in ranks)),
            busy=max(engine.busy for engine in switched),
        )

    async def fingerprint(self) -> list[dict[str, str]]:
        """SHA-256 of every live parameter, rank by rank, replica by replica."""
        return await self._all("fingerprint", seconds=self._seconds)

    async def stats(self) -> list[EngineStats]:
        """By replica."""
        return list(await asyncio.gather(*(r.head("stats", seconds=self._seconds) for r in self.replicas)))

    async def close(self) -> None:
        """End every engine between two steps. Open requests fail."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def stop(self) -> None:
        """End the processes."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def _all(self, verb: str, *arguments: Any, seconds: float) -> list[Any]:
        """Broadcast a verb to all ranks of all replicas, and gather the answers."""
        calls = {name: call for replica in self.replicas for name, call in replica.calls(verb, *arguments).items()}
        return await ask_all(calls, verb=verb, seconds=seconds)

    def _check(self) -> None:
        """A lost replica ends the run: half of the engines would sample the groups of all."""
        for replica in self.replicas:
            if replica.error:
                raise replica.error
