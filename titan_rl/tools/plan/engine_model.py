"""One replica's engine in virtual time: continuous batching in closed form from one event to the next.

    submit ── waiting ── admitted: its prompt is computed ── decode steps ── finished ──> Done
                 ^                                               │
                 └──────── preempted: the cache is full ─────────┘

Between two events (an admission, an end, a full cache, new weights) all steps have the same batch, whose context grows
by one token per sample and step: their seconds are a quadratic function of their number. So a sample costs a few
events, however many tokens it has. Samples enter and leave between two steps, as in vLLM.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, repeat
from math import ceil, inf, sqrt
from typing import Any, cast

from titan_rl.actors.vllm.engine import Done
from titan_rl.tools.plan.rates import EngineRates
from titan_rl.tools.plan.virtual_time import Cores, Timer
from titan_rl.wire.reports import EngineStats
from titan_rl.wire.types import Completion, Request

ROUNDING = 1e-6  # part of a step: a moment this close to its end is its end


class Versions(Sequence[int]):
    """The versions of an answer's tokens, as (version, count): answers have too many tokens for lists."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._runs = runs
        self._length = sum(count for _, count in runs)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(version, count) for version, count in self._runs)

    def __getitem__(self, index: Any) -> Any:
        return self._runs[0][0] if index == 0 else list(self)[index]

    def count(self, value: int) -> int:
        return sum(count for version, count in self._runs if version == value)


@dataclass(slots=True, eq=False)
class Prefix:
    """The cached beginning of contexts."""

    name: str
    tokens: int
    own: int  # tokens that no other prefix holds
    users: int = 0


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    request: Request
    unfinished: int
    answers: list[Completion | None]


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """One sample of a request."""

    open: SimulatedRequest
    index: int
    length: int  # tokens of its answer
    number: int  # in the order of arrival
    sampled: int = 0  # tokens, before it was admitted last
    since: int = 0  # the step before which it was admitted
    end: int = 0  # the step that samples its last token
    own: int = 0  # cached tokens without its prefix, when it was admitted
    prefix: Prefix | None = None
    stale: bool = False  # old weights computed some of its keys and values
    runs: list[tuple[int, int]] = field(default_factory=list)  # steps that sampled it: begin, end


