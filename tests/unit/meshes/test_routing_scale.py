"""What routing does for a request or a report does not grow with the number of replicas, but for a logarithm.
Instructions are counted, not seconds."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from support.operations import instructions
from titan_rl.actors.vllm.engine import EngineReport
from titan_rl.meshes.least_loaded import SPARE, LeastLoaded
from titan_rl.meshes.routing import Routing, Sent
from titan_rl.wire.types import Completion, Request, Sampling

FEW, MANY = 32, 128
MOST = 1.5  # times the instructions per replica, of 4 times the replicas
FILES = ("meshes/routing.py", "meshes/stealing.py", "meshes/least_loaded.py")


def request(number: int, samples: int = 4, expected: int = 0, affinity: tuple[str, ...] = ()) -> Request:
    return Request(f"r{number}", [1, 2, 3], list(range(samples)), Sampling(64), expected=expected, affinity=affinity)


def answer(samples: int = 4) -> list[Completion]:
    return [Completion([7], [0.0], [0], "stop")] * samples


def report(steps: int, tokens: int) -> EngineReport:
    return EngineReport(steps, 0.01 * steps, 10 * steps, tokens)


def growth(prepared: Callable[[int], Callable[[], Any]]) -> float:
    """Return how many times more instructions per replica the prepared work of MANY replicas needs."""
    few, many = (instructions(prepared(n), *FILES) / n for n in (FEW, MANY))
    assert few > 0
    return many / few


def full(n: int) -> tuple[Routing, list[Sent]]:
    """Every replica has as many samples as it has slots, and as many requests wait. Return what was sent."""
    routing = Routing(n, slots=8)
    for replica in range(n):  # twice the tokens take a step twice as long
        for so_far in (EngineReport(1, 0.01, 10), EngineReport(2, 0.03, 30)):
            routing.report(replica, so_far, 1.0)
    for number in range(4 * n):
        routing.add(request(number, expected=number % 64))
    sent = routing.send(1.0)
    assert len(sent) == 2 * n
    return routing, sent


@pytest.mark.parametrize("slots", [None, 64])
def test_a_burst_of_requests(slots: int | None) -> None:
    def prepared(n: int) -> Callable[[], Any]:
        routing = Routing(n, slots)
        for number in range(2 * n):
            routing.add(request(number))
        return lambda: routing.send(0.0)

    assert growth(prepared) < MOST


@pytest.mark.parametrize("slots", [None, 64])
def test_turns_that_come_one_by_one(slots: int | None) -> None:
    def prepared(n: int) -> Callable[[], Any]:
        routing, draw = Routing(n, slots), Random(0)

        def turns() -> None:
            for number in range(4 * n):
                names = (f"rollout{draw.randrange(n)}", f"group{draw.randrange(n)}")
                routing.add(request(number, 1, affinity=names))
                (sent,) = routing.send(0.0)
                routing.report(sent.replica, report(number + 1, number), 0.0)
                if number % 2:
                    assert routing.done(sent.replica, sent.request.id, answer(1)) is not None

        return turns

    assert growth(prepared) < MOST


def test_reports_and_answers_while_requests_wait_for_room() -> None:
    def prepared(n: int) -> Callable[[], Any]:
        routing, sent = full(n)

        def beats() -> None:
            for replica in range(n):
                routing.report(replica, report(30, 200), 1.1)
                assert routing.send(1.1) == []
            for replica, part, whole in sent[::2]:
                assert routing.done(replica, part.id, answer()) is not None
                assert [(to, other.id != whole) for to, other, _ in routing.send(1.1)] == [(replica, True)]

        return beats

    assert growth(prepared) < MOST


def test_a_step_that_is_given_up() -> None:
    def prepared(n: int) -> Callable[[], Any]:
        routing, _ = full(n)
        return lambda: [routing.forget(f"r{number}") for number in range(4 * n)]

    assert growth(prepared) < MOST


@pytest.mark.parametrize("left", [1, 60])
def test_a_decision_on_stealing_looks_at_each_replica_once(left: int) -> None:
    """Half of them idle: moves pay if 60 tokens are left of each sample, and not if it is 1."""
    moves: dict[int, int] = {}

    def prepared(n: int) -> Callable[[], Any]:
        routing, sent = full(n)
        for number in range(4 * n):
            if number not in {int(part.id[1:]) for _, part, _ in sent}:
                routing.forget(f"r{number}")
        for replica, part, _ in sent:
            if replica % 2:
                routing.done(replica, part.id, answer())
            else:
                lengths = {other.id: dict.fromkeys(range(4), 64 - left) for to, other, _ in sent if to == replica}
                routing.report(replica, EngineReport(2, 0.03, 30, 0, lengths), 1.1)

        def decided() -> None:
            moves[n] = len(routing.steal(1.1))

        return decided

    assert growth(prepared) < MOST
    assert moves == ({FEW: FEW // 2, MANY: MANY // 2} if left == 60 else {FEW: 0, MANY: 0})


def test_the_least_loaded_is_found_whatever_changes() -> None:
    draw, least, tokens = Random(1), LeastLoaded(), dict[int, int]()
    for _ in range(5000):
        replica = draw.randrange(40)
        if draw.random() < 0.1:
            least.drop(replica)
            tokens.pop(replica, None)
        else:
            tokens[replica] = draw.randrange(20)
            least.put(replica, tokens[replica])
        refused = {draw.randrange(40) for _ in range(draw.randrange(20))}
        found = min(tokens.keys() - refused, key=lambda other: (tokens[other], other), default=None)
        assert least.first(lambda other, refused=refused: other not in refused) == found
        assert len(least) == len(tokens)
        assert len(least._heap) <= 4 * 40 + SPARE + 1
