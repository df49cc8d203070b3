"""The routing policy in virtual time: engines of any pace, samples of any length, all events in one heap."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.routing import Move, Routing
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
        """Return when work that takes `seconds` is done."""
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
    """Does what the generator mesh does, with engines in place of processes. A seed's length is `lengths[seed]`."""

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
        self.sent: list[tuple[str, int]] = []  # request, replica
        self.seen: set[tuple[int, str]] = set()  # replica, id
        self.now, self.move_seconds = 0.0, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._planned = 0

    def run(self, requests: Sequence[Request], until: float = 1e5) -> float:
        """Return the makespan."""
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
        """Schedule an event; the run lasts at least until then."""
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
        """Kill a replica. It is noticed after `noticed` seconds; its last messages come `ghost` seconds later."""
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
        """Ask a replica for what it has (if it drains it keeps that), and end it `grace` seconds later."""
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
        """Assert that an engine has nothing left of a forgotten request."""
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
        for move in self.routing.steal(self.now) if self.steals else ():
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
    """Make one request per group, each seed used once."""
    seeds: Iterator[int] = count()
    asked, ends = [], {}
    for i, group in enumerate(lengths):
        own = [next(seeds) for _ in group]
        ends |= dict(zip(own, group, strict=True))
        asked.append(Request(f"r{i}", CONTEXT, own, Sampling(most), expected=max(group) if hints else 0))
    return asked, ends


def complete(world: World, requests: Sequence[Request]) -> None:
    """Assert that every sample is there once, in its place, with each token sampled once."""
    assert world.answers.keys() == {request.id for request in requests} - world.forgotten
    for id, completions in world.answers.items():
        for seed, completion in zip(world.asked[id].seeds, completions, strict=True):
            assert completion.tokens == list(range(world.lengths[seed]))
            assert len(completion.versions) == len(completion.logprobs) == len(completion.tokens)
            assert completion.finish == "stop"


def fresh(fleet: Sequence[Engine], *stop: float) -> list[Engine]:
    """Return new engines of the same pace. The first may stop, and resume."""
    engines = [Engine(engine.a, engine.b) for engine in fleet]
    if stop:
        engines[0].stops, engines[0].resumes = stop
    return engines


MOST = 40
fleets = st.lists(st.builds(Engine, st.floats(0.001, 0.1), st.floats(0, 0.02)), min_size=2, max_size=4)
batches = st.lists(st.lists(st.integers(1, MOST), min_size=1, max_size=6), min_size=1, max_size=6)
even = st.lists(st.tuples(st.integers(1, MOST), st.integers(1, 6)).map(lambda g: [g[0]] * g[1]), min_size=1, max_size=6)
slots = st.integers(4, 20)
