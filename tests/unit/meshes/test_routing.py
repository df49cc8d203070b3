"""The routing policy in virtual time: engines of any pace, samples of any length, all events in one heap."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.routing import SILENT_SECONDS, Load, Move, Pace, Routing, Sent
from titan_rl.wire.types import Completion, Request, Sampling

REPORT_SECONDS = 0.25
CONTEXT = [1, 2, 3, 4]


@dataclass
class Running:
    """A sample in an engine."""

    completion: Completion
    length: int  # at which it ends
    unread: int  # tokens that its next step computes


@dataclass
class Engine:
    """A step takes a + b seconds for each token that it computes; from `stops` to `resumes` nothing happens."""

    a: float
    b: float
    stops: float = float("inf")
    resumes: float = float("inf")
    dead: bool = False
    stepping: bool = False
    between: list[Callable[[], None]] = field(default_factory=list)  # two steps
    requests: dict[str, dict[int, Running]] = field(default_factory=dict)
    ended: dict[str, dict[int, Completion]] = field(default_factory=dict)
    report: EngineReport = field(default_factory=EngineReport)

    def wall(self, began: float, seconds: float) -> float:
        """When work of so many seconds is done."""
        if began >= self.resumes or began + seconds <= self.stops:
            return began + seconds
        return max(self.resumes, began) + seconds - max(0.0, self.stops - began)

    def add(self, request: Request, lengths: Mapping[int, int]) -> None:
        begun = request.begun or [Completion([], [], [], "abort") for _ in request.seeds]
        assert all(sample.finish == "abort" for sample in begun)
        self.ended[request.id] = {}
        self.requests[request.id] = {
            i: Running(sample, lengths[seed], len(sample.tokens) + (len(request.tokens) if i == 0 else 1))
            for i, (seed, sample) in enumerate(zip(request.seeds, begun, strict=True))
        }

    def withdraw(self, samples: Sequence[SampleId]) -> list[Withdrawn]:
        withdrawn = []
        for sample in samples:
            if running := self.requests.get(sample.request, {}).pop(sample.nth, None):
                withdrawn.append(Withdrawn(sample, running.completion))
                self.ended[sample.request][sample.nth] = running.completion
        return withdrawn

    @property
    def reads(self) -> int:
        return sum(sample.unread for request in self.requests.values() for sample in request.values())

    def step(self, seconds: float, replica: int) -> None:
        reads, tokens = self.reads, 0
        for id, samples in self.requests.items():
            for i, sample in list(samples.items()):
                old, tokens, sample.unread = sample.completion, tokens + 1, 1
                now = [*old.tokens, len(old.tokens)], [*old.logprobs, 0.0], [*old.versions, replica]
                sample.completion = Completion(*now, "abort")
                if len(sample.completion.tokens) == sample.length:
                    self.ended[id][i] = Completion(*now, "stop")
                    del samples[i]
        lengths = {
            id: {i: len(s.completion.tokens) for i, s in samples.items()} for id, samples in self.requests.items()
        }
        r = self.report
        self.report = EngineReport(r.steps + 1, r.seconds + seconds, r.read + reads, r.tokens + tokens, lengths)

    def done(self) -> list[tuple[str, list[Completion]]]:
        ids = [id for id, samples in self.requests.items() if not samples]
        for id in ids:
            del self.requests[id]
        return [(id, [completion for _, completion in sorted(self.ended.pop(id).items())]) for id in ids]


class World:
    """What the generator mesh does, with engines in place of processes. A seed's length is `lengths[seed]`."""

    def __init__(
        self, engines: Sequence[Engine], lengths: Mapping[int, int], *, slots: int | None, steals: bool = True
    ) -> None:
        self.engines, self.lengths = dict(enumerate(engines)), lengths
        self.routing, self.steals = Routing(len(engines), slots), steals
        for replica, engine in self.engines.items():  # it has run before
            for tokens in (1, 100):
                r = engine.report
                engine.report = EngineReport(
                    r.steps + 1, r.seconds + engine.a + engine.b * tokens, r.read + tokens, r.tokens
                )
                self.routing.report(replica, engine.report, 0.0)
        self.takes = set(self.engines)  # replicas that requests may go to
        self.asked: dict[str, Request] = {}
        self.answers: dict[str, list[Completion]] = {}
        self.forgotten: set[str] = set()
        self.at: dict[str, float] = {}  # answered
        self.sent: list[tuple[str, int]] = []  # of which request, where to
        self.seen: set[tuple[int, str]] = set()  # by a replica: an id
        self.now, self.move_seconds = 0.0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._planned = 0

    def run(self, requests: Sequence[Request], until: float = 1e5) -> float:
        """Answers with the makespan."""
        self.ask(requests)
        for replica in self.engines:
            self._after(replica, 0.0, lambda replica=replica: self._beat(replica))
        while self._events and (self._open or self._planned):
            self.now, _, happens = heapq.heappop(self._events)
            if self.now > until:
                break
            happens()
        return self.now

    def plan(self, at: float, happens: Callable[[], None]) -> None:
        """The run lasts until then at least."""
        self._planned += 1

        def planned() -> None:
            self._planned -= 1
            happens()

        heapq.heappush(self._events, (at, next(self._ids), planned))

    def ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.asked[request.id] = request
            self.routing.add(request)
        self._send()

    def join(self, replica: int, engine: Engine) -> None:
        self.engines[replica] = engine
        self.routing.join(replica, self.now)
        self.takes.add(replica)
        self._after(replica, 0.0, lambda: self._beat(replica))
        self._send()

    def die(self, replica: int, noticed: float, ghost: float) -> None:
        """It is noticed so many seconds later; and after as many more, its last messages come."""
        engine = self.engines[replica]
        engine.dead = True

        def lost() -> None:
            self.takes.discard(replica)
            self.routing.lose(replica)
            assert self.routing.lose(replica) == 0
            del self.engines[replica]
            self._send()

        def haunts() -> None:
            self._send()
            before = self.routing.loads()
            for id, samples in engine.requests.items():
                withdrawn = [Withdrawn(SampleId(id, i), sample.completion) for i, sample in samples.items()]
                self.routing.moved(Move(None, replica, [sample for sample, _ in withdrawn], self.now), withdrawn)
                assert self.routing.done(replica, id, [sample.completion for sample in samples.values()]) is None
            assert self.routing.loads() == before
            assert not self.routing.send(self.now)

        self.plan(self.now + noticed, lost)
        self.plan(self.now + noticed + ghost, haunts)

    def retire(self, replica: int, drains: bool, grace: float) -> None:
        """It is asked for what it has, which it keeps if it drains, and is ended a while later."""
        self.takes.discard(replica)
        move = Move(None, replica, self.routing.retire(replica), self.now)
        if not drains:
            self._wake(replica, lambda: self._withdraw(move))
        self.plan(self.now + grace, lambda: self.die(replica, 0.0, 0.0))

    def forget(self, id: str) -> None:
        left = self.routing.forget(id)
        self.forgotten.add(id)
        assert left.keys() <= self.takes
        for move in [Move(None, replica, samples, self.now) for replica, samples in left.items()]:
            self._wake(move.victim, lambda move=move: self._withdraw(move))
        for replica in self.takes:
            self._wake(replica, lambda engine=self.engines[replica]: self._rid_of(engine, id))
        self._send()

    @property
    def _open(self) -> int:
        return len(self.asked) - len(self.answers) - len(self.forgotten)

    def _rid_of(self, engine: Engine, id: str) -> None:
        """Nothing is left there of what was forgotten."""
        assert not any(samples for own, samples in engine.requests.items() if own.partition("~")[0] == id)

    def _after(self, replica: int, seconds: float, happens: Callable[[], None]) -> None:
        engine = self.engines[replica]

        def unless_dead() -> None:
            if not engine.dead:
                happens()

        heapq.heappush(self._events, (engine.wall(self.now, seconds), next(self._ids), unless_dead))

    def _beat(self, replica: int) -> None:
        self._heard(replica)
        self._after(replica, REPORT_SECONDS, lambda: self._beat(replica))

    def _heard(self, replica: int) -> None:
        self.routing.report(replica, self.engines[replica].report, self.now)
        self._send()
        while self.steals and (move := self.routing.steal(self.now)):
            assert {move.thief, move.victim} <= self.takes
            self._wake(move.victim, lambda move=move: self._withdraw(move))

    def _withdraw(self, move: Move) -> None:
        victim = self.engines[move.victim]
        withdrawn = victim.withdraw(move.samples)
        if move.thief in self.engines:
            thief = self.engines[move.thief]
            reads = sum(len(sample.begun.tokens) for sample in withdrawn)
            reads += len(CONTEXT) * len({sample.sample.request for sample in withdrawn})
            samples = sum(len(request) for request in victim.requests.values()) + len(withdrawn)
            self.move_seconds = max(self.move_seconds, victim.a + victim.b * samples + thief.a + thief.b * reads)
        self.routing.moved(move, withdrawn)
        self._send()

    def _send(self) -> None:
        for replica, request, whole in self.routing.send(self.now):
            assert replica in self.takes
            assert (replica, request.id) not in self.seen
            self.seen.add((replica, request.id))
            self.sent.append((whole, replica))
            self._wake(
                replica, lambda replica=replica, request=request: self.engines[replica].add(request, self.lengths)
            )

    def _wake(self, replica: int, then: Callable[[], None]) -> None:
        engine = self.engines[replica]
        engine.between.append(then)
        if not engine.stepping:
            engine.stepping = True
            self._after(replica, 0.0, lambda: self._go_on(replica))

    def _go_on(self, replica: int) -> None:
        engine = self.engines[replica]
        while engine.between:
            engine.between.pop(0)()
        done = engine.done()
        for id, completions in done:
            answer = self.routing.done(replica, id, completions)
            if answer is not None:
                whole = id.partition("~")[0]
                assert whole not in self.answers
                self.answers[whole], self.at[whole] = answer, self.now
                assert self.routing.forget(whole) == {}
        if done:
            self._heard(replica)
        engine.stepping = bool(engine.reads or engine.between)
        if engine.stepping:
            began, seconds = self.now, engine.a + engine.b * engine.reads

            def ends() -> None:
                engine.step(self.now - began, replica)
                self._go_on(replica)

            self._after(replica, seconds, ends)


