"""Environment processes without processes: the mesh on loops of this one."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.config.sections import FaultSection
from titan_rl.ext.agents.conversation import PlainText
from titan_rl.ext.agents.environment_mesh import EnvironmentMesh, EnvironmentPolicy
from titan_rl.ext.agents.environment_process import EnvironmentProcess
from titan_rl.ext.agents.environment_rank import EnvironmentSettings, Taken
from titan_rl.ext.agents.episode_loop import EpisodeLoop, LoopSettings
from titan_rl.ext.agents.episodes import Limits
from titan_rl.record.incidents import Incidents
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RankDied

CLOSE_SECONDS = 10.0
_loops: list[EpisodeLoop] = []  # one for each rank that this test has started


def close_loops() -> None:
    for loop in _loops:
        loop.close()
    for loop in _loops:
        loop.close(CLOSE_SECONDS)
    _loops.clear()


class Call:
    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def call(self, *arguments: Any) -> "Call":
        self._work = self._function(*arguments)
        return self

    def as_asyncio(self) -> Coroutine[Any, Any, Any]:
        return self._work


class FakeRank:
    """What an EnvironmentRank does, and a switch that ends it."""

    def __init__(self, name: str, settings: EnvironmentSettings) -> None:
        self._settings, self.rank = settings, f"{name}[env=0]"
        self._wake, self.dead = asyncio.Event(), False

    def slice(self, **_: int) -> "FakeRank":
        return self

    def __getattr__(self, verb: str) -> Call:
        return Call(getattr(self, f"_{verb}"))

    def die(self) -> None:
        self.dead = True
        self._wake.set()
        self._loop.close()

    async def _start(self) -> None:
        main = asyncio.get_running_loop()
        renderer = PlainText(TextTokenizer.load(self._settings.tokenizer))

        def notify() -> None:
            if not main.is_closed():
                main.call_soon_threadsafe(self._wake.set)

        self._loop = EpisodeLoop(self._settings.loop, renderer, notify)
        _loops.append(self._loop)

    async def _begin(self, begins: Any) -> None:
        self._loop.begin(begins)

    async def _answer(self, answers: Any) -> None:
        self._loop.answer(answers)

    async def _cancel(self, ids: Any) -> None:
        self._loop.cancel(ids)

    async def _running(self) -> int:
        return self._loop.running

    async def _take(self, within: float) -> Taken:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), within)
        if self.dead:
            raise RankDied(self.rank, "was killed by signal 9")
        self._wake.clear()
        return Taken(self._loop.take_news(), self._loop.look(), self._loop.stuck)


class FakeProcs:
    def __init__(self, ranks: list[FakeRank]) -> None:
        self._ranks = ranks

    def spawn(self, name: str, _: type, settings: EnvironmentSettings) -> FakeRank:
        self._ranks.append(FakeRank(name, settings))
        return self._ranks[-1]

    def stop(self) -> Call:
        async def stopped() -> None: ...

        return Call(stopped).call()


async def fake_environments(
    name: str,
    folder: Path,
    limits: Limits,
    *,
    processes: int = 2,
    concurrency: int = 8,
    lockstep: bool = False,
    agent: bool = False,
    python: str = "",
) -> tuple[EnvironmentMesh, list[FakeRank], list[str]]:
    """Return a started mesh, its ranks in the order in which they were spawned, and its messages about incidents."""
    characters.build(folder)
    ranks, said = list[FakeRank](), list[str]()
    settings = EnvironmentSettings(LoopSettings(name, concurrency, limits, agent, python), folder)
    incidents = Incidents(folder, FaultSection(), said.append)
    policy = EnvironmentPolicy(processes, lockstep=lockstep, overlapping=agent, incidents=incidents)

    async def make(number: int) -> EnvironmentProcess:
        procs: Any = FakeProcs(ranks)
        return EnvironmentProcess(number, f"environment{number}", procs, settings, policy.hang_seconds)

    mesh = EnvironmentMesh(make, concurrency, policy)
    await mesh.start()
    return mesh, ranks, said
