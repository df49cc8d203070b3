"""Ranks without models, as Monarch actors: a generator that answers with random tokens after the time that an engine
would take, and a trainer whose steps are instant. They have the endpoints of the real ones, which
tests/unit/scripts/test_bench_scale.py compares. Many of them share a process, which counts the calls to all of them."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, endpoint

from bench.sharded import shards
from bench.simulated_engine import LOGPROB, SimulatedEngine
from titan_rl.actors.vllm.engine import Done, EngineInfo, EngineSettings
from titan_rl.actors.vllm.generator import drain
from titan_rl.config.sections import Config, ParallelismSection, WeightSyncSection
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import EngineStats, ReaderCost, StepStats
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import Recorded, Recorder
from titan_rl.wire.types import Batch, PhaseName, Request, RoleName
from titan_rl.wire.weight_plan import Copy, Shard
from titan_rl.wire.weight_source import Connection, HostCopy, Offer, Source

Self = TypeVar("Self")
P = ParamSpec("P")
T = TypeVar("T")

PLACE = "simulated"  # of every rank
METRICS = {"logprob_gap/mean": 0.0, "logprob_gap/mult": 1.0, "logprob_gap/max": 0.0, "entropy": 1.0}

_calls: Counter[str] = Counter()  # to the actors of this process, by endpoint
_lock = threading.Lock()  # each actor has its own thread


def counted(method: Callable[Concatenate[Self, P], Awaitable[T]]) -> Callable[Concatenate[Self, P], Awaitable[T]]:
    @wraps(method)
    async def answered(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            _calls[method.__name__] += 1
        return await method(self, *args, **kwargs)

    return answered


def interleaved(method: Any) -> Any:
    return concurrent_endpoint(counted(method))


def in_turn(method: Any) -> Any:
    return endpoint(counted(method))


class CallCounter(Actor):
    """Tells what the other actors of its process were asked. It is not counted itself."""

    @endpoint
    async def take(self) -> dict[str, int]:
        """Return the calls since the last time, by endpoint."""
        with _lock:
            found = dict(_calls)
            _calls.clear()
        return found


class SimulatedGenerator(Actor):
    """As actors.vllm.generator.Generator of a single rank."""

    def __init__(self, settings: EngineSettings, vocabulary: int, pace: float) -> None:
        self._settings = settings
        self._engine = SimulatedEngine(vocabulary, pace)
        self._closed = asyncio.Event()
        self._wake = asyncio.Event()  # set when something was added, or the weights have changed
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self._reported = EngineStats()
        self._spans = Recorder()

    @interleaved
    async def start(self) -> EngineInfo:
        self._loop = asyncio.create_task(self._run())
        return EngineInfo(os.getpid(), {})

    @interleaved
    async def watch(self) -> None:
        await self._closed.wait()

    @interleaved
    async def submit(self, requests: list[Request], withdrawn: Sequence[str] = ()) -> None:
        self._engine.add(requests, time.monotonic())
        for request in self._engine.withdraw(withdrawn, time.monotonic()):
            self._done.put_nowait(request)
        self._wake.set()

    @interleaved
    async def take(self, within: float | None = None) -> list[Done]:
        return await drain(self._done, within)

    @interleaved
    async def place(self) -> str:
        return PLACE

    @interleaved
    async def connect(
        self, sources: list[Source], sync: WeightSyncSection, siblings: Sequence[HostCopy] = ()
    ) -> Connection:
        return Connection(["nothing"] * len(sources), None)

    @interleaved
    async def fetch_weights(self, manifests: list[Manifest], timeout: float) -> ReaderCost:
        return ReaderCost(blocks=len(manifests))

    @interleaved
    async def switch(self, version: int, timeout: float) -> ReaderCost:
        return self._switched(version)

    @interleaved
    async def sleep(self) -> None: ...

    @interleaved
    async def fingerprint(self) -> dict[str, str]:
        return {}

    @interleaved
    async def stats(self) -> EngineStats:
        return self._engine.stats(time.monotonic())

    @interleaved
    async def spans(self) -> Recorded:
        return self._spans.take()

    @interleaved
    async def close(self) -> None:
        self._loop.cancel()
        self._closed.set()

    def _switched(self, version: int) -> ReaderCost:
        with self._spans("switch", version=version):
            now = time.monotonic()
            self._engine.set_version(version, now)
            self._wake.set()
            total = self._engine.stats(now)
        since, self._reported = total.since(self._reported), total
        return ReaderCost(engine=since)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            end = self._engine.end()
            seconds = None if end is None else max(0.0, end - time.monotonic())
            try:
                await asyncio.wait_for(self._wake.wait(), seconds)
            except TimeoutError:
                with self._spans("sampling"):
                    done = self._engine.step(time.monotonic())
                for request in done:
                    self._done.put_nowait(request)


class SimulatedTrainer(Actor):
    """As actors.model_rank.ModelRank of a policy that FSDP2 shards."""

    def __init__(
        self, role: RoleName, config: Config, shape: ModelShape, parallelism: ParallelismSection, rank: int
    ) -> None:
        self._shape, self._ranks, self._rank = shape, parallelism.dp, rank
        self._readers: list[int] = []

    @in_turn
    async def open_meeting(self) -> str:
        return ""

    @in_turn
    async def start(self, met_at: str) -> int:
        return 0

    @in_turn
    async def load_weights(self, folder: str, lent: str) -> None: ...

    @in_turn
    async def begin_phase(self, at: int | SnapshotPart, phase: PhaseName) -> tuple[int, str]:
        return 0, "{}"

    @in_turn
    async def step(self, batches: list[Batch]) -> StepStats:
        return StepStats(0.1, 1.0, 1e-6, batches[0].tokens, 0.0, metrics=dict(METRICS))

    @in_turn
    async def accumulate(self, part: Batch) -> None: ...

    @in_turn
    async def update(self, whole: Batch, divisor: float) -> StepStats:
        return StepStats(0.1, 1.0, 1e-6, whole.tokens, 0.0, metrics=dict(METRICS))

    @in_turn
    async def scores(self, batch: Batch, temperature: float, lent: str) -> "tuple[list[np.ndarray], int]":
        return [np.full(rows.targets.shape, LOGPROB, np.float32) for rows in batch.microbatches], 0

    @in_turn
    async def save(self, step: int, controller: str, on_disk: bool) -> None: ...

    @in_turn
    async def wait_for_saving(self) -> None: ...

    @in_turn
    async def snapshot(self, part: SnapshotPart, step: int, controller: str) -> int:
        return 0

    @in_turn
    async def unsound(self) -> list[str]:
        return []

    @in_turn
    async def export(self, folder: str) -> None:
        if self._rank == 0:
            (Path(folder) / "model.safetensors").touch()

    @in_turn
    async def shards(self) -> list[Shard]:
        return shards(self._shape, self._rank, fsdp=self._ranks)

    @in_turn
    async def stage(
        self, copies: Mapping[int, tuple[Copy, ...]], places: Collection[str], sync: WeightSyncSection
    ) -> dict[int, Offer]:
        self._readers = list(copies)
        return {reader: Offer(PLACE, os.getpid(), 0, 0, (0, 0), 0, 0, None) for reader in copies}

    @in_turn
    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False
    ) -> tuple[dict[int, Manifest], float] | None:
        return {reader: Manifest.of(version, serial, slot, 0, ()) for reader in self._readers}, 0.0

    @in_turn
    async def spans(self) -> Recorded:
        return Recorded([])

    @in_turn
    async def close(self) -> None: ...
