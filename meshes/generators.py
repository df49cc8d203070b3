"""The generator mesh: replicas of one engine, each of tensor-parallel ranks, each a failure domain of its own.

    generate ── route ──> replica ── write ──> submit ─> engine ─> take ── read ──> the awaiting generate
                  ^          └── relieve ──> withdraw ──┘  │
                  └────────────── begun samples ───────────┘

A pull has two phases: every rank of every replica reads, then every engine switches. None takes a version before all
have it within reach, and none serves it before it has passed the check that weight_sync.verify asks for.

A replica that dies, hangs or fails is lost: the others take over what it had at once, and go on. It is replaced beside
them, whole, and serves again when it holds the weights that they hold. Without `healing` its loss ends the mesh.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from monarch.actor import HostMesh, ProcMesh
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.actors.vllm.engine import ENV, EngineInfo, EngineReport, EngineSettings, SampleId, Withdrawn
from titan_rl.actors.vllm.generator import Arrived, Generator, News, Switched, drain
from titan_rl.config.sections import WeightSyncSection
from titan_rl.meshes.faults import ask, ask_all, label
from titan_rl.meshes.routing import Load, Move, Routing
from titan_rl.meshes.spawn import end, spawn
from titan_rl.record.incidents import Incident, Incidents
from titan_rl.wire.errors import RankDied, RunError
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.spans import Recorded
from titan_rl.wire.types import Completion, EngineStats, Request

if TYPE_CHECKING:
    from titan_rl.actors.sync.landing import Source

DEFAULTS = WeightSyncSection()
REFUSED = "Refused"  # what a rank raises that was given other weights than announced
T = TypeVar("T")
REPORT_SECONDS = 0.25  # how often an engine says how far it is, where that decides anything
BEATS = 10  # signs of life that an idle engine gives before it counts as hung
GRACE_SECONDS = 5  # the rank's own deadline passes first: its error says what it was reading
CAUSE_SECONDS = 0.5  # a trainer that died breaks its readers' transfers: who cancels them comes first
DRAIN_SECONDS = 60.0  # a replica that is let go gives back what it has


class Pulled(NamedTuple):
    """What a pull cost: seconds of the slowest rank in each part, bytes over all ranks. And what each engine did since
    the pull before."""

    read: float
    write: float
    verify: float
    pause: float
    bytes: int
    changed: float  # share of the blocks that were transferred
    engines: dict[str, EngineStats]  # by replica
    refused: list[str]  # replicas that serve nothing, for this is not what was announced


class Replica:
    """One engine: its processes, its open requests, and the tasks that carry those back and forth."""

    def __init__(
        self,
        index: int,
        name: str,
        procs: ProcMesh,
        settings: EngineSettings,
        *,
        hang_seconds: float = 60.0,
        seconds: float = 600.0,
    ) -> None:
        self.index, self.name = index, name
        self.error: Exception | None = None  # once set, it stays: another replica may come in its place
        self.state = "starting"
        self.since = time.time()
        self._procs = procs
        self._hang_seconds, self._seconds = hang_seconds, seconds
        actors: Any = procs.spawn(name, Generator, settings)
        tp = settings.tensor_parallel_degree
        self._ranks: dict[str, Any] = {label(name, {"tp": rank}): actors.slice(tp=rank) for rank in range(tp)}
        self._open: dict[str, asyncio.Future[list[Completion]]] = {}
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        self._moves: asyncio.Queue[Move] = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> list[str]:
        return list(self._ranks)

    @property
    def busy(self) -> bool:
        """It has requests that it has not answered."""
        return bool(self._open)

    def now(self, state: str) -> None:
        self.state, self.since = state, time.time()

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
        heard: Callable[[EngineReport], None],
        gave: Callable[[Move, list[Withdrawn]], None],
        lost: Callable[[Exception], None],
        within: float | None = None,
    ) -> None:
        """The engine is built: watch it, and carry requests. `heard` when one is done, and after `within` seconds at
        most; `lost` when it fails."""
        within = min(self._hang_seconds / BEATS, within or self._hang_seconds)
        self._serving = asyncio.create_task(self._serve(heard, gave, lost, within))
        self.now("serving")

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
            self.fail(RunError("the generators are closed"))
            await ask_all(self.calls("close"), verb="close", seconds=10)

    async def stop(self) -> None:
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 10)

    async def end(self) -> None:
        """Kill its processes, whatever they are at."""
        await end(self.ranks, self._procs)

    def fail(self, error: Exception) -> None:
        """It is given nothing any more; what it has fails."""
        self.error = self.error or error
        self.now("lost")
        if self._serving is not None and self._serving is not asyncio.current_task():
            self._serving.cancel()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _serve(
        self,
        heard: Callable[[EngineReport], None],
        gave: Callable[[Move, list[Withdrawn]], None],
        lost: Callable[[Exception], None],
        within: float,
    ) -> None:
        """Until closed, or until the first failure, which every open request then gets."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask_all(self.calls("watch"), verb="watch", seconds=None))
                tasks.create_task(self._write())
                tasks.create_task(self._read(heard, within))
                tasks.create_task(self._relieve(gave))
        except* Exception as errors:
            self.fail(errors.exceptions[0])
            lost(errors.exceptions[0])

    async def _write(self) -> None:
        """One message carries all requests of an event-loop tick: they enter the engine together, run after run."""
        while True:
            requests = await drain(self._outbox)
            await self.head("submit", requests, seconds=self._hang_seconds)
            for _ in requests:
                self._outbox.task_done()

    async def _read(self, heard: Callable[[EngineReport], None], within: float) -> None:
        """Every answer is a sign of life."""
        while True:
            news: News = await self.head("take", within, seconds=within + self._hang_seconds)
            for request in news.done:
                self._open.pop(request.id).set_result(request.completions)
            asyncio.get_running_loop().call_soon(heard, news.report)  # behind what these results bring about

    async def _relieve(self, gave: Callable[[Move, list[Withdrawn]], None]) -> None:
        """Nobody but the engine can tell what there is of its samples; one that drains keeps them until it has."""
        while True:
            move, withdrawn = await self._moves.get(), []
            try:
                await self._outbox.join()  # it must know of the samples before it can give them back
                withdrawn = await self.head("withdraw", move.samples, seconds=self._seconds)
            finally:
                gave(move, withdrawn)


