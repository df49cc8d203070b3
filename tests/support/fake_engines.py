"""Generator meshes whose engines are coroutines of this process: the real Replica, Router and Fleet on fakes of
Monarch's processes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from support.weight_layouts import TINY
from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.actors.vllm.vllm_params import LiveLayout, planned_layout
from titan_rl.config.sections import FaultSection
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.healing import Make
from titan_rl.meshes.replica import GeneratorPolicy, Replica
from titan_rl.record.incidents import Incidents
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.types import Completion, Request
from titan_rl.wire.weight_source import Connection, HostCopy

SETTINGS = EngineSettings(model_dir="none")


class _Call:
    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer

    def as_asyncio(self) -> Awaitable[Any]:
        return self._answer()


class FakeEngine:
    """One rank: every verb is a coroutine. It samples nothing until a test puts Done into `done`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.withdrawn: list[list[str]] = []  # ids, by call
        self.connected: list[Any] = []
        self.done: asyncio.Queue[Done] = asyncio.Queue()
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.steps = asyncio.Event()  # cleared: amid a step, so that nothing is answered
        self.steps.set()

    def spawn(self, *_: Any) -> "FakeEngine":
        return self

    def slice(self, **_: int) -> "FakeEngine":
        return self

    def __getattr__(self, verb: str) -> Any:
        class Endpoint:
            @staticmethod
            def call(*arguments: Any) -> _Call:
                return _Call(lambda: getattr(self, f"do_{verb}")(*arguments))

        if verb.startswith("do_"):
            raise AttributeError(verb)
        return Endpoint

    async def do_watch(self) -> None:
        await self.dead

    async def do_start(self) -> None: ...

    async def do_close(self) -> None: ...

    async def do_layout(self) -> LiveLayout:
        return planned_layout(TINY, tp=1, rank=0)

    async def do_place(self) -> str:
        return "here"

    async def do_connect(self, sources: Any, sync: Any, siblings: Sequence[HostCopy], slot: int = 0) -> Connection:
        self.connected.append(sources)
        return Connection(["shared memory"], None)

    async def do_submit(self, requests: list[Request], withdrawn: Sequence[str]) -> None:
        await self.steps.wait()
        self.requests += requests
        if withdrawn:
            self.withdrawn.append(list(withdrawn))
        for request in [request for request in self.requests if request.id in withdrawn]:
            self.done.put_nowait(Done(request.id, [Completion([], [], [], "abort")] * len(request.seeds)))

    async def do_take(self, within: float) -> list[Done]:
        await self.steps.wait()
        try:
            return [await asyncio.wait_for(self.done.get(), within)]
        except TimeoutError:
            return []

    async def do_fetch_weights(self, manifests: Any, timeout: float, note: Any, slot: int = 0) -> ReaderCost:
        return ReaderCost(blocks=1)

    async def do_switch(self, version: int, timeout: float, slot: int = 0) -> ReaderCost:
        await self.steps.wait()
        return ReaderCost()


def fake_replica(index: int, engine: Any, policy: GeneratorPolicy) -> Replica:
    class Fake(Replica):
        async def kill(self) -> None: ...

        async def stop(self) -> None: ...

    return Fake(index, f"generator{index}", engine, SETTINGS, policy)


def fake_mesh(
    engines: Sequence[FakeEngine],
    folder: Path,
    *,
    make: Make | None = None,
    max_restarts: int = 0,
    **seconds: float,
) -> GeneratorMesh:
    """Return a mesh of one replica for each engine. The losses are in `mesh._policy.incidents`."""
    incidents = Incidents(folder, FaultSection(max_restarts=max_restarts), lambda _: None)
    policy = GeneratorPolicy(**{"hang_seconds": 5, "seconds": 5, "init_seconds": 5, **seconds}, incidents=incidents)
    replicas = [fake_replica(i, engine, policy) for i, engine in enumerate(engines)]
    return GeneratorMesh(replicas, policy, make=make)
