"""One process of the environment mesh, and the rollouts that it drives.

begin ── begin, answer, cancel ──> process ── take ──> the awaiting Episode
"""

import asyncio
import time
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Any

from monarch.actor import ProcMesh

from titan_rl.ext.agents.environment_rank import EnvironmentRank, EnvironmentSettings, Taken
from titan_rl.ext.agents.episode_news import Answer, Ask, Begin, Blocked, Dropped, Ended, News
from titan_rl.meshes.faults import ask, label
from titan_rl.meshes.spawn import end
from titan_rl.wire.errors import RunError
from titan_rl.wire.sessions import Outcome
from titan_rl.wire.spans import Recorded

TurnNews = Ask | Dropped
LONGEST_POLL = 1.0  # seconds between two signs of life


class BlockedLoop(RunError):
    """An async environment blocks its process."""

    def __init__(self, rank: str, blocked: Blocked) -> None:
        what = f"{rank}: {blocked.dead or f'its loop has been blocked for {blocked.seconds:.1f} s by {blocked.place}'}"
        remedy = "An async function must not block: make it a plain one, which runs on a thread."
        remedy = "The code of a rollout ended its process." if blocked.dead else remedy
        super().__init__(what, remedy, rank=rank)
        self.id = -1 if blocked.id is None else blocked.id
        self.place = blocked.place


class ProcessLost(Exception):
    """A rollout's process is lost. str() is the reason."""


class Episode:
    """A rollout in a process."""

    def __init__(self, id: int, order: int, suspicion: int) -> None:
        """`order`: the rollout's number among all; it stays when the rollout moves to another process."""
        self.id, self.order, self.suspicion = id, order, suspicion
        self.thinking = True  # the user's code runs; else it is the policy's turn
        self.verdict: Outcome | None = None  # set if the rollout is known to have harmed its process
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._take: Callable[[TurnNews], None] | None = None

    async def listen(self, take: Callable[[TurnNews], None]) -> Outcome:
        """Wait for the end. Call `take` with each turn that the rollout requests or drops. It is no task per turn,
        because one message may have the turns of a thousand rollouts."""
        self._take = take
        try:
            return await self._outcome
        finally:
            self._take = None  # it refers to this rollout: the cycle would keep all its tokens

    def receive(self, news: News) -> None:
        self.thinking = False
        if self._outcome.done():
            return
        if isinstance(news, Ended):
            self._outcome.set_result(news.outcome)
        elif self._take is not None:
            try:
                self._take(news)
            except Exception as error:  # it ends this rollout, not its process
                self.fail(error)

    def lose(self, error: str) -> None:
        self.fail(ProcessLost(error))

    def fail(self, error: Exception) -> None:
        """End the rollout in this process."""
        if not self._outcome.done():
            self._outcome.set_exception(error)


class EnvironmentProcess:
    def __init__(
        self, number: int, name: str, procs: ProcMesh, settings: EnvironmentSettings, hang_seconds: float
    ) -> None:
        """`hang_seconds` bounds the silence of a process. Code that holds the interpreter's lock silences it."""
        self.number, self.name = number, name
        self.load = self.suspects = 0  # rollouts with a place here, and how many of them are suspects
        self.open: dict[int, Episode] = {}
        self.error: str = ""  # final once set
        self.retired = ""  # the reason why it gets no more rollouts
        self.state, self.since = "starting", time.monotonic()
        self._procs, self._settings, self._hang_seconds = procs, settings, hang_seconds
        self.rank = label(name, {"env": 0})
        actors: Any = procs.spawn(name, EnvironmentRank, settings)
        self._actor = actors.slice(env=0)
        self._outbox: list[tuple[str, Any]] = []  # (verb, argument), in order
        self._filled = asyncio.Event()  # set while the outbox is not empty
        self._serving: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        await self._ask("start", seconds=seconds)

    def serve(self, on_taken: Callable[[Taken], None], lost: Callable[[Exception], None]) -> None:
        """Carry messages to and from the process. Call `on_taken` at least every second, `lost` at the first
        failure."""

        async def run() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send())
                    tasks.create_task(self._receive(on_taken))
            except* Exception as errors:
                lost(errors.exceptions[0])

        self._serving = asyncio.create_task(run())

    def begin(self, begin: Begin, episode: Episode) -> None:
        if self.error:
            episode.thinking = False
            raise ProcessLost(self.error)
        self.open[begin.id] = episode
        self._put("begin", begin)

    def answer(self, episode: Episode, answer: Answer) -> None:
        episode.thinking = True
        self._put("answer", answer)

    def leave(self, episode: Episode, *, ended: bool) -> None:
        """Forget a rollout; cancel it in its process unless it has ended."""
        self.open.pop(episode.id, None)
        if not ended and not self.error:
            self._put("cancel", episode.id)

    def fail(self, error: str) -> None:
        """Take no more rollouts, and lose the open ones."""
        self.error = self.error or error
        if self._serving is not None and self._serving is not asyncio.current_task():
            self._serving.cancel()
        for episode in list(self.open.values()):
            episode.lose(self.error)

    def set_state(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    async def spans(self) -> Recorded:
        return await self._ask("spans")

    async def running(self) -> int:
        return await self._ask("running")

    async def kill(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        await end([self.rank], self._procs)

    async def _ask(self, verb: str, *arguments: Any, seconds: float | None = None) -> Any:
        call = getattr(self._actor, verb).call(*arguments)
        return await ask(call, actor=self.rank, verb=verb, seconds=seconds or self._hang_seconds)

    def _put(self, verb: str, item: Any) -> None:
        self._outbox.append((verb, item))
        self._filled.set()

    async def _send(self) -> None:
        """Send the items that came in during the last message, in order: one message per run of equal verbs."""
        while True:
            await self._filled.wait()
            waiting, self._outbox = self._outbox, []
            self._filled.clear()
            for verb, run in groupby(waiting, key=itemgetter(0)):
                await self._ask(verb, [item for _, item in run])

    async def _receive(self, on_taken: Callable[[Taken], None]) -> None:
        within = min(LONGEST_POLL, self._settings.loop.limits.turn_seconds / 4)
        while True:
            taken: Taken = await self._ask("take", within, seconds=within + self._hang_seconds)
            for news in taken.news:
                if (episode := self.open.get(news.id)) is not None:
                    episode.receive(news)
            if taken.blocked is not None:
                raise BlockedLoop(self.rank, taken.blocked)
            on_taken(taken)