def groups(lengths: Sequence[Sequence[int]], most: int, *, hints: bool = False) -> tuple[list[Request], dict[int, int]]:
    """One request each, every seed its own."""
    seeds: Iterator[int] = count()
    asked, ends = [], {}
    for i, group in enumerate(lengths):
        own = [next(seeds) for _ in group]
        ends |= dict(zip(own, group, strict=True))
        asked.append(Request(f"r{i}", CONTEXT, own, Sampling(most), expected=max(group) if hints else 0))
    return asked, ends


def complete(world: World, requests: Sequence[Request]) -> None:
    """Every sample is there once, in its place, each token sampled once."""
    assert world.answers.keys() == {request.id for request in requests} - world.forgotten
    for id, completions in world.answers.items():
        for seed, completion in zip(world.asked[id].seeds, completions, strict=True):
            assert completion.tokens == list(range(world.lengths[seed]))
            assert len(completion.versions) == len(completion.logprobs) == len(completion.tokens)
            assert completion.finish == "stop"


def fresh(fleet: Sequence[Engine], *stop: float) -> list[Engine]:
    """The first of them may stop, and resume."""
    engines = [Engine(engine.a, engine.b) for engine in fleet]
    if stop:
        engines[0].stops, engines[0].resumes = stop
    return engines


