"""Move weights from the trainer mesh to the generator mesh.

once          trainers.shards ─┐
              generator pieces ┴─ plan ── trainers.stage (two slots) ── generators.connect
every step    trainers.publish (pack into the free slot) ── generators.pull (fetch, write in place, verify, new version)
                                                            of replicas on one host, one fetches from other hosts;
                                                            of many hosts, few from the trainers (ext/relay)

A slot is packed again only when every reader that began to read it has released it, so version n + 1 may be published
while readers are still busy with n.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from titan_rl.actors.vllm.vllm_params import adapters_in
from titan_rl.config.sections import Config
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.healing import REFUSED
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import Replica
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RankDied, RunError
from titan_rl.wire.manifest import Manifest, PickledOnce, Publication
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import part
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.spans import Clock, span
from titan_rl.wire.weight_plan import WeightPlan, is_adapter, plan
from titan_rl.wire.weight_source import FORCES_LINKS, NO_NOTES, Notes, Source

T = TypeVar("T")

ELSEWHERE = "any host of the run"  # where a replica that moves may read from, though none does now
LOSS_SECONDS = 2.0  # after a failed read, until the loss of the trainers is known if it was the cause


def _seen(task: asyncio.Task[SyncStats]) -> None:
    """Mark a sync's error as retrieved, so that asyncio does not log it: the next await of the sync raises it."""
    if not task.cancelled():
        task.exception()


class Reading(NamedTuple):
    version: int
    seconds: float  # its deadline if that is longer than a publisher's, as for a replica that has just started; else 0


class ControllerLink(Protocol):
    """The controller's part of the links by which trainer ranks send publications to replicas."""

    def notes(self, replicas: Collection[Replica], trainers: int) -> Notes:
        """Return how the next publication is sent from this number of trainer ranks. Without notes it is read."""
        ...

    def pulled(self, notes: Notes, cost: SyncStats) -> str:
        """Take note of a pull that had these notes. Return a warning if not all that was sent has arrived."""
        ...


class Slots:
    """Which replicas read which of two slots."""

    def __init__(self) -> None:
        self._readers: tuple[dict[str, Reading], dict[str, Reading]] = ({}, {})  # by slot and replica
        self._left = asyncio.Event()

    async def free(self, slot: int, seconds: float) -> None:
        """Wait until no replica reads a slot: for `seconds`, or as long as its readers may take."""
        readers = self._readers[slot]
        seconds = max([seconds, *(reading.seconds for reading in readers.values())])
        try:
            async with deadline(seconds):
                while readers:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            readings = " and ".join(f"{name}, which still reads version {r.version}" for name, r in readers.items())
            raise DeadlinePassed(
                f"weights.publish waits on {readings}",
                f"It waited {seconds:g} s. If this is slow rather than stuck, raise [comm] train_timeout_seconds.",
            ) from None

    @contextmanager
    def reading(self, publication: Publication, name: str, seconds: float = 0) -> Iterator[None]:
        """Hold a slot while `name` reads. A replica that failed or died reads no more; one that did not answer in time
        may still be reading."""
        readers = self._readers[publication.slot]
        readers[name] = Reading(publication.version, seconds)
        try:
            yield
        except (DeadlinePassed, asyncio.CancelledError):
            raise
        except BaseException:
            self._leave(readers, name)
            raise
        else:
            self._leave(readers, name)

    def clear(self) -> None:
        for readers in self._readers:
            readers.clear()
        self._left.set()

    def release(self, name: str) -> None:
        """Release the slots that a replica was reading: its processes have ended."""
        for readers in self._readers:
            if name in readers:
                self._leave(readers, name)

    def _leave(self, readers: dict[str, Reading], name: str) -> None:
        readers.pop(name, None)
        self._left.set()


