"""Which replica samples what: a policy on numbers, with no processes and no clock of its own.

    add ─> waiting ── send ──> parts of requests, on a replica each ── done ─> a request's completions
                        ^                                   │    ^ report: how far they are, how fast the engine is
                        ├─ moved <── withdrawn <── steal, ──┤
                        └─ anew <── lose           retire   ┘

A request (a group) goes whole to the replica with the fewest tokens left to sample, the first among equals, so that its
samples share a prefix cache. Without slots that is all, and the order of requests alone decides. With slots, what no
engine has room for waits here, longest expected first; and a replica that has nothing left takes over unfinished
samples of the one that would finish last, if by what was measured of both that wins back what a move costs, twice.

Replicas come and go. What a lost one had not answered begins anew, with the same seeds; what a retired one gives up
goes on where it stands. Either goes before any new request, and at once, room or not: it is what a step waits for. With
no live replica everything waits. Each part of a request has an id of its own, so that what is still said of those that
a replica had before it was lost names none that it has now.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.wire.types import Completion, Request

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

    thief: int | None  # None: for whoever has the least to do then, or for nobody if they are forgotten
    victim: int
    samples: list[SampleId]
    since: float


class Load(NamedTuple):
    """What a replica has, and has done."""

    requests: int  # open; a part of one counts as one
    outstanding: int  # tokens that these are expected to lack
    sampled: int  # tokens
    stolen: int  # samples that it took over, having nothing to do


class Pace:
    """Seconds of an engine's step that computes n tokens, as a line a + b n through what was measured. As long as n
    stays the same all is a: a smaller batch is not expected to run faster before one has."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # over steps: 1, n, seconds, n n, n seconds
        self._last = EngineReport()

    def measure(self, report: EngineReport) -> None:
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
class PartialRequest:
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

    @property
    def unfinished(self) -> list[SampleId]:
        return [SampleId(self.request.id, index) for index in self.lengths]


@dataclass(slots=True)
class Whole:
    """A request as it was asked."""

    request: Request
    completions: dict[int, Completion] = field(default_factory=dict)
    parts: int = 0  # so far


class Unsent(NamedTuple):
    """Samples of one request that no replica has."""

    whole: str
    places: Sequence[int]
    begun: list[Completion]  # as in a Request
    thief: int | None = None  # who asked for them


@dataclass(slots=True)
class HeldSample:
    """What is known of one replica."""

    parts: dict[str, PartialRequest] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    heard: float = 0.0  # when
    sampled: int = 0
    stolen: int = 0
    retired: bool = False  # what it has left, it may yet answer

    @property
    def unfinished(self) -> list[tuple[PartialRequest, int]]:
        return [(part, index) for part in self.parts.values() for index in part.lengths]

    @property
    def outstanding(self) -> int:
        return sum(part.outstanding for part in self.parts.values())