MOST = 40
fleets = st.lists(st.builds(Engine, st.floats(0.001, 0.1), st.floats(0, 0.02)), min_size=2, max_size=4)
batches = st.lists(st.lists(st.integers(1, MOST), min_size=1, max_size=6), min_size=1, max_size=6)
even = st.lists(st.tuples(st.integers(1, MOST), st.integers(1, 6)).map(lambda g: [g[0]] * g[1]), min_size=1, max_size=6)
slots = st.integers(4, 20)


@given(fleets, batches, st.none() | slots, st.booleans())
def test_no_sample_is_lost_or_answered_twice(
    fleet: list[Engine], batch: list[list[int]], slots: int | None, hints: bool
) -> None:
    requests, lengths = groups(batch, MOST, hints=hints)
    world = World(fresh(fleet), lengths, slots=slots)
    world.run(requests)
    complete(world, requests)
    assert [load[:2] for load in world.routing.loads().values()] == [(0, 0)] * len(fleet)
    if slots is None:
        assert all(len(set(c.versions)) == 1 for cs in world.answers.values() for c in cs), "none has moved"


@given(fleets, even, slots)
def test_stealing_costs_at_most_one_move_where_lengths_are_known(
    fleet: list[Engine], batch: list[list[int]], slots: int
) -> None:
    requests, lengths = groups(batch, MOST, hints=True)
    world, other = World(fresh(fleet), lengths, slots=slots), World(fresh(fleet), lengths, slots=slots, steals=False)
    assert world.run(requests) <= other.run(requests) + world.move_seconds + 1e-9


