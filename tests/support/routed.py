"""A router on replicas that record their requests. A test makes them answer."""

import asyncio
from typing import Any

from titan_rl.meshes.replica import State
from titan_rl.meshes.router import Router
from titan_rl.wire.types import Completion, Request

CONTEXT = [1, 2, 3, 4]


class NotedReplica:
    """Stands for a Replica whose engine has all its requests."""

    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"generator{index}"
        self.state, self.error = State.SERVING, None
        self.sent: list[Request] = []
        self.withdrawn: list[str] = []
        self.open: dict[str, asyncio.Future[list[Completion]]] = {}

    def set_state(self, state: State) -> None:
        self.state = state

    def put(self, request: Request) -> asyncio.Future[list[Completion]]:
        assert self.state is State.SERVING
        assert request.id not in [sent.id for sent in self.sent], "an id is sent once to a replica"
        self.sent.append(request)
        return self.open.setdefault(request.id, asyncio.get_running_loop().create_future())

    def withdraw(self, id: str) -> None:
        self.withdrawn.append(id)

    def answer(self, id: str, *completions: Completion) -> None:
        self.open.pop(id).set_result([*completions])


class World:
    """A router and its replicas. Call it from a running event loop, and `tick` after what takes effect later."""

    def __init__(self, replicas: int) -> None:
        self.router, self.replicas = Router(), dict[int, NotedReplica]()
        self.asked: dict[str, asyncio.Task[list[Completion]]] = {}
        for index in range(replicas):
            self.join(index)

    def join(self, index: int) -> NotedReplica:
        replica: Any = NotedReplica(index)
        self.replicas[index] = replica
        self.router.join(replica)
        return replica

    def lose(self, index: int) -> int:
        replica: Any = self.replicas.pop(index)
        replica.set_state(State.LOST)
        return self.router.on_lost(replica)

    def retire(self, index: int) -> NotedReplica:
        replica: Any = self.replicas[index]
        self.router.retire(replica)
        return replica

    async def ask(self, *requests: Request) -> list[int]:
        """Return where they were sent."""
        for request in requests:
            self.asked[request.id] = asyncio.create_task(self.router.generate(request))
            await tick()
        return [self.place(request.id) for request in requests]

    def place(self, id: str) -> int:
        """Return the replica that has a request; -1 if it waits or is answered."""
        routed = self.router._routed.get(id)
        return -1 if routed is None or routed.replica is None else routed.replica.index

    @property
    def tokens(self) -> dict[int, int]:
        """Tokens that the live replicas are expected to sample."""
        return dict(self.router._tokens)


async def tick() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def stop(*tokens: int) -> Completion:
    return Completion([*tokens], [0.0] * len(tokens), [0] * len(tokens), "stop")


def begun(*tokens: int) -> Completion:
    return Completion([*tokens], [0.0] * len(tokens), [0] * len(tokens), "abort")