class EngineModel:
    def __init__(
        self,
        rates: EngineRates,
        cores: Cores,
        max_num_seqs: int,
        length_of: Callable[[Request, int], int],
        answer: Callable[[Done], None],
    ) -> None:
        """`length_of(request, sample)` returns the tokens of an answer; 0: the request is refused."""
        self._rates, self._cores, self._max_num_seqs = rates, cores, max_num_seqs
        self._length_of, self._answer = length_of, answer
        self.in_flight = "swap"
        self.stats, self.preemptions = EngineStats(), 0
        self._at = 0.0  # when the next step begins, in seconds of work
        self._until = 0  # the step before which something happens
        self._number = 0
        self._waiting: deque[SimulatedSample] = deque()
        self._held_back: list[Request] = []  # until an engine that drains has switched
        self._running: dict[SimulatedSample, None] = {}  # in the order of admission
        self._ends: list[tuple[int, int, SimulatedSample]] = []  # a heap; a preempted sample's entry stays
        self._context = 0  # tokens that a step reads
        self._held = self._free = 0  # cached tokens that running samples use; that may be evicted
        self._prefixes: dict[str, Prefix] = {}
        self._unused: OrderedDict[str, Prefix] = OrderedDict()  # the least recent first
        self._versions: list[tuple[int, int]] = []  # (first step, version)
        self._stopped = True  # no weights, asleep, or switching
        self._sleep: Callable[[], None] | None = None  # what happens before the next step
        self._switch: Callable[[], None] | None = None
        self._timer: Timer | None = None
        self._looks = False
        self._busy_since: float | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests enter before the next step, or, if the engine drains for a switch, after the switch."""
        if self._switch is not None and self._drains:
            self._held_back += requests
        else:
            for request in requests:
                self._enter(request)
        self._look()

    def sleep(self, slept: Callable[[], None]) -> None:
        """Stop sampling before the next step, until the next switch."""
        self._sleep = slept
        self._look()

    def switch(self, version: int, seconds: float, switched: Callable[[], None]) -> None:
        """Stop for `seconds` before the next step, and serve `version` then."""

        def begin() -> None:
            self._stopped = True
            self._busy(False)
            self._cores.ask(self._rates.cores)
            self._timer = self._cores.call_at(self._at + seconds, finish)

        def finish() -> None:
            self._timer, self._switch, self._stopped, self._looks = None, None, False, False
            self._cores.ask(-self._rates.cores)
            self._at = self._cores.now()
            self._serve(version)
            switched()
            held_back, self._held_back = self._held_back, []
            self.submit(held_back)

        self._switch = begin
        self._look()

    def stop(self) -> None:
        """End it: its processes have died."""
        if self._timer is not None:
            self._timer.cancel()
            if self._switch is not None and self._stopped:
                self._cores.ask(-self._rates.cores)
        self._busy(False)
        self._stopped, self._looks = True, True  # nothing is looked at any more

    # -- events -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Admit new requests, sleep or switch before the next step."""
        if not self._looks:
            self._looks = True
            self._arm()

    def _arm(self) -> None:
        """Set the timer of the next event."""
        if self._timer is not None and self._stopped and self._switch is not None:
            return  # switching
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        steps, now = 0, self._cores.now()
        if self._running and not self._stopped:
            steps = self._ends[0][0] - self.stats.steps
            room = self._rates.cached_tokens - self._held
            if room > 0 and len(self._running) > 1:
                steps = max(1, min(steps, room // len(self._running)))
            if self._looks:
                steps = max(0, min(steps, ceil(self._steps(now - self._at) - ROUNDING)))
        elif not self._looks:
            return
        self._until = self.stats.steps + steps
        self._timer = self._cores.call_at(max(now, self._at + self._seconds(steps)), self._between_steps)

    def _between_steps(self) -> None:
        self._timer, self._looks = None, False
        running, now = len(self._running), self._cores.now()
        if running and not self._stopped:
            steps = self._until - self.stats.steps
            self._at += self._seconds(steps)
            self.stats.steps += steps
            self.stats.tokens += steps * running
            self._context += steps * running
            self._held += steps * running
        else:
            self._at = max(self._at, now)
        while self._ends and self._ends[0][0] <= self.stats.steps:
            end, _, sample = heappop(self._ends)
            if sample in self._running and sample.end == end:
                self._finish(sample)
        while len(self._running) > 1 and self._full(len(self._running)):
            self._preempt(next(reversed(self._running)))
        if self._sleep is not None:
            self._stopped = True
            self._sleep()
            self._sleep = None
        if self._switch is not None and not self._drains:
            self._switch()
            return
        if not self._stopped:
            self._admit()
        while self._ends and self._ends[0][2] not in self._running:
            heappop(self._ends)
        self._busy(bool(self._running) and not self._stopped)
        self._arm()

    @property
    def _drains(self) -> bool:
        """Return True if a switch has to wait for samples."""
        return self.in_flight == "drain" and not self._stopped and bool(self._running or self._waiting)

    def _busy(self, busy: bool) -> None:
        if busy != (self._busy_since is not None):
            self._cores.ask(self._rates.cores if busy else -self._rates.cores)
            self.stats = self.counted()
            self._busy_since = self._cores.loop.now if busy else None

    def counted(self) -> EngineStats:
        """Return the counts until now."""
        since = self._cores.loop.now if self._busy_since is None else self._busy_since
        return replace(self.stats, seconds=self.stats.seconds + self._cores.loop.now - since)

    # -- time ---------------------------------------------------------------------------------------------------

    def _first(self) -> float:
        """Return the seconds of the next step, of which none is the host's if it works ahead."""
        rates, n = self._rates, len(self._running)
        alone = float(rates.device_s(n, self._context))
        return alone if rates.ahead else alone + float(rates.waited_s(n, self._context))

    def _waiting_steps(self) -> tuple[float, float]:
        """Return how many of the next steps are as long as the host's part of them, and the seconds of that part. Later
        ones read more keys and values."""
        rates, n, growth = self._rates, len(self._running), self._growth
        host_s = rates.gap_s + n * rates.host_s if rates.ahead else 0.0
        shorter = max(0.0, host_s - self._first())
        if not growth:
            return inf if shorter else 0.0, host_s
        return float(ceil(shorter / growth)), host_s

    @property
    def _growth(self) -> float:
        return self._rates.context_s * len(self._running)

    def _seconds(self, steps: int) -> float:
        """Return the seconds of the next steps."""
        waiting, host_s = self._waiting_steps()
        flat = min(waiting, steps)
        first, left = self._first() + flat * self._growth, steps - flat
        return flat * host_s + left * first + self._growth * left * (left - 1) / 2

    def _steps(self, seconds: float) -> float:
        """Return how many of the next steps take these seconds: the inverse of `_seconds`."""
        if seconds <= 0:
            return 0.0
        waiting, host_s = self._waiting_steps()
        if waiting and seconds <= waiting * host_s:
            return seconds / host_s
        left, growth = seconds - waiting * host_s, self._growth
        linear = self._first() + waiting * growth - growth / 2
        return waiting + 2 * left / (linear + sqrt(linear * linear + 2 * growth * left))

    # -- samples ------------------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        lengths = [self._length_of(request, i) for i in range(len(request.seeds))]
        if not min(lengths):
            self._answer(Done(request.id, [], "its context leaves no room for an answer"))
            return
        open = SimulatedRequest(request, len(lengths), [None] * len(lengths))
        for i, length in enumerate(lengths):
            self._number += 1
            self._waiting.append(SimulatedSample(open, i, length, self._number))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sample = self._waiting[0]
            request, read = sample.open.request, len(sample.open.request.tokens) + sample.sampled
            names = request.affinity or (request.id,)
            prefix = next((self._prefixes[name] for name in names if name in self._prefixes), None)
            block = self._rates.block
            cached = min(prefix.tokens, read - 1) // block * block if prefix else 0
            if prefix is not None:
                self._use(prefix)
            if self._running and self._full(read - cached + len(self._running) + 1):
                if prefix is not None:
                    self._release(prefix)
                return
            self._waiting.popleft()
            self.stats.prompt_tokens += read
            self.stats.cached_tokens += cached
            self._at += (read - cached) * self._rates.prefill_s
            sample.own = read - cached
            if prefix is None and request.tokens[0] == request.tokens[-1] and not sample.sampled:  # a prompt, whole
                prefix = self._prefixes[names[-1]] = Prefix(names[-1], read, read, users=1)
                sample.own = 0
                self._held += prefix.own
            sample.prefix, sample.since = prefix, self.stats.steps
            sample.end = sample.since + sample.length - sample.sampled
            self._held += sample.own
            self._context += read
            self._running[sample] = None
            heappush(self._ends, (sample.end, sample.number, sample))
        self.stats.max_batch = max(self.stats.max_batch, len(self._running))

    def _full(self, more: int) -> bool:
        """Return True if `more` tokens do not fit into the cache, from which unused ones are evicted."""
        limit = self._rates.cached_tokens
        while limit and self._unused and self._held + self._free + more > limit:
            name, prefix = self._unused.popitem(last=False)
            self._free -= prefix.own
            del self._prefixes[name]
        return 0 < limit < self._held + more

    def _leave(self, sample: SimulatedSample) -> int:
        """Take a sample out of the batch. Return its cached tokens, without its prefix."""
        del self._running[sample]
        new = self.stats.steps - sample.since
        sample.runs.append((sample.since, self.stats.steps))
        sample.sampled += new
        self._context -= len(sample.open.request.tokens) + sample.sampled
        self._held -= sample.own + new
        if sample.prefix is not None:
            self._release(sample.prefix)
            sample.prefix = None
        return sample.own + new

    def _use(self, prefix: Prefix) -> None:
        """Keep a prefix from being evicted."""
        if not prefix.users:
            self._free -= prefix.own
            self._held += prefix.own
            del self._unused[prefix.name]
        prefix.users += 1

    def _release(self, prefix: Prefix) -> None:
        prefix.users -= 1
        if not prefix.users:
            self._held -= prefix.own
            if self._prefixes.get(prefix.name) is prefix:
                self._keep(prefix)

    def _keep(self, prefix: Prefix) -> None:
        """Leave a prefix in the cache, until it is evicted."""
        self._prefixes[prefix.name] = self._unused[prefix.name] = prefix
        self._free += prefix.own

    def _preempt(self, sample: SimulatedSample) -> None:
        self._leave(sample)
        self._waiting.appendleft(sample)
        self.preemptions += 1

    def _finish(self, sample: SimulatedSample) -> None:
        open, before = sample.open, sample.prefix
        own, request, name = self._leave(sample), open.request, next(iter(open.request.affinity), "")
        if name and not sample.stale:  # the next turn begins with this one
            old = self._unused.pop(name, None)
            if old is not None:
                self._free -= old.own
                own += old.own if old is before else 0
            self._keep(Prefix(name, len(request.tokens) + sample.length, own))
        runs = [run for begin, end in sample.runs for run in self._versioned(begin, end)]
        finish = "length" if sample.length >= request.sampling.max_new_tokens else "stop"
        tokens: Any = array("q", (-1 - request.seeds[sample.index],)) * sample.length
        open.answers[sample.index] = Completion(tokens, [], cast(Any, Versions(runs)), finish)
        open.unfinished -= 1
        if not open.unfinished:
            self._answer(Done(request.id, cast(list[Completion], open.answers)))

    # -- weights ------------------------------------------------------------------------------------------------

    def _serve(self, version: int) -> None:
        """Sample with new weights. Unused keys and values are of the old ones. Those of running samples are computed
        again, or kept: then no request that comes later may read them."""
        self._versions.append((self.stats.steps, version))
        for name in self._unused:
            del self._prefixes[name]
        self._unused.clear()
        self._free = 0
        if self.in_flight == "keep":
            self._prefixes.clear()
            for sample in self._running:
                sample.stale = True
        else:
            self.stats.recomputed += self._held
            self._at += self._held * self._rates.prefill_s

    def _versioned(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the versions that sampled in these steps, and the number of steps of each."""
        at = bisect_right(self._versions, begin, key=lambda each: each[0]) - 1
        while begin < end:
            last = at + 1 == len(self._versions)
            until = end if last else min(end, self._versions[at + 1][0])
            if until > begin:
                yield self._versions[at][1], until - begin
            begin, at = until, at + 1