class WeightSync:
    """Plans and connects (`connect`), then makes the generators serve the trainers' weights (`sync`)."""

    def __init__(
        self,
        trainers: ModelMesh,
        generators: GeneratorMesh,
        clock: Clock,
        warn: Callable[[str], None] = lambda _: None,
        beside: "Sequence[WeightSync]" = (),
    ) -> None:
        """Of several policies, `beside` are the syncs of the policies before this one, the first of which also moves
        the frozen weights."""
        self._all: list[WeightSync] = beside[0]._all if beside else []
        self._all.append(self)
        self.transports = ""  # for the terminal
        self._warn = warn
        self._trainers = trainers
        self._generators = generators
        self._clock = clock
        self._slots = Slots()
        self._serial = 0  # counts the publications begun
        self._link: ControllerLink | None = None  # None: replicas read every publication
        self._newest: Publication | None = None
        self._sources: list[list[Source]] | None = None  # by tensor-parallel rank; None: no trainers to read from
        self._lost = asyncio.Event()  # set while there are none
        self._publishing, self._pulling = asyncio.Lock(), asyncio.Lock()
        self._pulled = asyncio.Event()  # set once generators have weights
        self._running: asyncio.Task[SyncStats] | None = None
        self._waited = 0.0  # seconds that the trainers have waited for the running sync
        self._last: SyncStats | None = None

    async def connect(self, config: Config, shape: ModelShape) -> WeightPlan:
        """Connect the meshes. Called again after the trainers were respawned: a running sync is abandoned, and nothing
        is published yet."""
        await self.abandon(trainers_lost=True)
        tp, sync, lora = config.generator.tensor_parallel_degree, config.weight_sync, config.lora.in_vllm
        if lora is not None:
            sync = replace(sync, delta=True)  # adapters are what changes
        layout, places, filled = await asyncio.gather(
            self._trainers.shards(), self._generators.places(), self._generators.layouts()
        )
        wanted = [rank.with_adapters(shape, lora).pieces for rank in filled]
        dtype = config.generator.dtype
        if self._all[0] is not self:
            layout = [[shard for shard in shards if is_adapter(shard.name)] for shards in layout]
            wanted = [adapters_in(self._generators.slot, pieces) for pieces in wanted]
        self.plan = plan(layout, wanted)
        outgoing = [self.plan.outgoing(t) for t in range(len(layout))]
        apart = config.hosts.at_addresses and config.hosts.number > 1 and sync.transport != "shm"
        readers = {*places, ELSEWHERE} if apart else set(places)
        staged = await self._trainers.stage(outgoing, sorted(readers), sync)
        sources: list[list[Source]] = [
            PickledOnce(
                Source(t, staged[t][g], copies, dtype, sync.block_kb << 10)
                for t, copies in self.plan.incoming(g).items()
            )
            for g in range(tp)
        ]
        relays, linked = part("relays of hosts"), apart or sync.transport in FORCES_LINKS
        sync = replace(sync, relay=bool(relays and linked and relays.settled(sync, sources, places)))
        self._sync, self._readers = sync, tp
        self._seconds = config.comm.train_timeout_seconds
        async with self._pulling:
            transports = Counter(await self._generators.connect(sources, sync))
            make = relays if sync.relay else part("notes of publications")
            self._link = make() if make else None
            self._sources = sources
            self._lost.clear()
        names = transports if len(transports) == 1 else (f"{name} x {n}" for name, n in transports.items())
        self.transports = ", ".join(names)
        if (sharers := max(self._generators.sharers, default=1)) > 1:
            self.transports += f", read once for up to {sharers} replicas of a host"
        if sync.relay:
            self.transports += ", passed on from host to host"
        self._generators.tend(self.catch_up, self._release)
        return self.plan

    def _release(self, replica: str) -> None:
        for each in self._all:
            each._slots.release(replica)

    async def abandon(self, *, trainers_lost: bool) -> None:
        """Forget the running sync and the publications. After `trainers_lost`, new replicas stay unconnected until
        `connect` connects every replica to the new trainers."""
        if trainers_lost:
            self._sources = None
            self._lost.set()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._running = self._newest = self._last = None
        self._slots.clear()

    async def catch_up(self, replica: Replica) -> None:
        """Bring a new replica to the newest published weights, of all policies. If there are none, the next pull
        includes it. A failure to read from trainers that turn out to be lost does not count against the replica."""
        async with AsyncExitStack() as pulling:
            for each in self._all:
                await pulling.enter_async_context(each._pulling)
            for each in self._all:
                await each._catch_up(replica)

    async def _catch_up(self, replica: Replica) -> None:
        while (sources := self._sources) is not None:
            try:
                await self._generators.connect_late(replica, sources, self._sync, self._seconds)
                await self._bring_newest(replica)
                return
            except RunError as error:
                if isinstance(error, RankDied) and error.mesh == replica.name:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), LOSS_SECONDS)
                if self._sources is sources:
                    raise

    async def _bring_newest(self, replica: Replica) -> None:
        if self._newest is None:
            return
        try:
            await self._bring(replica, self._newest)
        except RunError as error:
            if error.kind != REFUSED:
                raise
            if (repacked := await self.publish_again()) is not None:
                await self._bring(replica, repacked)

    async def _bring(self, replica: Replica, publication: Publication) -> None:
        version, name, slot = publication.version, replica.name, self._generators.slot
        lease = self._slots.reading(publication, name, replica.patience(self._seconds))
        with span("catch up", lane="pull", version=version), lease:
            await replica.fetch_weights(self._manifests(publication), self._seconds, slot=slot)
            await replica.switch_weights(version, self._seconds, slot)

    async def publish(self, version: int) -> Publication:
        """Pack the trainers' weights into the older slot, as soon as no replica reads it."""
        async with self._publishing:
            published = await self._publish(version)
            assert published is not None
            return published

    async def publish_again(self) -> Publication | None:
        """Pack the newest publication again, in the other slot, because the packed bytes have been damaged. Return None
        if the trainers have stepped since: they are about to publish the next version."""
        async with self._publishing:
            return await self._publish(self._newest.version, True) if self._newest is not None else None

    async def _publish(self, version: int, again: bool = False) -> Publication | None:
        with span("publish", lane="publish", version=version):
            slot = 1 - self._newest.slot if self._newest else 0
            await self._slots.free(slot, self._seconds)
            self._serial += 1
            notes = NO_NOTES
            if self._link is not None and not again:
                notes = self._link.notes(self._generators.replicas.values(), self.plan.ranks)
            published = await self._trainers.publish(version, slot, self._serial, again, notes)
            self._newest = published or self._newest
            return published

    async def pull(self, publication: Publication) -> SyncStats:
        """Make every generator serve a publication; one publication after the other. For a replica that refuses it, it
        is packed once more; a replica that refuses that too is lost."""
        if self is not (first := self._all[0]):
            await first._pulled.wait()  # the frozen weights
        async with self._pulling:
            cost = await self._pull(publication, forgives=True)
            if cost.refused and (repacked := await self.publish_again()) is not None:
                cost = await self._pull(repacked)
            self._pulled.set()
            return cost

    async def _pull(self, publication: Publication, *, forgives: bool = False) -> SyncStats:
        lease = partial(self._slots.reading, publication)
        with span("pull", lane="pull", version=publication.version):
            manifests, notes = self._manifests(publication), publication.notes
            cost = await self._generators.pull(
                publication.version, manifests, lease, forgives=forgives, notes=notes.replicas
            )
            if self._link is not None and notes.replicas and (failure := self._link.pulled(notes, cost)):
                self._warn(f"weights of step {publication.version}: {failure}")
            return cost

    async def sync(self, version: int) -> SyncStats:
        await self.begin_sync(version)
        cost = await self.settle()
        return replace(cost, waited=cost.seconds)  # the trainers do nothing else, however long the controller is busy

    async def begin_sync(self, version: int, then: Callable[[], None] = lambda: None) -> SyncStats:
        """Start a sync, but wait only until the trainers have published and may step again. `then` is called once the
        generators serve the version. The next sync waits for this one. Return the cost of the previous sync; the first
        sync is waited for."""
        with self._clock("sync"):
            before = await self._settled()
            began = time.perf_counter()
            published = await self.publish(version)
            self._running = asyncio.create_task(self._serve(published, then, began))
            self._running.add_done_callback(_seen)
            self._waited = time.perf_counter() - began
            if before is None:
                before = await self._settled()
            assert before is not None
            return before

    async def settle(self) -> SyncStats:
        """Wait for the running sync. Return the cost of the last one."""
        with self._clock("sync"):
            settled = await self._settled()
        if settled is None:
            raise RuntimeError("expected a sync before settle(), found none")
        return settled

    async def or_sync_error(self, work: Awaitable[T]) -> T:
        """Await `work`, but raise at once if the running sync fails: without new weights `work` might never finish."""
        task = asyncio.ensure_future(work)
        try:
            if self._running is not None:
                await asyncio.wait({task, self._running}, return_when=asyncio.FIRST_COMPLETED)
                if self._running.done():
                    self._running.result()
            return await task
        finally:
            task.cancel()

    def _manifests(self, publication: Publication) -> list[list[Manifest]]:
        return [publication.of(reader) for reader in range(self._readers)]

    async def _settled(self) -> SyncStats | None:
        began = time.perf_counter()
        if self._running is not None:
            cost, self._running = await self._running, None
            self._last = replace(cost, waited=self._waited + time.perf_counter() - began)
        return self._last

    async def _serve(self, published: Publication, then: Callable[[], None], began: float) -> SyncStats:
        cost = await self.pull(published)
        then()
        changed = cost.changed if self._sync.delta else None
        return replace(cost, publish=published.seconds, seconds=time.perf_counter() - began, changed=changed)
