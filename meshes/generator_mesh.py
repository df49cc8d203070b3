"""The generator mesh: replicas of one engine, each of tensor-parallel ranks and a failure domain.

    GeneratorMesh ──> Router ── requests ──> Replica <── lost ones replaced, number changed ── Fleet

A pull has two phases: every rank of every replica fetches, then every engine switches. No rank takes a version before
all of them have fetched it, and none serves it before it has passed the check of weight_sync.verify.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from monarch.actor import HostMesh

from titan_rl.actors.vllm.engine import EngineInfo, EngineSettings
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.actors.vllm.vllm_params import LiveLayout
from titan_rl.config.sections import WeightSyncSection
from titan_rl.meshes.faults import ask, ask_all
from titan_rl.meshes.healing import Fleet, Make
from titan_rl.meshes.hosts import Host, RankPlace
from titan_rl.meshes.replica import GeneratorPolicy, Replica
from titan_rl.meshes.router import Router
from titan_rl.meshes.spawn import meeting_file, process_group, spawn
from titan_rl.wire.errors import RunError
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import EngineStats, ReaderCost, SyncStats
from titan_rl.wire.spans import Recorded
from titan_rl.wire.types import Completion, Request
from titan_rl.wire.weight_source import NO_NOTES, Source

POLICY = GeneratorPolicy()
SYNC = WeightSyncSection()


class GeneratorMesh(Fleet):
    policy_name, slot = "", 0  # see PolicyGenerators

    def __init__(self, replicas: Iterable[Replica], policy: GeneratorPolicy, *, make: Make | None = None) -> None:
        super().__init__({replica.index: replica for replica in replicas}, Router(), policy, make)
        self._layouts: list[LiveLayout] = []

    @classmethod
    async def spawn(
        cls,
        host: HostMesh | Callable[[int, bool], RankPlace],
        settings: EngineSettings,
        *,
        replicas: int,
        env: Mapping[str, str],
        policy: GeneratorPolicy = POLICY,
        name: str = "generator",
    ) -> "GeneratorMesh":
        """`host`: one for all replicas, or a function that returns where a replica goes, given its number and whether
        its last start failed. A replica is called `name` and its number."""
        tp = settings.tensor_parallel_degree

        async def make(replica: int, elsewhere: bool = False) -> Replica:
            rank_place = RankPlace(Host(host), tp) if isinstance(host, HostMesh) else host(replica, elsewhere)
            own = f"{name}{replica}"
            procs = await spawn(
                rank_place.host,
                name=own,
                shape={"tp": tp},
                kind="generator",
                env={**ENV, **env, **rank_place.env, **(meeting_file(rank_place.host) if tp > 1 else {})},
                members=process_group(tp) if tp > 1 else None,
            )
            return Replica(replica, own, procs, settings, policy, rank_place.host)

        made = await asyncio.gather(*map(make, range(replicas)))
        return cls(made, policy, make=make)

    def of(self, policy: str, slot: int) -> "GeneratorMesh":
        return PolicyGenerators(self, policy, slot)

    async def start(self) -> list[EngineInfo]:
        """Build every engine. Return its facts, rank by rank, replica by replica. A replica that fails during start-up
        is not healed; the run ends."""
        info = await self._all("start", seconds=self._policy.init_seconds)
        for replica in self.replicas.values():
            self.serve(replica)
        return info

    async def layouts(self) -> list[LiveLayout]:
        """Return the parameters of each tensor-parallel rank, and what fills them. All replicas have the same, and
        later ones too: no replica may live when this is asked again."""
        if not self._layouts:
            replica, seconds = next(iter(self.replicas.values())), self._policy.init_seconds
            self._layouts = await ask_all(replica.calls("layout"), verb="layout", seconds=replica.patience(seconds))
        return self._layouts

    async def places(self) -> list[str]:
        """Return where each rank is: ranks of equal places can map each other's memory."""
        return await self._all("place")

    async def connect(self, sources: Sequence[list[Source]], sync: WeightSyncSection = SYNC) -> list[str]:
        """Give the ranks their sources of weights: one list per tensor-parallel rank, the same for every replica.
        Replicas of one host share their reads from other hosts: one of them connects first, and makes the memory.
        Return the transport of every run that is read."""
        seconds = self._policy.init_seconds
        await self.each(lambda replica: replica.locate(sync.transport, seconds))
        while waiting := [replica for replica in self.replicas.values() if not replica.connections]:
            done = {replica.home: [replica] for replica in self.replicas.values() if replica.connections}
            first = {replica.home: replica for replica in reversed(waiting)}
            turn = {r: done.get(r.home, []) for r in waiting if r.home in done or first[r.home] is r}

            async def connect(replica: Replica, turn: Mapping[Replica, list[Replica]] = turn) -> None:
                if replica in turn:
                    await replica.connect(sources, sync, turn[replica], seconds, self.slot)

            await self.each(connect)
        return [way for r in self.replicas.values() for connection in r.connections for way in connection.transports]

    async def connect_late(
        self, replica: Replica, sources: Sequence[list[Source]], sync: WeightSyncSection, seconds: float
    ) -> None:
        """Connect a replica that joins later, so that it shares the reads of its host."""
        await replica.locate(sync.transport, seconds)
        others = (other for other in self.replicas.values() if other is not replica and other.connections)
        siblings = [other for other in others if other.home == replica.home]
        await replica.connect(sources, sync, siblings, seconds, self.slot)

    @property
    def sharers(self) -> list[int]:
        """Return how many replicas share the reads of each memory that is filled from other hosts."""
        return list(Counter(r.memory for r in self.replicas.values() if r.memory is not None).values())

    async def generate(self, request: Request) -> list[Completion]:
        self.check()
        return await self._router.generate(request)

    async def pull(
        self,
        version: int,
        manifests: Sequence[list[Manifest]] | None = None,
        lease: Callable[[str], AbstractContextManager[None]] = nullcontext,
        *,
        forgives: bool = False,
        notes: Mapping[str, Sequence[Any]] = NO_NOTES.replicas,
    ) -> SyncStats:
        """Fetch the weights on every rank while sampling continues; then write, check and serve them as `version`.

        `manifests` are by tensor-parallel rank. A replica holds its lease as long as it may read. A replica that is
        lost meanwhile is not waited for. Of replicas that share their reads, the first fetches first, and the others
        fetch the rest, if it failed. With `forgives`, a replica that refuses its weights is not lost: it is reported in
        `refused`, and serves nothing for now. The version is sent to replicas that have `notes`, unless one of
        them is lost already."""
        self.check()
        if not notes.keys() <= {replica.name for replica in self.replicas.values()}:
            notes = {}
        reading, all_read, failed = set(self.replicas.values()), asyncio.Event(), list[RunError]()
        in_turn = sorted(self.replicas.values(), key=lambda replica: replica.name not in notes)
        first = {replica.memory: replica for replica in reversed(in_turn)}
        fetched_first = {memory: asyncio.Event() for memory in first}
        seconds = self._policy.seconds

        async def pulled(replica: Replica) -> tuple[list[ReaderCost], ReaderCost]:
            with lease(replica.name):
                try:
                    if replica.memory and first[replica.memory] is not replica:
                        await fetched_first[replica.memory].wait()
                    fetched = await replica.fetch_weights(manifests, seconds, notes.get(replica.name, ()), self.slot)
                except RunError as error:
                    failed.append(error)
                    raise
                finally:
                    fetched_first[replica.memory].set()
                    reading.discard(replica)
                    if not reading:
                        all_read.set()
                await all_read.wait()
                if failed and self._policy.incidents is None:
                    raise failed[0]
                await self._router.settle(seconds)
                return fetched, await replica.switch_weights(version, seconds, self.slot)

        refused: list[str] = []
        costs = await self.each(pulled, refused if forgives else None)
        arrived = Counter[tuple[str, int]]()
        for replica, (fetched, switched) in costs.items():
            if replica.memory is not None:
                arrived[replica.memory] += sum(cost.remote for cost in (*fetched, switched))
        ranks = [rank for fetched, _ in costs.values() for rank in fetched]
        cost = _cost(version, ranks, {replica.name: switched for replica, (_, switched) in costs.items()}, refused)
        by_replica = [
            (replica.name, each) for replica, (fetched, switched) in costs.items() for each in (*fetched, switched)
        ]
        return replace(
            cost,
            into_host=max(arrived.values(), default=0),
            relayed=sum(rank.relayed for rank in ranks),
            fell_back=tuple(each.fell_back for _, each in by_replica if each.fell_back),
            unreached=tuple(name for name, each in by_replica if each.fell_back),
        )

    async def sleep(self) -> dict[Replica, tuple[int, int]]:
        """Stop every engine until the next pull, also with unfinished requests. Return the free bytes and all bytes of
        the GPU of each engine's first rank, or zeros."""
        return await self.each(lambda replica: replica.head("sleep", seconds=self._policy.seconds))

    async def fingerprint(self) -> list[dict[str, str]]:
        """Return the SHA-256 of every live parameter, rank by rank, replica by replica."""
        return await self._all("fingerprint")

    async def pixel_sums(self, images: Sequence[str]) -> list[list[str]]:
        """Return the hash of each image's pixels, by rank."""
        return await self._all("pixel_sums", images)

    async def stats(self) -> list[EngineStats]:
        """Return each replica's counts since start-up."""
        return list((await self.each(lambda r: r.head("stats", seconds=self._policy.seconds))).values())

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Return each rank's spans since the last call, by rank name."""
        return {
            name: ask(call, actor=name, verb="spans", seconds=replica.patience(self._policy.seconds))
            for replica in self.replicas.values()
            for name, call in replica.calls("spans").items()
        }

    async def close(self) -> None:
        """Close every engine between two steps. Open requests fail."""
        await super().close()
        self._router.fail(RunError("the generators are closed"))

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))

    async def _all(self, verb: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Call all ranks of all replicas, and gather the answers."""
        limit = seconds or self._policy.seconds
        answers = await self.each(lambda r: ask_all(r.calls(verb, *arguments), verb=verb, seconds=r.patience(limit)))
        return [answer for ranks in answers.values() for answer in ranks]


class PolicyGenerators(GeneratorMesh):
    """The generator mesh as one of several policies sees it: same replicas, requests and syncs of the policy's slot."""

    __slots__ = ("policy_name", "slot")

    def __init__(self, mesh: GeneratorMesh, name: str, slot: int) -> None:
        self.__dict__ = mesh.__dict__  # all state is shared
        self.policy_name, self.slot = name, slot

    async def generate(self, request: Request) -> list[Completion]:
        """Answer a request of the policy, whose id and affinity only need to be its own."""
        affinity = tuple(f"{self.policy_name}/{name}" for name in request.affinity)
        return await super().generate(
            replace(request, id=f"{self.policy_name}/{request.id}", affinity=affinity, slot=self.slot)
        )


def _cost(
    version: int, ranks: Sequence[ReaderCost], engines: Mapping[str, ReaderCost], refused: Sequence[str]
) -> SyncStats:
    """Sum up a pull, from each rank's cost of fetching and each replica's cost of switching."""
    switched = engines.values()
    return SyncStats(
        version,
        bytes=sum(rank.bytes for rank in ranks),
        read=max((rank.read for rank in ranks), default=0.0),
        write=max((engine.write for engine in switched), default=0.0),
        verify=max((r.verify for r in ranks), default=0.0) + max((e.verify for e in switched), default=0.0),
        pause=max((engine.pause for engine in switched), default=0.0),
        changed=sum(rank.changed for rank in ranks) / max(1, sum(rank.blocks for rank in ranks)),
        engines={name: engine.engine for name, engine in engines.items()},
        refused=tuple(refused),
    )
