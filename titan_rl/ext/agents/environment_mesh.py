"""The environment mesh: processes that run the user's code, each a failure domain.

    drive(session) ── begin ──> the least loaded process
                   <── Ask ──   its turn: session.sample, then answer
                   <── Ended ── the Outcome

User code can neither block nor crash the controller. An exception ends one rollout. A process that dies or is blocked
is killed and replaced. Its rollouts begin again in other processes, where the turns that were sampled before are
replayed. Rollouts whose code ran at that moment are suspects: after each further death a process takes fewer of them,
at last one at a time, which isolates the one that kills its process. A process in which a thread is stuck finishes its
other rollouts before it is replaced."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from monarch.actor import HostMesh

from titan_rl.ext.agents.environment_process import BlockedLoop, EnvironmentProcess, Episode, ProcessLost
from titan_rl.ext.agents.environment_rank import EnvironmentSettings, Taken
from titan_rl.ext.agents.environment_turns import TurnScript
from titan_rl.ext.agents.episode_news import Begin
from titan_rl.ext.agents.seat_models import SeatModel
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.spawn import spawn
from titan_rl.record.incidents import Incidents
from titan_rl.wire.errors import RunError
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.spans import Recorded

NAME = "environment"


@dataclass(frozen=True, slots=True)
class EnvironmentPolicy:
    processes: int
    init_seconds: float = 300
    hang_seconds: float = 60
    lockstep: bool = False  # sample all rollouts' turns together
    overlapping: bool = False  # a rollout's code also runs while its turns are sampled
    incidents: Incidents | None = None  # records losses and limits respawns; None: a loss ends the mesh


Waiting = tuple[asyncio.Future[EnvironmentProcess], int, bool]
"""A rollout that waits for a place: the place, how often it was suspected, whether it had a place before."""


class EnvironmentMesh:
    """Drives rollouts; see wire/sessions.py."""

    def __init__(
        self, make: Callable[[int], Awaitable[EnvironmentProcess]], concurrency: int, policy: EnvironmentPolicy
    ) -> None:
        """`concurrency`: rollouts that one process drives concurrently."""
        self.processes: list[EnvironmentProcess] = []
        self._retired: list[EnvironmentProcess] = []  # they finish their rollouts
        self._make, self._concurrency, self._policy = make, concurrency, policy
        self._numbers: set[int] = set()  # in use: the process runs, or is not terminated yet
        self._ids, self._orders = count(), count()
        self._queue: deque[Waiting] = deque()  # rollouts without a place
        self._placed = 0  # rollouts with one
        # turns held back by lockstep, by their rollouts' order: several of one rollout if its players move together
        self._held: dict[int, list[asyncio.Future[None]]] = {}
        self._coming = 0  # processes that are being spawned
        self._sound = False  # a rollout has ended since the last loss: the next one does not count against the budget
        self._error: RunError | None = None  # final once set
        self._closed = False
        self._models: Sequence[SeatModel] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def spawn(
        cls,
        host: HostMesh | Callable[[int], Host],
        settings: EnvironmentSettings,
        policy: EnvironmentPolicy,
        env: Mapping[str, str],
    ) -> "EnvironmentMesh":
        """`host`: one for all processes, or a function from a process's number to its host."""

        async def make(number: int) -> EnvironmentProcess:
            there = host if isinstance(host, HostMesh) else host(number)
            procs = await spawn(there, name=f"{NAME}{number}", shape={"env": 1}, env=env)
            return EnvironmentProcess(number, f"{NAME}{number}", procs, settings, policy.hang_seconds)

        mesh = cls(make, settings.loop.concurrency, policy)
        await mesh.start()
        return mesh

    async def start(self) -> None:
        """Start every process. One that fails during start-up is not replaced; the run ends."""
        await asyncio.gather(*(self._join() for _ in range(self._policy.processes)))

    def play_with(self, models: Sequence[SeatModel]) -> None:
        """Own the models that play seats: losing one for good ends the mesh, and closing it ends them."""
        self._models = models
        for model in models:
            model.failed = self._end

    async def drive(self, session: Session) -> Outcome:
        script = TurnScript(session, self._in_step if self._policy.lockstep else None)
        order, suspicion, again = next(self._orders), 0, False
        while True:
            process = await self._place(suspicion, again=again)
            episode, ended = Episode(next(self._ids), order, suspicion), False
            try:
                process.begin(Begin(episode.id, session.prompt, session.seed), episode)
                outcome = await script.play(process, episode)
                if outcome.error and self._error is not None:  # which is why it failed
                    raise self._error
                ended = self._sound = True
                return outcome
            except ProcessLost as lost:
                if episode.verdict is not None:
                    return episode.verdict
                if episode.thinking or self._policy.overlapping:
                    if suspicion and self._suspects(suspicion) == 1:
                        return Outcome("lost", error=str(lost))
                    suspicion += 1
                again = True
            finally:
                process.leave(episode, ended=ended)
                self._release(process, suspect=episode.suspicion > 0)

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Return each process's spans since the last call, by rank name."""
        return {process.rank: process.spans() for process in self.processes}

    @property
    def ranks(self) -> dict[str, tuple[str, float]]:
        """Return (state, its begin) of each process, by rank name."""
        own = {p.rank: (p.state, p.since) for p in [*self.processes, *self._retired]}
        return own | {rank: state for model in self._models for rank, state in model.ranks.items()}

    async def running(self) -> int:
        """Return the number of rollouts whose code runs in any process."""
        return sum([await process.running() for process in [*self.processes, *self._retired]])

    async def close(self) -> None:
        """Kill every process. Open rollouts fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._end(RunError("the environments are closed"))
        for process in [*self.processes, *self._retired]:
            process.fail("the environments are closed")
        await asyncio.gather(
            *(process.kill() for process in [*self.processes, *self._retired]),
            *(model.close() for model in self._models),
        )

    # -- one rollout ----------------------------------------------------------------------------------------------

    async def _in_step(self, episode: Episode) -> None:
        """Wait until every rollout waits for the policy."""
        loop = asyncio.get_running_loop()
        held: asyncio.Future[None] = loop.create_future()
        self._held.setdefault(episode.order, []).append(held)
        loop.call_soon(self._step)  # later, so that this rollout too continues in its turn
        try:
            await held
        finally:
            if held in (turns := self._held.get(episode.order, [])):
                turns.remove(held)
            if not turns:
                self._held.pop(episode.order, None)

    def _step(self) -> None:
        moving = self._coming and any(again for _, _, again in self._queue)  # to a process that is being spawned
        if len(self._held) == self._placed and not moving:
            for held in [held for order in sorted(self._held) for held in self._held[order]]:
                if not held.done():
                    held.set_result(None)

    # -- places ---------------------------------------------------------------------------------------------------

    async def _place(self, suspicion: int, *, again: bool = False) -> EnvironmentProcess:
        """Wait for a place in the least loaded process. First come, first served, but suspects wait for each other."""
        if self._error is not None:
            raise self._error
        place: asyncio.Future[EnvironmentProcess] = asyncio.get_running_loop().create_future()
        self._queue.append((place, suspicion, again))
        self._deal()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release(place.result(), suspect=suspicion > 0)
            raise

    def _release(self, process: EnvironmentProcess, *, suspect: bool) -> None:
        process.load -= 1
        process.suspects -= suspect
        self._placed -= 1
        self._deal()
        asyncio.get_running_loop().call_soon(self._step)  # later: the rollout may be about to move
        if process.retired and not process.load and process in self._retired:
            self._retired.remove(process)
            self._in_background(self._terminate(process))

    def _deal(self) -> None:
        waiting: list[Waiting] = []
        while self._queue and (open := [p for p in self.processes if p.load < self._concurrency]):
            place, suspicion, again = self._queue.popleft()
            if suspicion:
                open = [p for p in open if p.suspects < self._suspects(suspicion)]
            if not open:
                waiting.append((place, suspicion, again))
            elif not place.done():
                process = min(open, key=lambda p: p.load)
                process.load += 1
                process.suspects += suspicion > 0
                self._placed += 1
                place.set_result(process)
        self._queue.extendleft(reversed(waiting))

    def _suspects(self, suspicion: int) -> int:
        """Return how many suspects a process takes if one of them has been suspected `suspicion` times."""
        return max(1, self._concurrency >> 3 * (suspicion - 1))

    # -- failures -------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        number = next(n for n in count() if n not in self._numbers)
        self._numbers.add(number)
        process: EnvironmentProcess | None = None
        try:
            process = await self._make(number)
            await process.start(self._policy.init_seconds)
        except BaseException:
            if process is not None:
                await process.kill()
            self._numbers.discard(number)
            raise
        process.serve(lambda taken: self._on_taken(process, taken), lambda error: self._lost(process, error))
        process.set_state("serving")
        self.processes.append(process)
        self._deal()

    def _on_taken(self, process: EnvironmentProcess, taken: Taken) -> None:
        if taken.stuck and not process.retired and not self._closed:
            self._retire(process, f"{taken.stuck} of its rollouts did not return in time, and still run")

    def _retire(self, process: EnvironmentProcess, reason: str) -> None:
        """Replace a process once its other rollouts have ended."""
        process.retired = reason
        process.set_state("retired")
        self.processes.remove(process)
        self._retired.append(process)
        self._replace(process, RunError(f"{process.rank} is replaced: {reason}", rank=process.rank))
        if not process.load:
            self._retired.remove(process)
            self._in_background(self._terminate(process))

    def _lost(self, process: EnvironmentProcess, error: Exception) -> None:
        if process not in self.processes and process not in self._retired:
            return
        again = len(process.open)
        if isinstance(error, BlockedLoop) and (culprit := process.open.get(error.id)) is not None:
            culprit.verdict = Outcome("timeout", error=f"turn_seconds: {error.place}")
        process.fail(str(error))
        process.set_state("lost")
        if process in self._retired:
            self._retired.remove(process)
            self._in_background(self._terminate(process))
            return
        self.processes.remove(process)
        run_error = error if isinstance(error, RunError) else RunError(f"{process.rank} failed: {error!r}")
        self._replace(process, run_error, again)

    def _replace(self, process: EnvironmentProcess, error: RunError, again: int = 0) -> None:
        if (incidents := self._policy.incidents) is None:
            self._end(error)
            self._in_background(self._terminate(process))
            return
        self._coming += 1
        counts, self._sound = not self._sound, False
        incident = incidents.lost(name := process.name, error)

        async def replaced() -> None:
            nonlocal error, counts
            if process.error:  # else it is retired, and finishes its rollouts
                await self._terminate(process)
            while True:
                if not incidents.may_respawn(name, counts=counts):
                    self._coming -= 1
                    remaining = len(self.processes) + self._coming
                    incidents.given_up(incident, f"{remaining} environment process{'es' * (remaining != 1)} left")
                    if not remaining:
                        self._end(incidents.over_budget(name, error))
                    return
                try:
                    await self._join()
                except RunError as failed:
                    incidents.note(f"{name} did not come back: {failed}")
                    error, counts = failed, True
                else:
                    self._coming -= 1
                    self._step()
                    incidents.back(incident, f"{again} rollout{'s' * (again != 1)} to play again")
                    return

        self._in_background(replaced())

    async def _terminate(self, process: EnvironmentProcess) -> None:
        """Kill a process; from then on its name is free."""
        await process.kill()
        self._numbers.discard(process.number)

    def _end(self, error: RunError) -> None:
        self._error = self._error or error
        while self._queue:
            place, *_ = self._queue.popleft()
            if not place.done():
                place.set_exception(self._error)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def guarded() -> None:
            try:
                await work
            except RunError as error:
                self._end(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
