"""Which replica samples what: a policy on numbers, with no processes and no clock of its own.

    add ─> waiting ── send ──> parts of requests, on a replica each ── done ─> a request's completions
                        ^                                   │    ^ report: how far they are, how fast the engine is
                        ├─ moved <── withdrawn <── steal, ──┤
                        └─ again <── lose          retire   ┘

A request (a group) goes whole to the replica with the fewest tokens left to sample, the first among equals, so that its
samples share a prefix cache. Without slots that is all, and the order of requests alone decides. With slots, requests
that no engine has room for wait here, longest expected first; and a replica that has nothing left takes over unfinished
samples of the one that would finish last, if by the measured pace of both that wins back the cost of the move, twice.

A turn of a rollout goes to the replica that served the turn before, or else to that of its group, because this one has
the beginning of its context in its prefix cache: unless another has so much less to do that reading the context again
costs less.

Replicas come and go. What a lost one had not answered begins again, with the same seeds; what a retired one gives up
continues where it stopped. Either is sent before any new request, and at once, even without room: a step waits for it.
With no live replica everything waits. Each part of a request has an id of its own, so that late messages about parts
that a replica held before it was lost match no part that it holds now.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.stealing import SILENT_SECONDS, PartialRequest, ReplicaLoad, samples_worth_moving
from titan_rl.wire.types import Completion, Request

MOST_NAMES = 1 << 16
"""Names of rollouts and groups whose replica is known; the oldest is forgotten."""


class Sent(NamedTuple):
    replica: int
    request: Request
    whole: str  # the id of the request that it is, or is part of


class Move(NamedTuple):
    """Samples that `victim` is asked to give up because `thief` has nothing to do."""

    thief: int | None  # None: send them to the replica with the least to do, or nowhere if they are forgotten
    victim: int
    samples: list[SampleId]
    since: float


class Load(NamedTuple):
    """What a replica has to do, and has done."""

    requests: int  # open; a part of one counts as one
    outstanding: int  # tokens that these are expected to lack
    sampled: int  # tokens
    stolen: int  # samples that it took over when it had nothing to do


@dataclass(slots=True)
class Whole:
    """A request as it was added."""

    request: Request
    completions: dict[int, Completion] = field(default_factory=dict)
    parts: int = 0  # made so far


class Unsent(NamedTuple):
    """Samples of one request that no replica has."""

    whole: str
    places: Sequence[int]
    begun: list[Completion]  # as in a Request
    thief: int | None = None  # the replica that asked for them


class Routing:
    def __init__(self, replicas: int, slots: int | None = None) -> None:
        """`slots`: how many samples an engine advances in one step. With it, requests may wait and samples move."""
        self._held = {replica: ReplicaLoad() for replica in range(replicas)}
        self._slots = slots
        self._wholes: dict[str, Whole] = {}  # the oldest first
        self._waiting: list[Request] = []  # never sent
        self._again: list[Unsent] = []  # what a replica had before
        self._moves: list[Move] = []  # of thieves; asked for, not answered
        self._homes: OrderedDict[str, int] = OrderedDict()  # name in an affinity -> the replica that served it last

    @property
    def live(self) -> list[int]:
        """The replicas that requests may go to."""
        return sorted(replica for replica, held in self._held.items() if not held.retired)

    def join(self, replica: int, now: float) -> None:
        """Add a replica that takes requests from now on, at an unknown pace. It may reuse a lost replica's index."""
        if replica in self._held:
            raise ValueError(f"replica {replica}: expected a new or a lost one to join, found it here")
        self._held[replica] = ReplicaLoad(heard=now)

    def lose(self, replica: int) -> int:
        """Drop a replica with all that it had. Return how many samples begin again, from the tokens that they were sent
        with. Samples that had finished are among them where their part was not done."""
        lost, parts = 0, self._held.pop(replica, ReplicaLoad()).parts.values()
        for part in parts:
            indices, begun = sorted(part.unanswered), part.request.begun
            places = [part.places[i] for i in indices]
            self._again.append(Unsent(part.whole, places, [begun[i] for i in indices] if begun else []))
            lost += len(indices)
        self._moves = [move for move in self._moves if replica not in (move.thief, move.victim)]
        self._homes = OrderedDict((name, home) for name, home in self._homes.items() if home != replica)
        return lost

    def retire(self, replica: int) -> list[SampleId]:
        """Send a replica nothing from now on, but accept its answers until it is lost. Return what to withdraw."""
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
        """Drop a request and ignore later messages about it. Return, by live replica, the samples of it to withdraw;
        from a retired replica everything is withdrawn anyway."""
        if self._wholes.pop(id, None) is None:
            return {}
        if self._waiting:
            self._waiting = [request for request in self._waiting if request.id != id]
        if self._again:
            self._again = [unsent for unsent in self._again if unsent.whole != id]
        left: dict[int, list[SampleId]] = {}
        for replica, held in self._held.items():
            for part in [part for part in held.parts.values() if part.whole == id]:
                del held.parts[part.request.id]
                if part.lengths and not held.retired:
                    left.setdefault(replica, []).extend(part.unfinished)
        return left

    def send(self, now: float) -> list[Sent]:
        """Decide what to send where: first what a replica had before, the oldest request's first; then whole requests,
        as far as there is room."""
        awake = self._awake(now)
        if not awake or not (self._again or self._waiting):
            return []
        if self._slots is not None:
            self._waiting.sort(key=lambda request: request.expected or request.sampling.max_new_tokens, reverse=True)
        outstanding = dict.fromkeys(awake, 0)
        if len(awake) > 1:  # else there is nothing to choose. Counted once: a burst holds many requests
            outstanding = {i: self._held[i].outstanding for i in awake}
        slots = self._slots
        unfinished = {i: 0 if slots is None else len(self._held[i].unfinished) for i in awake}
        sent: list[Sent] = []

        def put(replica: int, unsent: Unsent) -> None:
            part = self._put(replica, unsent)
            if len(awake) > 1:
                outstanding[replica] += part.outstanding
            unfinished[replica] += len(part.places)
            sent.append(Sent(replica, part.request, part.whole))

        if self._again:
            age = {id: n for n, id in enumerate(self._wholes)}
            for unsent in sorted(self._again, key=lambda unsent: age[unsent.whole]):
                put(unsent.thief if unsent.thief in awake else min(awake, key=outstanding.__getitem__), unsent)
            self._again = []
        waiting = deque(self._waiting)
        while waiting:
            request = waiting[0]
            samples = len(request.seeds)
            candidates = awake
            if slots is not None:
                candidates = [i for i in awake if unfinished[i] == 0 or unfinished[i] + samples <= slots]
            if not candidates:
                break
            put(self._best(request, candidates, outstanding), Unsent(request.id, range(samples), request.begun))
            waiting.popleft()
        self._waiting = list(waiting)
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
        """Count every replica as heard now: none could sample until now, so silence says nothing."""
        for held in self._held.values():
            held.heard = now

    def done(self, replica: int, id: str, completions: Sequence[Completion]) -> list[Completion] | None:
        """Record a finished part. Return the whole request if that was the last of it. Samples that were withdrawn from
        the part are reported to `moved`, earlier or later."""
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
        """Return the next move to ask a victim for; None if nothing is worth moving."""
        if self._slots is None or self._waiting or self._again:
            return None
        asked = {move.victim for move in self._moves}
        busy = asked | {move.thief for move in self._moves if now - move.since < SILENT_SECONDS}
        for thief in self._awake(now):
            if thief in busy or self._held[thief].unfinished:
                continue
            for victim in sorted(self.live, key=lambda i: -self._held[i].seconds_left(now)):
                if victim == thief or victim in asked:
                    continue
                if k := samples_worth_moving(self._held[thief], self._held[victim], now, self._slots):
                    samples = [SampleId(part.request.id, i) for part, i in self._held[victim].by_worth()[:k]]
                    self._moves.append(Move(thief, victim, samples, now))
                    return self._moves[-1]
        return None

    def moved(self, move: Move, withdrawn: Iterable[Withdrawn]) -> None:
        """Record which samples of a move the victim gave up; the others have finished meanwhile."""
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
        held = {replica: self._held[replica] for replica in self.live}
        return {i: Load(len(each.parts), each.outstanding, each.sampled, each.stolen) for i, each in held.items()}

    def _awake(self, now: float) -> list[int]:
        """Return the live replicas that have reported lately; all of them if none has, as when all switch weights."""
        live = self.live
        if self._slots is None:
            return live
        return [i for i in live if now - self._held[i].heard < SILENT_SECONDS] or live

    def _best(self, request: Request, candidates: Sequence[int], outstanding: Mapping[int, int]) -> int:
        """Return the replica with the least to do, or one that knows the context and has little more to do: no more
        tokens than the context has, or a quarter more."""
        if len(candidates) == 1:
            return candidates[0]
        least = min(candidates, key=outstanding.__getitem__)
        most = outstanding[least] + max(len(request.tokens), outstanding[least] // 4)
        homes = (self._homes[name] for name in request.affinity if name in self._homes)
        return next((home for home in homes if home in candidates and outstanding[home] <= most), least)

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
        for name in request.affinity[:1]:
            self._homes[name] = replica
            self._homes.move_to_end(name)
        for name in request.affinity[1:]:
            self._homes.setdefault(name, replica)
        while len(self._homes) > MOST_NAMES:
            self._homes.popitem(last=False)
        return part

    def _part(self, replica: int, id: str) -> PartialRequest | None:
        return held.parts.get(id) if (held := self._held.get(replica)) else None

    def _drop_if_answered(self, replica: int, part: PartialRequest) -> None:
        if not part.unanswered:
            del self._held[replica].parts[part.request.id]
