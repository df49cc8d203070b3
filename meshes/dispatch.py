"""Requests on their way: to the replicas that Routing chooses, and back to the caller that awaits them.

generate ── route ──> replica ── put ──> engine ──> the awaiting generate
              ^          └── relieve ──> withdraw ──┘  │
              └────────────── begun samples ───────────┘
"""

import asyncio
from collections.abc import Callable
from functools import partial

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.replica import Replica
from titan_rl.meshes.routing import Load, Move, Routing
from titan_rl.meshes.stealing import SILENT_SECONDS
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RequestRefused
from titan_rl.wire.types import Completion, Request

REPORT_SECONDS = 0.25  # how often an engine reports its progress where stealing is decided by it
MOST_REPORTS = 500  # a second, of all engines together: each costs the controller 0.6 ms of CPU
STEAL_SECONDS = 0.02  # between two decisions on stealing, each of which looks at every replica


def _now() -> float:
    return asyncio.get_running_loop().time()


class Dispatch:
    """Sends what Routing decides, and resolves the awaited answers. With slots (see Routing) idle replicas steal: what
    a sample draws then depends on timing, because it may move."""

    def __init__(self, replicas: dict[int, Replica], slots: int | None) -> None:
        """`replicas` are those that serve; their owner adds and removes them."""
        self._replicas = replicas
        self._steals = slots is not None
        self._routing = Routing(len(replicas), slots)
        self._answers: dict[str, asyncio.Future[list[Completion]]] = {}
        self._switching = False
        self._settling: asyncio.Task[None] | None = None
        self._sends = False  # in this tick of the loop
        self._stole = 0.0  # when stealing was decided last
        self._steal_later: asyncio.TimerHandle | None = None

    async def generate(self, request: Request) -> list[Completion]:
        """Route a request to the replica with the least to do, the first among equals, and await its answer."""
        self._routing.add(request)
        loop = asyncio.get_running_loop()
        answer = self._answers[request.id] = loop.create_future()
        if not self._sends:
            self._sends = True
            loop.call_soon(self._send)  # once all requests of this tick are added
        try:
            return await answer
        finally:
            del self._answers[request.id]
            for index, samples in self._routing.forget(request.id).items():  # if the caller gave up: make room
                self._take_back(index, samples)

    def serve(self, replica: Replica, lost: Callable[[Exception], None]) -> None:
        """Carry the requests of a replica whose engine is built. Call `lost` at its first failure."""
        often = max(REPORT_SECONDS, len(self._replicas) / MOST_REPORTS)
        within = min(often, SILENT_SECONDS / 2) if self._steals else None
        replica.serve(partial(self._heard, replica), self._gave, lost, within)

    def join(self, index: int) -> None:
        self._routing.join(index, _now())
        self._send()

    def lose(self, index: int) -> int:
        """Send what a lost replica had to the others. Return how many samples begin again."""
        again = self._routing.lose(index)
        self._send()
        return again

    def retire(self, index: int) -> None:
        """Route nothing to a replica any more, and ask for its unfinished samples back."""
        self._take_back(index, self._routing.retire(index))

    def loads(self) -> dict[int, Load]:
        return self._routing.loads()

    async def settle_moves(self, seconds: float) -> None:
        """Wait until no sample is on its way between two engines, and let none move until `resume_moves`: an engine
        that drains finishes what it has before it switches, so nothing that began on the old weights may reach it
        afterwards. A replica that does not give back its samples within `seconds` is lost. All replicas that switch
        ask for this at the same time, and it looks at all of them: they share one wait."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(seconds))
        await asyncio.shield(self._settling)

    async def _settle(self, seconds: float) -> None:
        self._switching = True
        try:
            async with deadline(seconds):
                while owing := [replica for replica in self._replicas.values() if replica.owes]:
                    await asyncio.gather(*(replica.repay() for replica in owing))
        except TimeoutError:
            for replica in [replica for replica in self._replicas.values() if replica.owes]:
                error = DeadlinePassed(
                    f"{replica.name} did not give back its samples within {seconds:g} s",
                    "If this is slow rather than stuck, raise [comm] train_timeout_seconds.",
                    rank=replica.ranks[0],
                )
                replica.give_up(error)
        if self._steals:
            await asyncio.gather(*(replica.delivered() for replica in self._replicas.values()))

    def resume_moves(self) -> None:
        self._switching = False
        self._routing.resume(_now())

    def fail_answers(self, error: Exception) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _send(self) -> None:
        self._sends = False
        for index, part, whole in self._routing.send(_now()):
            self._replicas[index].put(part).add_done_callback(partial(self._done, index, part.id, whole))

    def _done(self, index: int, id: str, whole: str, part: asyncio.Future[list[Completion]]) -> None:
        answer, error = self._answers.get(whole), part.exception()
        if isinstance(error, RequestRefused) and answer is not None and not answer.done():
            answer.set_exception(error)
        if error is not None:  # otherwise its replica is lost: the request continues elsewhere, or all of them fail
            return
        completions = self._routing.done(index, id, part.result())
        if answer is not None and not answer.done() and completions is not None:
            answer.set_result(completions)

    def _heard(self, replica: Replica, report: EngineReport) -> None:
        if self._replicas.get(replica.index) is not replica:
            return
        self._routing.report(replica.index, report, _now())
        self._send()
        if self._steals and self._steal_later is None:
            wait = self._stole + STEAL_SECONDS - _now()
            if wait <= 0:
                self._steal()
            else:
                self._steal_later = asyncio.get_running_loop().call_later(wait, self._steal)

    def _steal(self) -> None:
        self._steal_later, self._stole = None, _now()
        for move in [] if self._switching else self._routing.steal(self._stole):
            self._relieve(move)

    def _take_back(self, index: int, samples: list[SampleId]) -> None:
        if samples:
            self._relieve(Move(None, index, samples, _now()))

    def _relieve(self, move: Move) -> None:
        self._replicas[move.victim].relieve(move)

    def _gave(self, move: Move, withdrawn: list[Withdrawn]) -> None:
        self._routing.moved(move, withdrawn)
        self._send()