def test_stealing_shortens_the_makespan_of_uneven_fleets_though_no_length_is_known() -> None:
    ratios = []
    for seed in range(60):
        draw, slots = Random(seed), 64  # room for all: engines are alike with and without
        fleet = [Engine(10 ** draw.uniform(-3, -1), 10 ** draw.uniform(-4, -2)) for _ in range(draw.randint(2, 4))]
        requests, lengths = groups([[draw.randint(1, 200) for _ in range(8)] for _ in range(6)], 200)
        makespans = [World(fresh(fleet), lengths, slots=n).run(requests) for n in (slots, None)]
        ratios.append(makespans[0] / makespans[1])
    assert mean(ratios) < 0.6
    assert max(ratios) < 1.05


@given(fleets, batches, slots, st.floats(0.01, 1), st.floats(1, 30))
def test_a_stopped_replica_delays_only_what_it_alone_holds(
    fleet: list[Engine], batch: list[list[int]], slots: int, stops: float, lasts: float
) -> None:
    requests, lengths = groups(batch, MOST)
    for_ever = World(fresh(fleet, stops, 1e9), lengths, slots=slots)
    for_ever.run(requests, until=80)
    held = {id for id, replica in for_ever.sent if replica == 0}
    assert {request.id for request in requests} - for_ever.answers.keys() <= held

    back = World(fresh(fleet, stops, stops + lasts), lengths, slots=slots)
    back.run(requests)
    complete(back, requests)


def test_what_a_stopped_replica_held_is_stolen_as_soon_as_it_answers() -> None:
    requests, lengths = groups([[200] * 8] * 2, 200)
    fleet = [Engine(0.01, 0.0), Engine(0.01, 0.0)]
    world = World(fresh(fleet, 0.5, 6.0), lengths, slots=8)
    stopped, relieved = world.run(requests), world.routing.loads()[1].stolen
    assert relieved == 8
    assert world.at["r1"] < 2.1  # 200 steps: as if nothing had happened
    assert stopped < 6.0 + 1.6 + 2 * world.move_seconds  # what 150 steps take, and a move
    assert world.answers["r0"][0].versions[-1] == 1


def test_members_of_one_group_spread_when_that_finishes_sooner() -> None:
    requests, lengths = groups([[200] * 8], 200)
    world = World([Engine(0.0, 0.01), Engine(0.0, 0.01)], lengths, slots=8)
    assert world.run(requests) < 0.6 * 200 * 8 * 0.01
    complete(world, requests)
    assert [[c.versions[-1] for c in world.answers["r0"]].count(replica) for replica in (0, 1)] == [4, 4]


