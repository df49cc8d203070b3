"""Replicas that come and go in virtual time, while requests are asked and forgotten."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from support.routing_world import CONTEXT, MOST, Engine, World, batches, complete, fleets, fresh, groups, slots
from titan_rl.actors.vllm.engine import EngineReport
from titan_rl.meshes.routing import Routing
from titan_rl.wire.types import Request, Sampling

Coming = tuple[str, int]
comings = st.lists(st.tuples(st.sampled_from(["ask", "ask", "ask", "lose", "join"]), st.integers(0, 3)), max_size=24)


@given(st.integers(1, 4), comings)
def test_without_slots_the_order_of_requests_losses_and_joins_alone_decides(
    replicas: int, comings: list[Coming]
) -> None:
    routing, asked = Routing(replicas), 0
    held: dict[int, list[tuple[int, int]]] = {replica: [] for replica in range(replicas)}  # (age, samples)
    again: list[tuple[int, int]] = []
    for kind, n in comings:
        gone = [replica for replica in range(replicas + 1) if replica not in held]
        if kind == "ask":
            again.append((asked, n + 1))
            routing.add(Request(f"r{asked}", CONTEXT, list(range(n + 1)), Sampling(MOST)))
            asked += 1
        elif kind == "lose" and held:
            lost = sorted(held)[n % len(held)]
            again += held.pop(lost)
            routing.lose(lost)
        elif kind == "join" and gone:
            held[gone[n % len(gone)]] = []
            routing.join(gone[n % len(gone)], 9.0)
        expected: list[tuple[int, str]] = []
        for age, samples in sorted(again) if held else []:
            least = min(sorted(held), key=lambda i: sum(samples for _, samples in held[i]))
            held[least].append((age, samples))
            expected.append((least, f"r{age}"))
        again = [] if held else again
        for i in held:  # of progress, which must not decide
            routing.report(i, EngineReport(1, 1.0, 1, 1, {f"r{age}": {0: MOST - 1} for age, _ in held[i]}), 9.0)
        assert [(sent.replica, sent.whole) for sent in routing.send(99.0)] == expected
    assert routing.live == sorted(held)
    assert {i: load.outstanding for i, load in routing.loads().items()} == {
        i: sum(samples for _, samples in parts) * MOST for i, parts in held.items()
    }


@dataclass
class Happening:
    at: float
    kind: str  # of what happens
    which: int
    later: float
    flag: bool


happenings = st.lists(
    st.builds(
        Happening,
        st.floats(0, 3),
        st.sampled_from(["ask", "die", "join", "retire", "forget"]),
        st.integers(0, 99),
        st.floats(0, 3),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=3 * settings().max_examples)
@given(fleets, batches, st.none() | slots, st.booleans(), happenings)
def test_replicas_come_and_go_and_each_request_is_answered_once(
    fleet: list[Engine], batch: list[list[int]], slots: int | None, hints: bool, happenings: list[Happening]
) -> None:
    """World asserts meanwhile that nothing is sent to a replica that takes nothing, that no id is sent twice to one
    replica, that the last messages of a dead one change nothing, and that live engines drop what is forgotten."""
    requests, lengths = groups(batch, MOST, hints=hints)
    later = requests[1:]
    world = World(fresh(fleet), lengths, slots=slots)

    def happens(what: Happening) -> None:
        alive = [replica for replica in sorted(world.takes) if not world.engines[replica].dead]
        replica = alive[what.which % len(alive)] if alive else None
        unanswered = [id for id in world.asked if id not in world.answers and id not in world.forgotten]
        if what.kind == "ask" and later:
            world.ask([later.pop()])
        elif what.kind == "die" and replica is not None:
            world.die(replica, what.later / 2, what.later)
        elif what.kind == "retire" and replica is not None:
            world.retire(replica, what.flag, what.later)
        elif what.kind == "forget" and unanswered:
            world.forget(unanswered[what.which % len(unanswered)])
        elif what.kind == "join":
            gone = [i for i in range(max([*world.engines, len(fleet) - 1]) + 2) if i not in world.engines]
            world.join(gone[what.which % len(gone)], *fresh([fleet[what.which % len(fleet)]]))

    for what in happenings:
        world.plan(what.at, lambda what=what: happens(what))
    world.plan(10.0, lambda: world.join(99, Engine(0.01, 0.001)))
    world.plan(10.0, lambda: world.ask(later))
    world.run(requests[:1])
    complete(world, requests)
    assert world.routing.live == sorted(world.takes)
    assert {load[:2] for load in world.routing.loads().values()} == {(0, 0)}
    if slots is None and not any(what.kind == "retire" for what in happenings):
        assert all(len(set(c.versions)) == 1 for cs in world.answers.values() for c in cs), "none has moved"
