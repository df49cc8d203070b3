"""Which replica samples what: a policy on numbers, with no processes and no clock of its own.

    add ─> waiting ── send ──> parts of requests, on a replica each ── done ─> a request's completions
                        ^                                   │    ^ report: how far they are, how fast the engine is
                        └─── moved <── withdrawn <── steal ─┘

A request (a group) goes whole to the replica with the fewest tokens left to sample, the first among equals, so that its
samples share a prefix cache. Without slots that is all, and the order of requests alone decides. With slots, what no
engine has room for waits here, longest expected first; and a replica that has nothing left takes over unfinished
samples of the one that would finish last, if by what was measured of both that wins back what a move costs, twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from titan_rl.actors.engine import Report, SampleId, Withdrawn
from titan_rl.types import Completion, Request

FADE = 0.9
"""What a measurement of an engine's pace still counts after the next one."""
SILENT_SECONDS = 2.0
"""An engine that has not reported for so long stands still, as far as anybody knows."""


class Sent(NamedTuple):
    replica: int
    request: Request
    whole: str  # the id of the request that it is, or is part of


class Move(NamedTuple):
    """Samples that `victim` is asked to give up, for `thief` has nothing to do."""

    thief: int
    victim: int
    samples: list[SampleId]
    since: float


class Load(NamedTuple):
    """What a replica has, and has done."""

    requests: int  # open; a part of one counts as one
    outstanding: int  # tokens that these are expected to lack
    sampled: int  # tokens
    stolen: int  # samples that it took over