def test_nothing_moves_between_engines_that_are_no_faster_with_fewer_samples() -> None:
    requests, lengths = groups([[200] * 8], 200)
    world = World([Engine(0.01, 0.0), Engine(0.01, 0.0)], lengths, slots=8)
    world.run(requests)
    assert world.sent == [("r0", 0)]


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


@settings(max_examples=300)
@given(fleets, batches, st.none() | slots, st.booleans(), happenings)
def test_replicas_come_and_go_and_each_request_is_answered_once(
    fleet: list[Engine], batch: list[list[int]], slots: int | None, hints: bool, happenings: list[Happening]
) -> None:
    """World asserts meanwhile that nothing goes to a replica that takes nothing, no id twice to one, that the last
    messages of a dead one change nothing, and that live engines get rid of what is forgotten."""
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


def stop(*tokens: int) -> Completion:
    return Completion([*tokens], [0.0] * len(tokens), [0] * len(tokens), "stop")


def begun(*tokens: int) -> Completion:
    return replace(stop(*tokens), finish="abort")


def test_what_a_lost_replica_had_not_answered_begins_anew_as_one_part() -> None:
    routing, request = Routing(2), Request("a", CONTEXT, [1, 2, 3], Sampling(8))
    routing.add(request)
    assert routing.send(0.0) == [Sent(0, request, "a")]
    assert routing.lose(0) == 3
    assert routing.live == [1]
    assert routing.send(0.0) == [Sent(1, replace(request, id="a~1"), "a")]
    routing.join(0, 1.0)
    assert routing.done(0, "a", [stop(9)] * 3) is None, "of its former life"
    assert routing.loads() == {0: Load(0, 0, 0, 0), 1: Load(1, 24, 0, 0)}
    assert routing.done(1, "a~1", [stop(7)] * 3) == [stop(7)] * 3
    assert routing.lose(1) == routing.lose(1) == 0