@dataclass(frozen=True, slots=True)
class Healing:
    """What is done about lost replicas."""

    incidents: Incidents
    min_replicas: int


class GeneratorMesh:
    """With slots (see Routing) it steals: what a sample draws then depends on timing, for it may move."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        init_seconds: float,
        seconds: float,
        slots: int | None = None,
        make: Callable[[int], Awaitable[Replica]] | None = None,
        healing: Healing | None = None,
    ) -> None:
        self.replicas = {replica.index: replica for replica in replicas}  # that serve, or are about to at the start
        self.coming: dict[int, Replica | None] = {}  # being spawned; None: not even begun
        self._steals = slots is not None
        self._routing = Routing(len(self.replicas), slots)
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._moving = 0
        self._moved = asyncio.Event()
        self._switching = False
        self._init_seconds = init_seconds
        self._seconds = seconds
        self._make, self._healing = make, healing
        self._error: Exception | None = None  # once set, it stays: too few replicas are left
        self._catch_up: Callable[[Replica], Awaitable[None]] | None = None
        self._gone: Callable[[str], None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scaling = asyncio.Lock()

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
        hang_seconds: float = 60,
        steal: bool = False,
        healing: Healing | None = None,
    ) -> "GeneratorMesh":
        """`env_of` adds to `env` what differs by {"replica": i, "tp": j}: a GPU, say. `seconds` bounds one pull.
        `steal`: an idle replica takes over samples of a slow one."""
        tp = settings.tensor_parallel_degree

        async def make(replica: int) -> Replica:
            def extra(point: dict[str, int]) -> Mapping[str, str]:
                return env_of({"replica": replica, **point}) if env_of else {}

            name = f"generator{replica}"
            procs = spawn(host, name=name, shape={"tp": tp}, env={**ENV, **env}, env_of=extra)
            if tp > 1:
                await asyncio.wait_for(setup_torch_elastic_env_async(procs), init_seconds)
            return Replica(replica, name, procs, settings, hang_seconds=hang_seconds, seconds=seconds)

        made = await asyncio.gather(*map(make, range(replicas)))
        slots = settings.max_num_seqs if steal else None
        return cls(made, init_seconds=init_seconds, seconds=seconds, slots=slots, make=make, healing=healing)

    async def start(self) -> list[EngineInfo]:
        """Build every engine; answers rank by rank, replica by replica. Who fails now was never there: the run ends."""
        info = await self._all("start", seconds=self._init_seconds)
        for replica in self.replicas.values():
            self._serve(replica)
        return info

    async def places(self) -> list[str]:
        """Gather where each rank is: ranks of equal places can map each other's memory."""
        return await self._all("place", seconds=self._seconds)

    async def connect(self, sources: "Sequence[list[Source]]", sync: WeightSyncSection = DEFAULTS) -> list[str]:
        """Scatter, by tensor-parallel rank, where the weights are read from; every replica reads the same. Answers with
        the transport of every run that is read."""
        names = await self._each(lambda r: r.scatter("connect", sources, sync, seconds=self._init_seconds))
        return [name for ranks in names.values() for names in ranks for name in names]

    def tend(self, catch_up: Callable[[Replica], Awaitable[None]], gone: Callable[[str], None]) -> None:
        """From here on lost replicas are replaced: `catch_up` brings a new one to the weights that the others serve;
        `gone` is told who reads nothing any more."""
        self._catch_up, self._gone = catch_up, gone

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
            for index, samples in self._routing.forget(request.id).items():  # nobody waits: make room
                self._take_back(index, samples)

    async def pull(
        self,
        version: int,
        manifests: Sequence[list[Manifest]] | None = None,
        lease: Callable[[str], AbstractContextManager[None]] = nullcontext,
        *,
        forgives: bool = False,
    ) -> Pulled:
        """Every rank reads its weights while sampling goes on; then every engine writes them, checks them, and serves
        `version`. `manifests` are by tensor-parallel rank; a replica holds its lease as long as it may read. Who is
        lost on the way is waited for no longer. `forgives`: who refuses is not lost, and serves nothing for now."""
        self._check()
        reading, all_read, failed = set(self.replicas), asyncio.Event(), list[RunError]()
        names = {index: replica.name for index, replica in self.replicas.items()}  # who answers may be lost by the end

        async def pulled(replica: Replica) -> tuple[list[Arrived], Switched]:
            with lease(replica.name):
                try:
                    arrived = await replica.read(manifests, self._seconds)
                except RunError as error:
                    failed.append(error)
                    raise
                finally:
                    reading.discard(replica.index)
                    if not reading:
                        all_read.set()
                await all_read.wait()
                if failed and self._healing is None:
                    raise failed[0]
                await self._settle()
                return arrived, await replica.head("switch", version, self._seconds, seconds=self._seconds)

        refused: list[str] = []
        found = await self._each(pulled, refused if forgives else None)
        answers = {names[index]: answer for index, answer in found.items()}
        self._switching = False  # not after a refusal: who serves nothing can take nothing over
        self._routing.resume(asyncio.get_running_loop().time())
        ranks = [rank for arrived, _ in answers.values() for rank in arrived]
        switched = [switch for _, switch in answers.values()]
        return Pulled(
            read=max((rank.seconds - rank.verify for rank in ranks), default=0.0),
            write=max((engine.write for engine in switched), default=0.0),
            verify=max((r.verify for r in ranks), default=0.0) + max((e.verify for e in switched), default=0.0),
            pause=max((engine.pause for engine in switched), default=0.0),
            bytes=sum(rank.bytes for rank in ranks),
            changed=sum(rank.changed for rank in ranks) / max(1, sum(rank.blocks for rank in ranks)),
            engines={name: switch.engine for name, (_, switch) in answers.items()},
            refused=refused,
        )

    async def sleep(self) -> None:
        """Every engine stops, whatever is unfinished, until the next pull."""
        await self._each(lambda replica: replica.head("sleep", seconds=self._seconds))

    async def fingerprint(self) -> list[dict[str, str]]:
        """SHA-256 of every live parameter, rank by rank, replica by replica."""
        return await self._all("fingerprint", seconds=self._seconds)

    async def stats(self) -> list[EngineStats]:
        """By replica."""
        return list((await self._each(lambda r: r.head("stats", seconds=self._seconds))).values())

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Asks each rank of each replica, by name, what it recorded since it was asked before."""
        calls = {name: call for replica in self.replicas.values() for name, call in replica.calls("spans").items()}
        return {name: ask(call, actor=name, verb="spans", seconds=self._seconds) for name, call in calls.items()}

    def loads(self) -> dict[int, Load]:
        """By replica: what it has to do, and has done."""
        return self._routing.loads()

    async def scale(self, replicas: int) -> int:
        """Have so many: new ones come beside those that serve; those that go give back what they have first. Answers
        with how many there are."""
        if self._make is None:
            raise RunError("these generators cannot be scaled")
        async with self._scaling:
            while len(self.replicas) + len(self.coming) < replicas:
                index = next(i for i in count() if i not in self.replicas and i not in self.coming)
                self.coming[index] = None
                self._in_background(self._grow(index))
            while len(self.replicas) + len(self.coming) > replicas:
                index = max([*self.replicas, *self.coming])
                if index in self.coming:
                    raise RunError(f"generator{index} is being spawned: try again once it serves")
                await self._let_go(self.replicas[index])
            while self.coming and self._error is None:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return len(self.replicas)

    async def close(self) -> None:
        """End every engine between two steps. Open requests fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()))
        self._fail_answers(RunError("the generators are closed"))

    async def stop(self) -> None:
        """End the processes."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))

    # -- who serves -------------------------------------------------------------------------------------------

    def _serve(self, replica: Replica) -> None:
        within = REPORT_SECONDS if self._steals else None
        replica.serve(partial(self._heard, replica), self._gave, partial(self._lost, replica), within)

    def _lost(self, replica: Replica, error: Exception) -> None:
        """The others take over what it had; another one comes in its place."""
        if self.replicas.get(replica.index) is not replica:
            return
        replica.fail(error)
        if (
            self._healing is None
            or self._catch_up is None
            or self._healing.incidents.never_respawns(len(self.replicas))
        ):
            self._end(error)
            return
        known = error if isinstance(error, RunError) else RunError(f"{replica.name} failed: {error}")
        incident = self._healing.incidents.lost(replica.name, known)
        del self.replicas[replica.index]
        again = self._routing.lose(replica.index)
        self._send()
        self.coming[replica.index] = None

        async def replaced() -> None:
            await self._bury(replica)
            await self._replace(replica.index, known, incident, again)

        self._in_background(replaced())

    async def _replace(self, index: int, error: RunError, incident: Incident, again: int) -> None:
        """Again and again, as far as the budget goes."""
        assert self._healing is not None
        incidents, name = self._healing.incidents, incident.role
        while True:
            if not incidents.may_respawn(name):
                del self.coming[index]
                left = len(self.replicas) + len(self.coming)
                incidents.given_up(incident, f"{left} generator{'s' * (left != 1)} left")
                if left < self._healing.min_replicas:
                    self._end(incidents.over_budget(name, error))
                return
            try:
                await self._join(index)
            except RunError as failed:
                incidents.note(f"{name} did not come back: {failed}")
                error = failed
            else:
                incidents.back(incident, f"{again} samples were begun anew", resampled=again)
                return

    async def _join(self, index: int) -> None:
        """A replica comes: its processes, its engine, the weights that the others serve, and then requests."""
        assert self._make is not None
        assert self._catch_up is not None
        replica = self.coming[index] = await self._make(index)
        try:
            await ask_all(replica.calls("start"), verb="start", seconds=self._init_seconds)
            await self._catch_up(replica)
        except RunError as error:
            replica.fail(error)
            await self._bury(replica)
            raise
        del self.coming[index]
        self.replicas[index] = replica
        self._serve(replica)
        self._routing.join(index, asyncio.get_running_loop().time())
        self._send()

    async def _grow(self, index: int) -> None:
        """One more. If it does not come it is treated as one that is lost."""
        try:
            await self._join(index)
        except RunError as error:
            if self._healing is None:
                raise
            await self._replace(index, error, self._healing.incidents.lost(f"generator{index}", error), 0)

    async def _bury(self, replica: Replica) -> None:
        await replica.end()
        self._gone(replica.name)

    async def _let_go(self, replica: Replica) -> None:
        """It gives back what it has not finished, tokens and all, and ends."""
        self._take_back(replica.index, self._routing.retire(replica.index))
        deadline = time.monotonic() + DRAIN_SECONDS
        while replica.busy and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.replicas.pop(replica.index, None) is not replica:
            return  # lost meanwhile
        self._routing.lose(replica.index)
        self._send()
        with suppress(Exception):  # it is killed in any case
            await asyncio.wait_for(replica.close(), GRACE_SECONDS)
        await self._bury(replica)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def told() -> None:
            try:
                await work
            except Exception as error:  # ours to mend; but nobody may wait for ever on it
                self._end(error)

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, error: Exception) -> None:
        self._error = self._error or error
        self._fail_answers(error)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _each(self, work: Callable[[Replica], Awaitable[T]], refused: list[str] | None = None) -> dict[int, T]:
        """What every replica answers, those apart that are lost over it, or have `refused`."""

        answers: dict[int, T] = {}

        async def one(replica: Replica) -> None:
            try:
                answers[replica.index] = await work(replica)
            except RunError as error:
                if self._healing is None:
                    raise
                if refused is not None and error.kind == REFUSED:
                    refused.append(replica.name)
                    return
                if not isinstance(error, RankDied):
                    await asyncio.sleep(CAUSE_SECONDS)
                self._lost(replica, error)

        await asyncio.gather(*map(one, self.replicas.values()))
        self._check()
        return dict(sorted(answers.items()))

    async def _all(self, verb: str, *arguments: Any, seconds: float) -> list[Any]:
        """Broadcast a verb to all ranks of all replicas, and gather the answers."""
        answers = await self._each(lambda r: ask_all(r.calls(verb, *arguments), verb=verb, seconds=seconds))
        return [answer for ranks in answers.values() for answer in ranks]

    # -- what goes where --------------------------------------------------------------------------------------

    def _send(self) -> None:
        for index, part, whole in self._routing.send(asyncio.get_running_loop().time()):
            self.replicas[index].put(part).add_done_callback(partial(self._done, index, part.id, whole))

    def _done(self, index: int, id: str, whole: str, part: asyncio.Future[list[Completion]]) -> None:
        if part.exception() is not None:  # its replica is lost: the request goes on elsewhere, or all of them fail
            return
        completions = self._routing.done(index, id, part.result())
        answer = self._answers.get(whole)
        if answer is not None and not answer.done() and completions is not None:
            answer.set_result(completions)

    def _fail_answers(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _heard(self, replica: Replica, report: EngineReport) -> None:
        if self.replicas.get(replica.index) is not replica:
            return
        now = asyncio.get_running_loop().time()
        self._routing.report(replica.index, report, now)
        self._send()
        while not self._switching and (move := self._routing.steal(now)) is not None:
            self._relieve(move)

    def _take_back(self, index: int, samples: list[SampleId]) -> None:
        if samples:
            self._relieve(Move(None, index, samples, asyncio.get_running_loop().time()))

    def _relieve(self, move: Move) -> None:
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
            await asyncio.gather(*(replica.delivered() for replica in self.replicas.values()))