class Pace:
    """Seconds of an engine's step that computes n tokens, as a line a + b n through what was measured. As long as n
    stays the same all is a: a smaller batch is not expected to run faster before one has."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # over steps: 1, n, seconds, n n, n seconds
        self._last = Report()

    def measure(self, report: Report) -> None:
        steps, read = report.steps - self._last.steps, report.read - self._last.read
        seconds, self._last = report.seconds - self._last.seconds, report
        if steps > 0:
            n = read / steps
            added = (steps, read, seconds, n * read, n * seconds)
            self._sums = tuple(FADE * old + new for old, new in zip(self._sums, added, strict=True))

    @property
    def line(self) -> tuple[float, float] | None:
        """(a, b), neither below 0; None before any step."""
        steps, *sums = self._sums
        if steps == 0:
            return None
        n, s, nn, ns = (total / steps for total in sums)
        variance = nn - n * n
        slope = (ns - n * s) / variance if variance > 1e-6 * nn else 0.0
        b = min(max(slope, 0.0), s / n if n else 0.0)
        return s - b * n, b


@dataclass(slots=True, eq=False)
class Part:
    """Samples of one request that one replica holds, under an id of their own."""

    request: Request  # as the engine knows it
    whole: str  # the id of the request that this is part of
    places: Sequence[int]  # in that one, of each sample here
    unanswered: set[int]
    lengths: dict[int, int]  # tokens so far of those that are unfinished, when last heard

    def left(self, index: int) -> int:
        """Tokens that a sample is expected to lack. A hint that proved too short is none."""
        most, length = self.request.sampling.max_new_tokens, self.lengths[index]
        expected = min(self.request.expected or most, most)
        return max((expected if expected > length else most) - length, 1)

    @property
    def outstanding(self) -> int:
        return sum(map(self.left, self.lengths))


@dataclass(slots=True)
class Whole:
    """A request as it was asked."""

    request: Request
    completions: dict[int, Completion] = field(default_factory=dict)
    parts: int = 0  # so far


@dataclass(slots=True)
class Held:
    """What is known of one replica."""

    parts: dict[str, Part] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    heard: float = 0.0  # when
    sampled: int = 0
    stolen: int = 0
    gives: Move | None = None  # asked for, not answered
    takes: Move | None = None

    @property
    def unfinished(self) -> list[tuple[Part, int]]:
        return [(part, index) for part in self.parts.values() for index in part.lengths]

    @property
    def outstanding(self) -> int:
        return sum(part.outstanding for part in self.parts.values())


class Routing:
    def __init__(self, replicas: int, slots: int | None = None) -> None:
        """`slots`: how many samples an engine advances in one step. With it, requests may wait and samples move."""
        self._held = [Held() for _ in range(replicas)]
        self._slots = slots
        self._wholes: dict[str, Whole] = {}
        self._waiting: list[Request] = []
        self._returned: list[tuple[Move, str, dict[int, Completion]]] = []  # of a request: to go on elsewhere

    def add(self, request: Request) -> None:
        if request.id in self._wholes:
            raise ValueError(f"request {request.id}: its id is that of an unfinished request")
        self._wholes[request.id] = Whole(request)
        self._waiting.append(request)

    def forget(self, id: str) -> None:
        """Nobody waits for a request any more. Engines may go on with it; what they say of it is ignored."""
        if self._wholes.pop(id, None) is None:
            return
        self._waiting = [request for request in self._waiting if request.id != id]
        self._returned = [returned for returned in self._returned if returned[1] != id]
        for held in self._held:
            held.parts = {own: part for own, part in held.parts.items() if part.whole != id}

    def send(self, now: float) -> list[Sent]:
        """What is to go where: first the samples that move, then whole requests as far as there is room."""
        sent = [self._continue(*returned, now) for returned in self._returned]
        self._returned = []
        if not self._waiting:
            return sent
        if self._slots is not None:
            self._waiting.sort(key=lambda request: request.expected or request.sampling.max_new_tokens, reverse=True)
        awake, rest = self._awake(now), iter(self._waiting)
        outstanding = {i: self._held[i].outstanding for i in awake}  # counted once: a burst is of many requests
        unfinished = {i: len(self._held[i].unfinished) for i in awake}
        for request in rest:
            samples = len(request.seeds)
            slots = self._slots or 1 << 62
            candidates = [i for i in awake if unfinished[i] == 0 or unfinished[i] + samples <= slots]
            if not candidates:
                self._waiting = [request, *rest]
                return sent
            least = min(candidates, key=outstanding.__getitem__)
            put = self._put(least, request, request.id, range(samples))
            outstanding[least] += self._held[least].parts[put.request.id].outstanding
            unfinished[least] += samples
            sent.append(put)
        self._waiting = []
        return sent

    def report(self, replica: int, report: Report, now: float) -> None:
        held = self._held[replica]
        held.heard, held.sampled = now, report.tokens
        if self._slots is None:  # progress depends on timing: it must not decide
            return
        held.pace.measure(report)
        for id, lengths in report.lengths.items():
            if (part := held.parts.get(id)) is not None:
                part.lengths = {i: length for i, length in lengths.items() if i in part.unanswered}

    def resume(self, now: float) -> None:
        """All were kept from sampling, so that silence says nothing."""
        for held in self._held:
            held.heard = now

    def done(self, replica: int, id: str, completions: Sequence[Completion]) -> list[Completion] | None:
        """A part is. Answers with the whole request if that was the last of it. Of what was withdrawn from the part,
        `moved` tells, earlier or later."""
        held = self._held[replica]
        if (part := held.parts.get(id)) is None:
            return None
        whole = self._wholes[part.whole]
        part.lengths = {}
        for i in [i for i in part.unanswered if completions[i].finish != "abort"]:
            whole.completions[part.places[i]] = completions[i]
            part.unanswered.remove(i)
        self._drop_if_answered(held, part)
        if len(whole.completions) < len(whole.request.seeds):
            return None
        del self._wholes[part.whole]
        return [whole.completions[place] for place in range(len(whole.request.seeds))]

    def steal(self, now: float) -> Move | None:
        """What is to be withdrawn from whom next; None: nothing is worth moving."""
        if self._slots is None or self._waiting or self._returned:
            return None
        for thief in self._awake(now):
            held = self._held[thief]
            asked = held.takes is not None and now - held.takes.since < SILENT_SECONDS
            if asked or held.gives or held.unfinished:
                continue
            for victim in sorted(range(len(self._held)), key=lambda i: -self._seconds_left(i, now)):
                if victim != thief and not self._held[victim].gives and (k := self._worth(thief, victim, now)):
                    samples = [SampleId(part.request.id, i) for part, i in self._by_worth(victim)[:k]]
                    held.takes = self._held[victim].gives = Move(thief, victim, samples, now)
                    return held.takes
        return None

    def moved(self, move: Move, withdrawn: Iterable[Withdrawn]) -> None:
        """The victim gave up these of what it was asked for; the others have finished meanwhile."""
        victim, thief = self._held[move.victim], self._held[move.thief]
        victim.gives = None
        thief.takes = None if thief.takes is move else thief.takes
        begun: dict[str, dict[int, Completion]] = {}
        for (id, index), completion in withdrawn:
            begun.setdefault(id, {})[index] = completion
        for id, samples in begun.items():
            if (part := victim.parts.get(id)) is not None:
                self._returned.append((move, part.whole, {part.places[i]: s for i, s in samples.items()}))
                part.unanswered -= samples.keys()
                part.lengths = {i: length for i, length in part.lengths.items() if i not in samples}
                self._drop_if_answered(victim, part)

    def loads(self) -> list[Load]:
        """By replica."""
        return [Load(len(held.parts), held.outstanding, held.sampled, held.stolen) for held in self._held]

    # -- where to ---------------------------------------------------------------------------------------------

    def _awake(self, now: float) -> list[int]:
        """The replicas that have reported lately; if none has, as when all of them switch weights, all."""
        everybody = list(range(len(self._held)))
        if self._slots is None:
            return everybody
        return [i for i in everybody if now - self._held[i].heard < SILENT_SECONDS] or everybody

    def _put(self, replica: int, request: Request, whole: str, places: Sequence[int]) -> Sent:
        lengths = dict.fromkeys(range(len(places)), 0) | {i: len(s.tokens) for i, s in enumerate(request.begun)}
        self._held[replica].parts[request.id] = Part(request, whole, places, set(lengths), lengths)
        self._wholes[whole].parts += 1
        return Sent(replica, request, whole)

    def _continue(self, move: Move, id: str, samples: Mapping[int, Completion], now: float) -> Sent:
        """On the thief, unless it has fallen silent since it was to take over."""
        whole, places = self._wholes[id], sorted(samples)
        awake = self._awake(now)
        replica = move.thief if move.thief in awake else min(awake, key=lambda i: self._held[i].outstanding)
        seeds, begun = [whole.request.seeds[place] for place in places], [samples[place] for place in places]
        request = replace(whole.request, id=f"{id}~{whole.parts}", seeds=seeds, begun=begun)
        self._held[replica].stolen += len(places)
        return self._put(replica, request, id, places)

    def _drop_if_answered(self, held: Held, part: Part) -> None:
        if not part.unanswered:
            del held.parts[part.request.id]

    # -- what a move is worth ---------------------------------------------------------------------------------

    def _line(self, replica: int, now: float) -> tuple[float, float]:
        """A replica's pace, as far as it is known. A silent one's step takes as long as it has been silent."""
        a, b = self._held[replica].pace.line or (0.0, 0.0)
        silent = now - self._held[replica].heard
        return (a + silent if silent >= SILENT_SECONDS else a), b

    def _seconds_left(self, replica: int, now: float) -> float:
        """Until a replica has nothing to do: as many steps as the longest sample takes, each of the samples that still
        run then. sum over steps (a + b n) = a longest + b tokens."""
        (a, b), left = self._line(replica, now), [part.left(i) for part, i in self._held[replica].unfinished]
        return a * max(left, default=0) + b * sum(left)

    def _by_worth(self, victim: int) -> list[tuple[Part, int]]:
        """Groups of which nothing is sampled yet first, for they cost no prefill again; then the longest left."""
        started = {part: any(part.lengths.values()) for part in self._held[victim].parts.values()}
        return sorted(
            self._held[victim].unfinished, key=lambda sample: (started[sample[0]], -sample[0].left(sample[1]))
        )

    def _worth(self, thief: int, victim: int, now: float) -> int:
        """How many samples to move for the two replicas to finish soonest; 0: not worth it. A move costs a step of the
        victim, which comes first, and one of the thief to read what is there already."""
        a, b = self._line(victim, now)
        c, d = self._held[thief].pace.line or self._held[victim].pace.line or (0.0, 0.0)  # equal until it is known
        samples = self._by_worth(victim)
        left = [part.left(i) for part, i in samples]
        longest_left_behind = list(accumulate(reversed([*left, 0]), max))[::-1]
        stays, best, moves = self._seconds_left(victim, now), float("inf"), 0
        behind, longest, tokens, prefill, contexts = sum(left), 0, 0, 0, set[Part]()
        for k, (part, i) in enumerate(samples[: self._slots], start=1):
            longest, tokens, behind = max(longest, left[k - 1]), tokens + left[k - 1], behind - left[k - 1]
            prefill += part.lengths[i] + (len(part.request.tokens) if part not in contexts else 0)
            contexts.add(part)
            cost = a + b * len(samples) + c + d * prefill
            after = max(a * longest_left_behind[k] + b * behind, cost + c * longest + d * tokens)
            if after + cost < stays and after < best:
                best, moves = after, k
        return moves