class Routing:
    def __init__(self, replicas: int, slots: int | None = None) -> None:
        """`slots`: how many samples an engine advances in one step. With it, requests may wait and samples move."""
        self._held = {replica: HeldSample() for replica in range(replicas)}
        self._slots = slots
        self._wholes: dict[str, Whole] = {}  # the oldest first
        self._waiting: list[Request] = []  # never sent
        self._again: list[Unsent] = []  # what a replica had before
        self._moves: list[Move] = []  # of thieves; asked for, not answered

    @property
    def live(self) -> list[int]:
        """The replicas that requests may go to."""
        return sorted(replica for replica, held in self._held.items() if not held.retired)

    def join(self, replica: int, now: float) -> None:
        """It takes requests from now on, at a pace that nobody knows. Its index may have been a lost one's."""
        if replica in self._held:
            raise ValueError(f"replica {replica}: expected a new or a lost one to join, found it here")
        self._held[replica] = HeldSample(heard=now)

    def lose(self, replica: int) -> int:
        """It is gone, with all that it had. Answers with how many samples begin anew, from the tokens that they had
        been sent with; those that have finished are among them where their part was not done."""
        lost, parts = 0, self._held.pop(replica, HeldSample()).parts.values()
        for part in parts:
            indices, begun = sorted(part.unanswered), part.request.begun
            places = [part.places[i] for i in indices]
            self._again.append(Unsent(part.whole, places, [begun[i] for i in indices] if begun else []))
            lost += len(indices)
        self._moves = [move for move in self._moves if replica not in (move.thief, move.victim)]
        return lost

    def retire(self, replica: int) -> list[SampleId]:
        """It takes nothing over from now on, but is heard until it is lost. Answers with what is to be withdrawn."""
        if (held := self._held.get(replica)) is None:
            return []
        held.retired = True
        return [sample for part in held.parts.values() for sample in part.unfinished]

    def add(self, request: Request) -> None:
        if request.id in self._wholes:
            raise ValueError(f"request {request.id}: its id is that of an unfinished request")
        self._wholes[request.id] = Whole(request)
        self._waiting.append(request)

    def forget(self, id: str) -> dict[int, list[SampleId]]:
        """Nobody waits for a request any more, and what is said of it is ignored. Answers with what live replicas still
        have of it, to be withdrawn; of a retired one all is withdrawn anyway."""
        if self._wholes.pop(id, None) is None:
            return {}
        self._waiting = [request for request in self._waiting if request.id != id]
        self._again = [unsent for unsent in self._again if unsent.whole != id]
        left: dict[int, list[SampleId]] = {}
        for replica, held in self._held.items():
            for part in [part for part in held.parts.values() if part.whole == id]:
                del held.parts[part.request.id]
                if part.lengths and not held.retired:
                    left.setdefault(replica, []).extend(part.unfinished)
        return left

    def send(self, now: float) -> list[Sent]:
        """What is to go where: first what a replica had before, the oldest request's first; then whole requests, as far
        as there is room."""
        awake = self._awake(now)
        if not awake or not (self._again or self._waiting):
            return []
        if self._slots is not None:
            self._waiting.sort(key=lambda request: request.expected or request.sampling.max_new_tokens, reverse=True)
        outstanding = {i: self._held[i].outstanding for i in awake}  # counted once: a burst is of many requests
        unfinished = {i: len(self._held[i].unfinished) for i in awake}
        sent: list[Sent] = []

        def put(replica: int, unsent: Unsent) -> None:
            part = self._put(replica, unsent)
            outstanding[replica] += part.outstanding
            unfinished[replica] += len(part.places)
            sent.append(Sent(replica, part.request, part.whole))

        age = {id: n for n, id in enumerate(self._wholes)}
        for unsent in sorted(self._again, key=lambda unsent: age[unsent.whole]):
            put(unsent.thief if unsent.thief in awake else min(awake, key=outstanding.__getitem__), unsent)
        self._again = []
        slots = self._slots or 1 << 62
        while self._waiting:
            request = self._waiting[0]
            samples = len(request.seeds)
            candidates = [i for i in awake if unfinished[i] == 0 or unfinished[i] + samples <= slots]
            if not candidates:
                break
            put(min(candidates, key=outstanding.__getitem__), Unsent(request.id, range(samples), request.begun))
            del self._waiting[0]
        return sent

    def report(self, replica: int, report: EngineReport, now: float) -> None:
        if (held := self._held.get(replica)) is None:
            return
        held.heard, held.sampled = now, report.tokens
        if self._slots is None:  # progress depends on timing: it must not decide
            return
        held.pace.measure(report)
        for id, lengths in report.lengths.items():
            if (part := held.parts.get(id)) is not None:
                part.lengths = {i: length for i, length in lengths.items() if i in part.unanswered}

    def resume(self, now: float) -> None:
        """All were kept from sampling, so that silence says nothing."""
        for held in self._held.values():
            held.heard = now

    def done(self, replica: int, id: str, completions: Sequence[Completion]) -> list[Completion] | None:
        """A part is. Answers with the whole request if that was the last of it. Of what was withdrawn from the part,
        `moved` tells, earlier or later."""
        if (part := self._part(replica, id)) is None:
            return None
        whole = self._wholes[part.whole]
        part.lengths = {}
        for i in [i for i in part.unanswered if completions[i].finish != "abort"]:
            whole.completions[part.places[i]] = completions[i]
            part.unanswered.remove(i)
        self._drop_if_answered(replica, part)
        if len(whole.completions) < len(whole.request.seeds):
            return None
        del self._wholes[part.whole]
        return [whole.completions[place] for place in range(len(whole.request.seeds))]

    def steal(self, now: float) -> Move | None:
        """What is to be withdrawn from whom next; None: nothing is worth moving."""
        if self._slots is None or self._waiting or self._again:
            return None
        asked = {move.victim for move in self._moves}
        busy = asked | {move.thief for move in self._moves if now - move.since < SILENT_SECONDS}
        for thief in self._awake(now):
            if thief in busy or self._held[thief].unfinished:
                continue
            for victim in sorted(self.live, key=lambda i: -self._seconds_left(i, now)):
                if victim != thief and victim not in asked and (k := self._worth(thief, victim, now)):
                    samples = [SampleId(part.request.id, i) for part, i in self._by_worth(victim)[:k]]
                    self._moves.append(Move(thief, victim, samples, now))
                    return self._moves[-1]
        return None

    def moved(self, move: Move, withdrawn: Iterable[Withdrawn]) -> None:
        """The victim gave up these of what it was asked for; the others have finished meanwhile."""
        self._moves = [other for other in self._moves if other is not move]
        begun: dict[str, dict[int, Completion]] = {}
        for (id, index), completion in withdrawn:
            begun.setdefault(id, {})[index] = completion
        for id, samples in begun.items():
            if (part := self._part(move.victim, id)) is not None:
                places = {part.places[i]: sample for i, sample in sorted(samples.items())}
                self._again.append(Unsent(part.whole, list(places), list(places.values()), move.thief))
                part.unanswered -= samples.keys()
                part.lengths = {i: length for i, length in part.lengths.items() if i not in samples}
                self._drop_if_answered(move.victim, part)

    def loads(self) -> dict[int, Load]:
        """By live replica."""
        held = {replica: self._held[replica] for replica in self.live}
        return {i: Load(len(each.parts), each.outstanding, each.sampled, each.stolen) for i, each in held.items()}

    # -- where to ---------------------------------------------------------------------------------------------

    def _awake(self, now: float) -> list[int]:
        """The live replicas that have reported lately; if none has, as when all of them switch weights, all."""
        live = self.live
        if self._slots is None:
            return live
        return [i for i in live if now - self._held[i].heard < SILENT_SECONDS] or live

    def _put(self, replica: int, unsent: Unsent) -> PartialRequest:
        id, places, begun, thief = unsent
        held, whole = self._held[replica], self._wholes[id]
        request = whole.request
        if whole.parts:
            seeds = [request.seeds[place] for place in places]
            request = replace(request, id=f"{id}~{whole.parts}", seeds=seeds, begun=begun)
        whole.parts += 1
        lengths = dict.fromkeys(range(len(places)), 0) | {i: len(s.tokens) for i, s in enumerate(begun)}
        held.parts[request.id] = part = PartialRequest(request, id, places, set(lengths), lengths)
        held.stolen += len(places) if thief is not None else 0
        return part

    def _part(self, replica: int, id: str) -> PartialRequest | None:
        return held.parts.get(id) if (held := self._held.get(replica)) else None

    def _drop_if_answered(self, replica: int, part: PartialRequest) -> None:
        if not part.unanswered:
            del self._held[replica].parts[part.request.id]

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

    def _by_worth(self, victim: int) -> list[tuple[PartialRequest, int]]:
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
        behind, longest, tokens, prefill, contexts = sum(left), 0, 0, 0, set[PartialRequest]()
        for k, (part, i) in enumerate(samples[: self._slots], start=1):
            longest, tokens, behind = max(longest, left[k - 1]), tokens + left[k - 1], behind - left[k - 1]
            prefill += part.lengths[i] + (len(part.request.tokens) if part not in contexts else 0)
            contexts.add(part)
            cost = a + b * len(samples) + c + d * prefill
            after = max(a * longest_left_behind[k] + b * behind, cost + c * longest + d * tokens)
            if after + cost < stays and after < best:
                best, moves = after, k
        return moves
