"""A generator rank whose engine takes long for a step, and notes when each began."""

import asyncio
import time
from collections.abc import Sequence

from monarch.actor import concurrent_endpoint

from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.actors.vllm.generator import Generator
from titan_rl.wire.reports import EngineStats
from titan_rl.wire.types import Completion, Request


class SlowEngine:
    """Is always busy, and answers a request after the step that it enters: with the number of that step."""

    asleep, version, busy, serves = False, 0, True, True

    def __init__(self, seconds: float) -> None:
        self.began = list[float]()  # each step
        self._seconds, self._entered = seconds, list[Request]()

    def check(self, requests: Sequence[Request]) -> None:
        pass

    def add(self, requests: Sequence[Request]) -> None:
        self._entered += requests

    def step(self) -> list[Done]:
        self.began.append(time.time())
        time.sleep(self._seconds)
        entered, self._entered = self._entered, []
        nth = len(self.began) - 1
        return [Done(request.id, [Completion([nth], [0.0], [0], "length")]) for request in entered]

    def stats(self) -> EngineStats:
        return EngineStats()


class SlowGenerator(Generator):
    def __init__(self, settings: EngineSettings, seconds: float) -> None:
        super().__init__(settings)
        self._slow = SlowEngine(seconds)

    @concurrent_endpoint
    async def begin(self) -> None:
        self._engine = self._slow  # pyright: ignore[reportAttributeAccessIssue]
        self._loop = asyncio.create_task(self._run())

    @concurrent_endpoint
    async def steps(self) -> list[float]:
        """Return when each step began."""
        return self._slow.began
