"""Replaces lost replicas of the generator mesh, and changes the number of replicas.

A replica that dies, hangs or fails is lost. The others take over its requests at once. A new replica is spawned, and
serves once it has the same weights as the others. Without `incidents` a loss ends the mesh.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

from titan_rl.meshes.faults import ask_all
from titan_rl.meshes.replica import GRACE_SECONDS, GeneratorPolicy, Replica, State
from titan_rl.meshes.router import Router
from titan_rl.record.incidents import Incident, Incidents
from titan_rl.wire.errors import RankDied, RunError, WeightsRefused

T = TypeVar("T")

REFUSED = WeightsRefused.__name__  # `kind` of the error of a rank that refuses its weights
CAUSE_SECONDS = 0.5  # a trainer's death breaks its readers' transfers, and must be known before their failure counts
DRAIN_SECONDS = 60.0  # limit for a replica that is scaled away to return its requests

Make = Callable[[int, bool], Awaitable[Replica]]  # (replica number, whether its last start failed)


class Fleet:
    """The replicas that serve, and the replicas that are being spawned."""

    def __init__(
        self, replicas: dict[int, Replica], router: Router, policy: GeneratorPolicy, make: Make | None
    ) -> None:
        self.replicas = replicas
        self.coming: dict[int, Replica | None] = {}  # replicas being spawned; None: before its processes exist
        self._missing: set[int] = set()  # replicas that were given up until there is room
        self._unstarted: dict[int, str] = {}  # host of the last start that failed, by replica
        self.error: Exception | None = None  # final once set: too few replicas are left
        self._router, self._make = router, make
        self._policy, self._incidents = policy, policy.incidents
        self._catch_up: Callable[[Replica], Awaitable[None]] | None = None
        self._gone: Callable[[str], None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scaling = asyncio.Lock()

    def tend(self, catch_up: Callable[[Replica], Awaitable[None]], gone: Callable[[str], None]) -> None:
        """Replace lost replicas from now on. `catch_up` brings a new one to the weights that the others serve; `gone`
        gets the name of a replica that has stopped reading weights."""
        self._catch_up, self._gone = catch_up, gone

    def serve(self, replica: Replica) -> None:
        """Carry the requests of a replica whose engine is built."""
        replica.serve(partial(self._lost, replica))
        self._router.join(replica)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def each(self, work: Callable[[Replica], Awaitable[T]], refused: list[str] | None = None) -> dict[Replica, T]:
        """Return each replica's answer. A replica that fails is lost. With `refused`, a replica that refuses its
        weights is listed there instead."""
        answers: dict[Replica, T] = {}

        async def one(replica: Replica) -> None:
            try:
                answers[replica] = await work(replica)
            except RunError as error:
                if self._incidents is None:
                    raise
                if refused is not None and error.kind == REFUSED:
                    refused.append(replica.name)
                    return
                if not isinstance(error, RankDied):
                    await asyncio.sleep(CAUSE_SECONDS)
                self._lost(replica, error)

        await asyncio.gather(*map(one, self.replicas.values()))
        self.check()
        return {replica: answers[replica] for replica in sorted(answers, key=lambda replica: replica.index)}

    async def scale(self, replicas: int) -> int:
        """Spawn or drain replicas until there are `replicas`. Return their number."""
        if self._make is None:
            raise RunError("these generators cannot be scaled")
        async with self._scaling:
            self._missing.clear()
            while len(self.replicas) + len(self.coming) < replicas:
                self._grow(next(i for i in count() if i not in self.replicas and i not in self.coming))
            while len(self.replicas) + len(self.coming) > replicas:
                index = max([*self.replicas, *self.coming])
                if index in self.coming:
                    raise RunError(f"generator{index} is being spawned: try again once it serves")
                await self._drain(self.replicas[index])
            await self.settled()
            return len(self.replicas)

    async def settled(self) -> None:
        """Return when no replica is being started. Each start has its deadline, and the budget limits their number."""
        while self.coming and self.error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def regrow(self) -> None:
        """Spawn the replicas again that were given up, because a host is back."""
        for index in sorted(self._missing - self.replicas.keys() - self.coming.keys()):
            self._grow(index)
        self._missing.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas.values()))

    def _lost(self, replica: Replica, error: Exception) -> None:
        """Send a replica's requests to the others, and replace it."""
        if self.replicas.get(replica.index) is not replica:
            return
        replica.fail(error)
        incidents = self._incidents
        if incidents is None or self._catch_up is None or incidents.never_respawns(len(self.replicas)):
            self._end(error)
            return
        run_error = error if isinstance(error, RunError) else RunError(f"{replica.name} failed: {error}")
        incident = incidents.lost(replica.name, run_error)
        del self.replicas[replica.index]
        again = self._router.on_lost(replica)
        self.coming[replica.index] = None

        async def replaced() -> None:
            await self._terminate(replica)
            await self._replace(incidents, replica.index, run_error, incident, again)

        self._in_background(replaced())

    async def _replace(self, incidents: Incidents, index: int, error: RunError, incident: Incident, again: int) -> None:
        """Spawn another replica, until one serves or the budget is spent."""
        name = incident.role
        while True:
            if not incidents.may_respawn(name):
                del self.coming[index]
                self._missing.add(index)
                remaining = len(self.replicas) + len(self.coming)
                incidents.given_up(incident, f"{remaining} generator{'s' * (remaining != 1)} left")
                if remaining < self._policy.min_replicas:
                    self._end(incidents.over_budget(name, error))
                return
            try:
                await self._join(index)
            except RunError as failed:
                incidents.note(f"{name} did not come back: {failed}")
                error = failed
            else:
                incidents.back(incident, f"{again} samples were started again", resampled=again)
                return

    async def _join(self, index: int) -> None:
        """Bring up a replica: its processes, its engine, the weights that the others serve, and then requests."""
        assert self._make is not None
        assert self._catch_up is not None
        before = self._unstarted.get(index)
        replica = self.coming[index] = await self._make(index, before is not None)
        self._unstarted[index] = replica.host
        if before and before != replica.host and self._incidents is not None:
            self._incidents.note(f"{replica.name} did not start on {before}: it is tried on {replica.host}")
        try:
            await ask_all(replica.calls("start"), verb="start", seconds=self._policy.init_seconds)
            del self._unstarted[index]
            replica.set_state(State.SYNCING)
            await self._catch_up(replica)
        except RunError as error:
            replica.fail(error)
            await self._terminate(replica)
            raise
        del self.coming[index]
        self.replicas[index] = replica
        self.serve(replica)

    def _grow(self, index: int) -> None:
        """Add a replica. One that fails to come up is treated as lost."""
        self.coming[index] = None
        self._unstarted.pop(index, None)

        async def grown() -> None:
            try:
                await self._join(index)
            except RunError as error:
                if (incidents := self._incidents) is None:
                    raise
                await self._replace(incidents, index, error, incidents.lost(f"generator{index}", error), 0)

        self._in_background(grown())

    async def _terminate(self, replica: Replica) -> None:
        await replica.kill()
        self._gone(replica.name)

    async def _drain(self, replica: Replica) -> None:
        """End a replica after it has returned its unfinished requests, with the tokens sampled so far."""
        self._router.retire(replica)
        with suppress(TimeoutError):
            await asyncio.wait_for(replica.idle(), DRAIN_SECONDS)
        if self.replicas.pop(replica.index, None) is not replica:
            return  # lost meanwhile
        self._router.on_lost(replica)
        with suppress(Exception):  # it is killed in any case
            await asyncio.wait_for(replica.close(), GRACE_SECONDS)
        await self._terminate(replica)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # a bug, but no caller may wait for ever
                self._end(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, error: Exception) -> None:
        self.error = self.error or error
        self._router.fail(error)
