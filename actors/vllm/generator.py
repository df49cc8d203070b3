"""One generator rank as a Monarch actor: thin endpoints around an Engine that it steps.

    submit ──> requests, ids ─┐                       ┌─> add, withdraw, step ─> done ─> take
    switch ──> version ───────┴─ decide ── broadcast ─┴─> write the fetched weights, verify, agree, serve the version
                                 rank 0    all ranks

Rank 0 of a tensor-parallel engine makes the decisions, and every rank carries them out between two steps. So all ranks
add and withdraw the same requests, and change weights before the same step, or none of them serves the new weights.
Only `fetch_weights` needs no such agreement. After refused weights an engine samples nothing until a sync succeeds.

The controller imports this module to spawn the actor, so torch and vLLM are imported in `start`, on the rank.
"""

import asyncio
import atexit
import os
import time
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from titan_rl.actors import meeting
from titan_rl.actors.endpoint import show_spans_to_profilers
from titan_rl.actors.vllm.engine import Done, Engine, EngineInfo, EngineSettings, gpu_memory
from titan_rl.actors.vllm.vllm_params import LiveLayout
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire import failpoints
from titan_rl.wire.cores import here
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.reports import EngineStats, ReaderCost
from titan_rl.wire.spans import Recorded, Stretch, span
from titan_rl.wire.types import Request
from titan_rl.wire.weight_source import Connection, HostCopy, Source

T = TypeVar("T")

LOOP_PASSES = 5
"""Passes of the event loop between two steps. A request takes four from Monarch's queue to `submit`, and an answer
three to its call. If each of them took a step, a rollout would wait for seven steps between two turns."""