def test_what_was_answered_before_a_loss_stays_and_what_had_moved_keeps_the_tokens_that_it_came_with() -> None:
    routing = Routing(2, slots=4)
    routing.add(Request("a", CONTEXT, [1, 2, 3], Sampling(8)))
    routing.send(0.0)
    withdrawn = [Withdrawn(SampleId("a", i), begun(*range(i))) for i in (2, 1)]
    routing.moved(Move(1, 0, [sample for sample, _ in withdrawn], 0.0), withdrawn)
    assert routing.send(0.0) == [Sent(1, Request("a~1", CONTEXT, [2, 3], Sampling(8), [begun(0), begun(0, 1)]), "a")]
    assert routing.done(0, "a", [stop(7), begun(0), begun(0, 1)]) is None
    routing.report(
        1, EngineReport(9, 9.0, 9, 9, {"a~1": {1: 6}}), 0.0
    )  # it ended one, and tells when it ends the other
    assert routing.lose(1) == 2
    assert routing.send(0.0) == [Sent(0, Request("a~2", CONTEXT, [2, 3], Sampling(8), [begun(0), begun(0, 1)]), "a")]
    assert routing.done(0, "a~2", [stop(8), stop(9)]) == [stop(7), stop(8), stop(9)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_move_ends_with_the_loss_of_either_of_its_replicas(lost: int) -> None:
    routing = Routing(3, slots=8)
    for replica in range(3):
        for steps in (1, 2):
            routing.report(replica, EngineReport(steps, 0.01 * steps, 100 * steps), 0.0)
    for id in "abc":
        routing.add(Request(id, CONTEXT, [1] * 8, Sampling(100)))
    routing.send(0.0)
    for replica, id in ((1, "b"), (2, "c")):
        routing.done(replica, id, [stop(7)] * 8)
    routing.report(0, EngineReport(12, 1.02, 280, 80, {"a": dict.fromkeys(range(8), 10)}), 0.0)
    first = routing.steal(0.0)
    assert first is not None
    assert (first.thief, first.victim) == (1, 0)
    assert routing.steal(0.0) is None, "it is asked already"
    routing.moved(first, [])
    first = routing.steal(0.0)
    assert first is not None, "it has answered, and may be asked again"
    routing.lose(lost)
    moves = routing.send(0.0), routing.steal(0.0)
    withdrawn = [Withdrawn(sample, begun(7)) for sample in first.samples]
    routing.moved(first, withdrawn)
    if lost == 0:
        assert [(sent.replica, sent.request.id) for sent in moves[0]] == [(1, "a~1")]
        assert routing.send(0.0) == [], "what a lost replica gives up begins anew already"
    else:
        assert moves[1] is not None
        assert (moves[1].thief, moves[1].victim) == (2, 0)
        assert [sent.replica for sent in routing.send(0.0)] == [0], "live, and the first of those with nothing to do"


def test_a_retired_replica_takes_nothing_and_is_heard_until_it_is_lost() -> None:
    routing, request = Routing(2), Request("a", CONTEXT, [1, 2, 3], Sampling(8))
    routing.add(request)
    routing.send(0.0)
    asked = routing.retire(0)
    assert asked == [SampleId("a", 0), SampleId("a", 1), SampleId("a", 2)]
    assert (routing.live, list(routing.loads())) == ([1], [1])
    with pytest.raises(ValueError, match="replica 0: expected a new or a lost one to join, found it here"):
        routing.join(0, 0.0)
    routing.moved(Move(None, 0, asked, 0.0), [Withdrawn(asked[1], begun(5))])
    assert routing.send(0.0) == [Sent(1, Request("a~1", CONTEXT, [2], Sampling(8), [begun(5)]), "a")]
    assert routing.done(1, "a~1", [stop(5, 6)]) is None
    assert routing.done(0, "a", [stop(7), begun(5), stop(8)]) == [stop(7), stop(5, 6), stop(8)]
    assert routing.loads() == {1: Load(0, 0, 0, 0)}, "nobody has stolen"
    assert routing.lose(0) == 0
    assert routing.retire(0) == []


def test_with_no_live_replica_everything_waits_and_the_oldest_request_goes_first() -> None:
    routing = Routing(2)
    for id in "abc":
        routing.add(Request(id, CONTEXT, [1, 2], Sampling(8)))
    routing.send(0.0)
    asked = routing.retire(0)
    assert routing.lose(1) == 2
    routing.moved(Move(None, 0, asked, 0.0), [Withdrawn(sample, begun(5)) for sample in reversed(asked)])
    routing.add(Request("d", CONTEXT, [1, 2], Sampling(8)))
    assert routing.forget("c") == {}, "it is nowhere"
    assert routing.send(0.0) == []
    assert routing.steal(0.0) is None
    assert routing.loads() == {}
    routing.join(7, 0.0)
    assert [(sent.replica, sent.request.id) for sent in routing.send(0.0)] == [(7, "a~1"), (7, "b~1"), (7, "d")]


def test_whoever_has_joined_is_awake() -> None:
    routing = Routing(1, slots=4)
    routing.report(0, EngineReport(), 100.0)
    routing.join(1, 101.0)
    for id in "ab":
        routing.add(Request(id, CONTEXT, [1], Sampling(8)))
    assert [(sent.replica, sent.request.id) for sent in routing.send(101.0)] == [(0, "a"), (1, "b")]


def test_with_slots_the_longest_expected_wait_least() -> None:
    routing = Routing(2, slots=4)
    for id, expected in (("short", 5), ("long", 50), ("longer", 60), ("unknown", 0)):
        routing.add(Request(id, CONTEXT, [1, 2, 3], Sampling(100), expected=expected))
    assert [(sent.request.id, sent.replica) for sent in routing.send(0.0)] == [("unknown", 0), ("longer", 1)]
    assert routing.loads() == {0: Load(1, 300, 0, 0), 1: Load(1, 180, 0, 0)}
    assert routing.done(1, "longer", [stop(7)] * 3)
    assert [(sent.request.id, sent.replica) for sent in routing.send(0.0)] == [("long", 1)]


def test_nothing_new_goes_to_a_replica_that_has_fallen_silent() -> None:
    routing = Routing(2, slots=4)
    for replica, at in ((0, 10.0), (1, 10.0 + SILENT_SECONDS)):
        routing.report(replica, EngineReport(), at)
    routing.add(Request("a", CONTEXT, [1], Sampling(8)))
    assert [sent.replica for sent in routing.send(10.0 + SILENT_SECONDS)] == [1]
    routing.resume(12.0 + SILENT_SECONDS)
    routing.add(Request("b", CONTEXT, [1], Sampling(8)))
    assert [sent.replica for sent in routing.send(12.0 + SILENT_SECONDS)] == [0]


def test_a_hint_that_proves_too_short_is_forgotten() -> None:
    routing = Routing(1, slots=4)
    routing.add(Request("a", CONTEXT, [1], Sampling(100), expected=10))
    routing.send(0.0)
    outstanding = []
    for length in (0, 4, 9, 10, 40):
        routing.report(0, EngineReport(lengths={"a": {0: length}}), 0.0)
        outstanding.append(routing.loads()[0].outstanding)
    assert outstanding == [10, 6, 1, 90, 60]


def test_what_nobody_waits_for_is_ignored() -> None:
    routing = Routing(2, slots=4)
    request = Request("a", CONTEXT, [1, 2], Sampling(8))
    routing.add(request)
    with pytest.raises(ValueError, match="request a: its id is that of an unfinished request"):
        routing.add(request)
    routing.send(0.0)
    assert routing.forget("a") == {0: [SampleId("a", 0), SampleId("a", 1)]}
    routing.moved(Move(1, 0, [SampleId("a", 1)], 0.0), [Withdrawn(SampleId("a", 1), begun(7))])
    assert routing.send(0.0) == []
    assert routing.done(0, "a", [begun(7)] * 2) is None
    assert routing.loads() == dict.fromkeys((0, 1), Load(0, 0, 0, 0))
    routing.add(request)
    assert [sent.replica for sent in routing.send(0.0)] == [0]


def test_a_withdrawn_sample_may_be_heard_of_before_or_after_its_finished_siblings() -> None:
    for first in ("done", "moved"):
        routing = Routing(2, slots=4)
        routing.add(Request("a", CONTEXT, [1, 2], Sampling(8)))
        routing.send(0.0)
        for what in ("done", "moved") if first == "done" else ("moved", "done"):
            if what == "done":
                assert routing.done(0, "a", [stop(7, 8), begun(9)]) is None
            else:
                routing.moved(Move(1, 0, [SampleId("a", 1)], 0.0), [Withdrawn(SampleId("a", 1), begun(9))])
        ((replica, part, whole),) = routing.send(0.0)
        assert (replica, part, whole) == (1, Request("a~1", CONTEXT, [2], Sampling(8), [begun(9)]), "a")
        assert routing.done(1, "a~1", [stop(7, 8)]) == [stop(7, 8)] * 2
        assert routing.loads() == {0: Load(0, 0, 0, 0), 1: Load(0, 0, 0, 1)}


@given(st.floats(0.001, 1), st.floats(0.0001, 0.1), st.lists(st.integers(1, 500), min_size=2, max_size=20))
def test_a_pace_is_the_line_through_what_was_measured(a: float, b: float, reads: list[int]) -> None:
    pace, report = Pace(), EngineReport()
    assert pace.line is None
    for read in reads:
        report = EngineReport(report.steps + 1, report.seconds + a + b * read, report.read + read)
        pace.measure(report)
    expected = (a, b) if max(reads) - min(reads) > 0.1 * max(reads) else (a + b * mean(reads), 0.0)
    if len(set(reads)) == 1 or expected == (a, b):
        assert pace.line == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_pace_forgets() -> None:
    pace, seconds = Pace(), 0.0
    for i in range(1, 60):
        seconds += 0.1 if i < 20 else 0.5
        pace.measure(EngineReport(i, seconds, 8 * i))
    assert pace.line == pytest.approx((0.5, 0.0), rel=0.02)
