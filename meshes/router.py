"""Sends each request to a replica: each is answered once, although replicas are lost, retired and added.

generate ── route ──> replica.put ──> engine ──> the awaiting generate
              ^           ├── lost: again, with the same seeds
              └───────────┴── retired: from where its samples stopped

All samples of a request (a group) go to one replica, where they share a prefix cache: to the first one with the fewest
expected tokens left to sample. A turn of a rollout goes to the replica that served the turn before, or one that served
its group, because the beginning of its context is cached there; unless another replica is idle enough that reading the
context again costs less. Without a live replica requests wait.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial

from titan_rl.meshes.replica import Replica, State
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RequestRefused
from titan_rl.wire.types import Completion, Request

MAX_HOMES = 1 << 16  # rollouts and groups whose last replica is remembered


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request on its way."""

    request: Request  # with the tokens sampled so far
    answer: asyncio.Future[list[Completion]]
    sends: int = 0
    sent_as: str = ""  # id at the replica, new for each send, so that no late answer matches
    replica: Replica | None = None  # None: it waits, or is answered
    tokens: int = 0  # expected tokens that its samples lack


class Router:
    """Sends requests to the replicas that have joined, and resolves their answers."""

    def __init__(self) -> None:
        self._live: dict[int, Replica] = {}  # replicas that take requests
        self._tokens: dict[int, int] = {}  # expected tokens still to sample, by replica
        self._homes: OrderedDict[str, Replica] = OrderedDict()  # name in an affinity -> the replica that served it last
        self._routed: dict[str, RoutedRequest] = {}  # by request id, the oldest first
        self._settling: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> list[Completion]:
        """Send a request to the replica that `route` returns, and await its answer. A caller may give up."""
        if request.id in self._routed:
            raise ValueError(f"request {request.id}: an unfinished request has this id")
        answer = asyncio.get_running_loop().create_future()
        routed = self._routed[request.id] = RoutedRequest(request, answer)
        self._send(routed)
        try:
            return await answer
        finally:
            del self._routed[request.id]
            if (replica := self._take_back(routed)) is not None:
                replica.withdraw(routed.sent_as)

    def route(self, request: Request) -> Replica | None:
        """Return the replica with the fewest tokens to sample, or one that has the context cached and few more: at most
        the length of the context, or a quarter. None if no replica is live."""
        if not self._live:
            return None
        tokens, least = min(zip(self._tokens.values(), self._tokens, strict=True))
        max_tokens = tokens + max(len(request.tokens), tokens // 4)
        homes = (self._homes[name] for name in request.affinity if name in self._homes)
        return next((home for home in homes if self._tokens[home.index] <= max_tokens), self._live[least])

    def join(self, replica: Replica) -> None:
        """Send requests to a replica that serves from now on. It may have a lost one's index."""
        self._live[replica.index] = replica
        self._count(replica, 0)
        for routed in [routed for routed in self._routed.values() if routed.replica is None]:
            if not routed.answer.done():
                self._send(routed)

    def retire(self, replica: Replica) -> None:
        """Send a replica no more requests, and withdraw the ones that it has. Its answers count until it is lost."""
        replica.set_state(State.RETIRING)
        self._leave(replica)
        for routed in self._at(replica):
            replica.withdraw(routed.sent_as)

    def on_lost(self, replica: Replica) -> int:
        """Send a lost replica's requests to others, oldest first and with the same seeds. Return the number of samples
        that begin again."""
        self._leave(replica)
        again = self._at(replica)
        for routed in again:
            self._take_back(routed)
            self._send(routed)
        return sum(len(unfinished(routed.request)) for routed in again)

    async def settle(self, seconds: float) -> None:
        """Wait until no request is between two engines. An engine that drains finishes its requests before it switches
        weights, so a request that began on the old ones must not reach it afterwards. A retiring replica that does not
        return its requests within `seconds` is lost. Replicas that switch together share one wait."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(seconds))
        await asyncio.shield(self._settling)

    def fail(self, error: Exception) -> None:
        """Fail every request."""
        for routed in self._routed.values():
            if not routed.answer.done():
                routed.answer.set_exception(error)

    async def _settle(self, seconds: float) -> None:
        holders = {routed.replica for routed in self._routed.values() if routed.replica is not None}
        retiring = [replica for replica in holders if replica.state is State.RETIRING]
        try:
            async with deadline(seconds):
                await asyncio.gather(*(replica.idle() for replica in retiring))
        except TimeoutError:
            for replica in [replica for replica in retiring if replica.busy and replica.error is None]:
                error = DeadlinePassed(
                    f"{replica.name} did not give back its samples within {seconds:g} s",
                    "If this is slow rather than stuck, raise [comm] train_timeout_seconds.",
                    rank=replica.ranks[0],
                )
                replica.give_up(error)
        await asyncio.gather(*(replica.delivered() for replica in self._live.values()))

    def _send(self, routed: RoutedRequest) -> None:
        request, replica = routed.request, self.route(routed.request)
        if replica is None:
            return
        routed.sent_as = f"{request.id}~{routed.sends}" if routed.sends else request.id
        routed.sends += 1
        routed.replica, routed.tokens = replica, expected_tokens(request)
        self._count(replica, routed.tokens)
        for name in request.affinity[:1]:
            self._homes[name] = replica
            self._homes.move_to_end(name)
        for name in request.affinity[1:]:
            self._homes.setdefault(name, replica)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        sent = request if routed.sends == 1 else replace(request, id=routed.sent_as)
        replica.put(sent).add_done_callback(partial(self._returned, routed, replica))

    def _returned(self, routed: RoutedRequest, replica: Replica, sent: asyncio.Future[list[Completion]]) -> None:
        """Answer a request, or send it elsewhere if its replica returned it unfinished."""
        error = sent.exception()
        if routed.replica is not replica:  # lost or given up
            return
        if error is not None and not isinstance(error, RequestRefused):  # the replica is lost: on_lost or fail follows
            return
        self._take_back(routed)
        if routed.answer.done():  # its caller has just given up
            return
        if error is not None:
            routed.answer.set_exception(error)
        elif any(completion.finish == "abort" for completion in sent.result()):
            routed.request = replace(routed.request, begun=sent.result())
            self._send(routed)
        else:
            routed.answer.set_result(sent.result())

    def _at(self, replica: Replica) -> list[RoutedRequest]:
        return [routed for routed in self._routed.values() if routed.replica is replica]

    def _take_back(self, routed: RoutedRequest) -> Replica | None:
        """Remove a request from its replica, and return the replica."""
        replica, routed.replica = routed.replica, None
        if replica is not None and self._live.get(replica.index) is replica:
            self._count(replica, -routed.tokens)
        return replica

    def _leave(self, replica: Replica) -> None:
        if self._live.get(replica.index) is replica:
            del self._live[replica.index], self._tokens[replica.index]
            self._homes = OrderedDict((name, home) for name, home in self._homes.items() if home is not replica)

    def _count(self, replica: Replica, tokens: int) -> None:
        """Add to the tokens that a live replica is expected to sample."""
        self._tokens[replica.index] = self._tokens.get(replica.index, 0) + tokens


def unfinished(request: Request) -> list[int]:
    """Return how many tokens each unfinished sample of a request has so far."""
    if not request.begun:
        return [0] * len(request.seeds)
    return [len(sample.tokens) for sample in request.begun if sample.finish == "abort"]


def expected_tokens(request: Request) -> int:
    """Return how many tokens a request's samples are expected to lack. A hint that proved too short is ignored."""
    max_tokens = request.sampling.max_new_tokens
    hint = min(request.expected or max_tokens, max_tokens)
    return sum(max((hint if hint > length else max_tokens) - length, 1) for length in unfinished(request))