@dataclass(slots=True)
class Decision:
    """The actions of every rank before its next step."""

    requests: list[Request] = field(default_factory=list)  # enter the engine
    withdrawn: list[str] = field(default_factory=list)  # ids of requests that leave it
    switches: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By slot: the version that its fetched weights become, and the seconds to fetch damaged blocks again."""
    sleep: bool = False  # leave the devices to the trainers until the next switch
    close: bool = False


class Generator(Actor):
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._rank = current_rank().rank
        self._next = Decision()  # rank 0's, collected until the engine is between steps
        self._wake = asyncio.Event()  # set when there is something to decide
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self._switched: dict[int, asyncio.Future[ReaderCost]] = {}  # by slot
        self._slept: asyncio.Future[None] | None = None
        self._landings: dict[int, Any] = {}  # by slot: a Landing, once connected
        self._in_flight = "swap"  # weight_sync.in_flight
        self._reported: dict[int, EngineStats] = {}  # the engine's, up to each slot's last switch
        self._sampling = Stretch(span, "sampling", self._sampled)
        self._group: Any = None  # a gloo group of the tensor-parallel ranks; one rank needs none

    @concurrent_endpoint
    async def start(self) -> EngineInfo:
        """Build the engine. It does not sample before its first switch."""
        with _fatal():
            await failpoints.reached("start")
            meeting.be_reachable()
            self._engine = Engine(self._settings)
            show_spans_to_profilers()
            if self._settings.tensor_parallel_degree > 1:
                from torch import distributed as dist

                # A rank waits for the next decision as long as the engine idles, possibly for days.
                self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        atexit.register(os._exit, 0)  # destroying a million objects takes seconds, to no effect
        self._loop = asyncio.create_task(self._run())
        return self._engine.info

    @concurrent_endpoint
    async def watch(self) -> None:
        """Return once this rank is closed, or raise what ends it earlier. The controller keeps this call open."""
        await asyncio.shield(self._loop)

    @concurrent_endpoint
    async def submit(self, requests: list[Request], withdrawn: Sequence[str] = ()) -> None:
        """Rank 0. Let all of these enter the engine before its next step; then those with the ids `withdrawn` leave it,
        wherever they are. An engine that drains for a switch finishes its samples first."""
        if self._loop.done():
            raise self._end()
        self._engine.check(requests)
        self._next.requests += requests
        self._next.withdrawn += withdrawn
        self._wake.set()

    @concurrent_endpoint
    async def take(self, within: float | None = None) -> list[Done]:
        """Rank 0. Wait until a request is done, at most `within` seconds. Return all that are done."""
        return await self._or_end(drain(self._done, within))

    @concurrent_endpoint
    async def layout(self) -> LiveLayout:
        """Return this rank's parameters and what fills them, without adapters."""
        return self._engine.layout

    @concurrent_endpoint
    async def place(self) -> str:
        return here()

    @concurrent_endpoint
    async def connect(
        self, sources: list[Source], sync: WeightSyncSection, siblings: Sequence[HostCopy] = (), slot: int = 0
    ) -> Connection:
        """Connect this rank to the sources of a slot's weights. What it reads from other hosts it shares with a sibling
        on its own host, if there is one, or it allocates the memory for them."""
        from titan_rl.actors.endpoint import quiet_rdma
        from titan_rl.actors.sync.landing import Landing

        if (landing := self._landings.pop(slot, None)) is not None:
            landing.leave()
            del landing  # unmaps and unpins what lost trainers packed, before as much again is pinned
        with quiet_rdma():
            name = f"generator rank {self._rank}"
            quantization = self._settings.quantization
            landing = Landing(self._engine.params(slot), sources, sync, name, siblings, quantization)
        self._landings[slot], self._in_flight = landing, sync.in_flight
        return landing.connection

    @concurrent_endpoint
    async def fetch_weights(
        self, manifests: list[Manifest], timeout: float, note: Any = None, slot: int = 0
    ) -> ReaderCost:
        """Fetch a slot's weights for this rank while sampling continues."""
        with span("read", lane="weights"):
            return await self._landings[slot].fetch_weights(manifests, timeout, note)

    @concurrent_endpoint
    async def switch(self, version: int, timeout: float, slot: int = 0) -> ReaderCost:
        """Rank 0, once every rank has fetched. All ranks write the fetched weights between the same two steps, verify
        them, and serve them as `version`; or this raises, and they serve nothing. Returns the slowest rank's seconds.
        """
        self._switched[slot] = asyncio.get_running_loop().create_future()
        self._next.switches[slot] = version, timeout
        self._wake.set()
        return await self._or_end(self._switched[slot])

    @concurrent_endpoint
    async def sleep(self) -> tuple[int, int]:
        """Rank 0. Stop sampling on every rank until the next switch. Unfinished samples wait. Return the free bytes and
        all bytes of this rank's GPU, or zeros."""
        if not self._engine.asleep:
            self._slept = asyncio.get_running_loop().create_future()
            self._next.sleep = True
            self._wake.set()
            await self._or_end(self._slept)
        return gpu_memory()

    @concurrent_endpoint
    async def fingerprint(self) -> dict[str, str]:
        return self._engine.fingerprint()

    @concurrent_endpoint
    async def pixel_sums(self, images: Sequence[str]) -> list[str]:
        return self._engine.pixel_sums(images)

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        return self._engine.stats()

    @concurrent_endpoint
    async def spans(self) -> Recorded:
        return span.take()

    @concurrent_endpoint
    async def close(self) -> None:
        """Every rank. End between two steps, also with unfinished requests."""
        self._next.close = True
        self._wake.set()
        await self._loop

    async def _run(self) -> None:
        with _fatal():
            while not (decision := await self._decide()).close:
                for slot, (version, timeout) in decision.switches.items():
                    self._sampling.cut()
                    with span("switch", version=version):
                        await self._switch(slot, version, timeout)
                    await asyncio.sleep(0)  # answer before the next step, which may recompute a great deal
                if decision.requests:
                    with self._sampling:
                        self._engine.add(decision.requests)
                if decision.withdrawn:
                    self._answer(self._engine.withdraw(decision.withdrawn))
                if decision.sleep:
                    self._engine.sleep()
                    self._answer(self._engine.ended())
                    for landing in self._landings.values() if self._engine.offloads else ():
                        landing.forget()
                    if self._slept is not None and not self._slept.done():
                        self._slept.set_result(None)
                if self._samples:
                    failpoints.hit("step")
                    with self._sampling:
                        done = self._engine.step()
                    self._answer(done)
                if not self._samples:
                    self._sampling.cut()
                for _ in range(LOOP_PASSES):
                    await asyncio.sleep(0)

    def _answer(self, done: Sequence[Done]) -> None:
        if self._rank == 0:
            for request in done:
                self._done.put_nowait(request)

    @property
    def _samples(self) -> bool:
        """True if there is something to sample, and weights to sample it with."""
        return self._engine.busy and self._engine.serves and not self._engine.asleep

    def _sampled(self) -> dict[str, int]:
        stats = self._engine.stats()
        return {"steps": stats.steps, "tokens": stats.tokens, "read": stats.read_tokens + stats.recomputed}

    async def _decide(self) -> Decision:
        """Wait for something to do (rank 0), or for rank 0's decision (the other ranks)."""
        if self._rank == 0:
            while not self._samples and self._next == Decision():
                self._wake.clear()
                await self._wake.wait()
        box = [self._due()]
        if self._group is not None:
            from torch import distributed as dist

            if self._samples:
                dist.broadcast_object_list(box, 0, self._group)
            else:  # may last as long as the engine idles, while the rank must still answer its endpoints
                await asyncio.to_thread(dist.broadcast_object_list, box, 0, self._group)
        return box[0]

    def _due(self) -> Decision:
        """Return the collected decision. A switch that drains waits for the running requests, also for requests that
        another replica began; new requests wait for the switch."""
        if self._next.switches and self._in_flight == "drain" and self._samples and not self._next.close:
            due = Decision(requests=[request for request in self._next.requests if request.begun])
            self._next.requests = [request for request in self._next.requests if not request.begun]
            return due
        due, self._next = self._next, Decision()
        return due

    async def _switch(self, slot: int, version: int, timeout: float) -> None:
        began = time.perf_counter()
        self._engine.wake()
        self._engine.suspend(slot)
        self._answer(self._engine.ended())
        landing = span.now()
        try:
            written: ReaderCost = await self._landings[slot].write_weights(timeout, version)
            span.parts(landing, write=written.write, verify=written.verify)
            outcome: ReaderCost | WeightsRefused = written
        except WeightsRefused as error:
            outcome = error
        outcomes = self._gather(outcome)
        refusal = next((outcome for outcome in outcomes if isinstance(outcome, WeightsRefused)), None)
        if refusal is None:
            self._engine.set_version(version, keep=self._in_flight == "keep", slot=slot)
        switched = self._switched.get(slot)
        if switched is None or switched.done():  # another rank answers, or the caller gave up
            return
        if refusal is not None:
            switched.set_exception(refusal)
            return
        costs = [outcome for outcome in outcomes if isinstance(outcome, ReaderCost)]
        now = self._engine.stats()
        engine, self._reported[slot] = now.since(self._reported.get(slot, EngineStats())), now
        write, verify = max(cost.write for cost in costs), max(cost.verify for cost in costs)
        pause, remote = time.perf_counter() - began, sum(cost.remote for cost in costs)
        fell_back = next((cost.fell_back for cost in costs if cost.fell_back), "")
        switched.set_result(
            ReaderCost(write=write, verify=verify, pause=pause, remote=remote, fell_back=fell_back, engine=engine)
        )

    def _gather(self, outcome: T) -> list[T]:
        """Return every rank's outcome, on every rank."""
        if self._group is None:
            return [outcome]
        from torch import distributed as dist

        outcomes: list[Any] = [None] * self._settings.tensor_parallel_degree
        dist.all_gather_object(outcomes, outcome, self._group)
        return outcomes

    async def _or_end(self, outcome: Awaitable[T]) -> T:
        """Await an outcome that the loop sets, or raise what ended the loop: no call may wait on a dead engine."""
        waiting = asyncio.ensure_future(outcome)
        await asyncio.wait({waiting, self._loop}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        raise self._end()

    def _end(self) -> BaseException:
        return self._loop.exception() or RuntimeError("this generator is closed")


async def drain(queue: "asyncio.Queue[T]", within: float | None = None) -> list[T]:
    """Wait for an item, at most `within` seconds. Return everything in the queue."""
    try:
        items = [await asyncio.wait_for(queue.get(), within)]
    except TimeoutError:
        return []
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


@contextmanager
def _fatal() -> Iterator[None]:
    """End the process on what would fail the actor instead of the call: calling a failed actor in a live process ends
    the caller (Monarch 0.7)."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        traceback.print_exc()
        os._exit(1)
