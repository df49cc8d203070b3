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

There may be thousands of replicas, each of which reports several times a second. So no request and no report looks at
all of them: only the moves of thieves do, which are decided a few times a second (Dispatch).
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titan_rl.actors.vllm.engine import EngineReport, SampleId, Withdrawn
from titan_rl.meshes.least_loaded import LeastLoaded
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
    number: int  # of requests that were added before
    completions: dict[int, Completion] = field(default_factory=dict)
    parts: int = 0  # made so far
    homes: dict[str, int] = field(default_factory=dict)  # id of an unanswered part -> the replica that has it


class Unsent(NamedTuple):
    """Samples of one request that no replica has."""

    whole: str
    places: Sequence[int]
    begun: list[Completion]  # as in a Request
    thief: int | None = None  # the replica that asked for them


class Routing:
    def __init__(self, replicas: int, slots: int | None = None) -> None:
        """`slots`: how many samples an engine advances in one step. With it, requests may wait and samples move."""
        self._held: dict[int, ReplicaLoad] = {}
        self._slots = slots
        self._wholes: dict[str, Whole] = {}  # the oldest first
        self._added = 0
        self._waiting: list[tuple[int, int, Request]] = []  # never sent: a heap, by expected length and then by age
        self._again: list[Unsent] = []  # what a replica had before
        self._moves: dict[int, Move] = {}  # of thieves, by victim; asked for, not answered
        self._homes: OrderedDict[str, int] = OrderedDict()  # name in an affinity -> the replica that served it last
        self._least = LeastLoaded()  # the live replicas
        self._heard = 0.0  # when any of them last reported
        self._uncounted: set[int] = set()  # replicas whose work has changed since it was counted
        self._no_room: int | None = None  # samples for which no replica has room but those that have changed since
        self._changed = LeastLoaded()
        for replica in range(replicas):
            self.join(replica, 0.0)

    @property
    def live(self) -> list[int]:
        """The replicas that requests may go to."""
        return sorted(replica for replica, held in self._held.items() if not held.retired)

    def join(self, replica: int, now: float) -> None:
        """Add a replica that takes requests from now on, at an unknown pace. It may reuse a lost replica's index."""
        if replica in self._held:
            raise ValueError(f"replica {replica}: expected a new or a lost one to join, found it here")
        self._held[replica] = ReplicaLoad(heard=now)
        self._least.put(replica, 0)
        self._heard = max(self._heard, now)
        self._uncounted.add(replica)

    def lose(self, replica: int) -> int:
        """Drop a replica with all that it had. Return how many samples begin again, from the tokens that they were sent
        with. Samples that had finished are among them where their part was not done."""
        lost, parts = 0, self._held.pop(replica, ReplicaLoad()).parts
        for id, part in parts.items():
            self._wholes[part.whole].homes.pop(id)
            indices, begun = sorted(part.unanswered), part.request.begun
            places = [part.places[i] for i in indices]
            self._again.append(Unsent(part.whole, places, [begun[i] for i in indices] if begun else []))
            lost += len(indices)
        self._leave(replica)
        self._moves = {victim: move for victim, move in self._moves.items() if replica not in (move.thief, victim)}
        self._homes = OrderedDict((name, home) for name, home in self._homes.items() if home != replica)
        return lost

    def retire(self, replica: int) -> list[SampleId]:
        """Send a replica nothing from now on, but accept its answers until it is lost. Return what to withdraw."""
        if (held := self._held.get(replica)) is None:
            return []
        held.retired = True
        self._leave(replica)
        return [sample for part in held.parts.values() for sample in part.unfinished]

    def add(self, request: Request) -> None:
        if request.id in self._wholes:
            raise ValueError(f"request {request.id}: its id is that of an unfinished request")
        self._wholes[request.id] = Whole(request, self._added)
        longest = 0 if self._slots is None else request.expected or request.sampling.max_new_tokens
        heapq.heappush(self._waiting, (-longest, self._added, request))
        self._added += 1

    def forget(self, id: str) -> dict[int, list[SampleId]]:
        """Drop a request and ignore later messages about it. Return, by live replica, the samples of it to withdraw;
        from a retired replica everything is withdrawn anyway."""
        if (whole := self._wholes.pop(id, None)) is None:
            return {}
        if self._again:
            self._again = [unsent for unsent in self._again if unsent.whole != id]
        left: dict[int, list[SampleId]] = {}
        for part_id, replica in sorted(whole.homes.items(), key=lambda home: home[1]):
            held = self._held[replica]
            part = held.parts.pop(part_id)
            self._uncounted.add(replica)
            if part.lengths and not held.retired:
                left.setdefault(replica, []).extend(part.unfinished)
        return left

    def send(self, now: float) -> list[Sent]:
        """Decide what to send where: first what a replica had before, the oldest request's first; then whole requests,
        as far as there is room."""
        if not (self._again or self._waits) or not self._least:
            return []
        self._count()
        sent: list[Sent] = []
        again, self._again = sorted(self._again, key=lambda unsent: self._wholes[unsent.whole].number), []
        for unsent in again:
            home = unsent.thief
            if home is None or not self._awake(home, now):
                home = self._least.first(lambda replica: self._awake(replica, now))
            assert home is not None, "a replica is live, so one counts as awake"
            sent.append(self._put(home, unsent))
        while self._waits:
            request = self._waiting[0][-1]
            if (home := self._home(request, now)) is None:
                break
            heapq.heappop(self._waiting)
            sent.append(self._put(home, Unsent(request.id, range(len(request.seeds)), request.begun)))
        return sent

    def report(self, replica: int, report: EngineReport, now: float) -> None:
        if (held := self._held.get(replica)) is None:
            return
        held.heard, held.sampled = now, report.tokens
        self._heard = now if not held.retired else self._heard
        if self._slots is None:  # progress depends on timing: it must not decide
            return
        held.pace.measure(report)
        for id, lengths in report.lengths.items():
            if (part := held.parts.get(id)) is not None:
                part.lengths = {i: length for i, length in lengths.items() if i in part.unanswered}
        self._uncounted.add(replica)

    def resume(self, now: float) -> None:
        """Count every replica as heard now: none could sample until now, so silence says nothing."""
        for held in self._held.values():
            held.heard = now
        self._heard, self._no_room = now, None

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
        self._uncounted.add(replica)
        if len(whole.completions) < len(whole.request.seeds):
            return None
        del self._wholes[part.whole]
        return [whole.completions[place] for place in range(len(whole.request.seeds))]

    def steal(self, now: float) -> list[Move]:
        """Return the moves to ask victims for: the fastest idle replica takes from the one that would finish last, and
        so on. A victim that is not worth its move is not offered to slower thieves."""
        if self._slots is None or self._waits or self._again:
            return []
        self._count()
        held, live = self._held, self.live
        busy = {move.thief for move in self._moves.values() if now - move.since < SILENT_SECONDS} | self._moves.keys()
        thieves = [i for i in live if held[i].samples == 0 and i not in busy and self._awake(i, now)]
        if not thieves:
            return []
        thieves = deque(sorted(thieves, key=lambda i: held[i].pace.line or (0.0, 0.0)))
        victims = [i for i in live if held[i].samples > 0 and i not in self._moves]
        found: list[Move] = []
        for victim in sorted(victims, key=lambda i: -held[i].seconds_left(now)):
            if thieves and (k := samples_worth_moving(held[thieves[0]], held[victim], now, self._slots)):
                samples = [SampleId(part.request.id, i) for part, i in held[victim].by_worth()[:k]]
                found.append(Move(thieves.popleft(), victim, samples, now))
        self._moves |= {move.victim: move for move in found}
        return found

    def moved(self, move: Move, withdrawn: Iterable[Withdrawn]) -> None:
        """Record which samples of a move the victim gave up; the others have finished meanwhile."""
        if self._moves.get(move.victim) is move:
            del self._moves[move.victim]
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
        self._uncounted.add(move.victim)

    def loads(self) -> dict[int, Load]:
        self._count()
        held = {replica: self._held[replica] for replica in self.live}
        return {i: Load(len(each.parts), each.outstanding, each.sampled, each.stolen) for i, each in held.items()}

    @property
    def _waits(self) -> bool:
        """True if a request waits. Forgotten ones are dropped."""
        while self._waiting:
            _, number, request = self._waiting[0]
            if (whole := self._wholes.get(request.id)) is not None and whole.number == number:
                return True
            heapq.heappop(self._waiting)
        return False

    def _awake(self, replica: int, now: float) -> bool:
        """Return True if a live replica has reported lately; all of them count if none has, as when all switch
        weights."""
        if (held := self._held.get(replica)) is None or held.retired:
            return False
        return self._slots is None or now - held.heard < SILENT_SECONDS or now - self._heard >= SILENT_SECONDS

    def _home(self, request: Request, now: float) -> int | None:
        """Return the replica with the least to do, or one that knows the context and has little more to do: no more
        tokens than the context has, or a quarter more. None if no replica has room."""
        slots, samples = self._slots, len(request.seeds)

        def has_room(replica: int) -> bool:
            if slots is None:
                return True
            held = self._held[replica]
            return self._awake(replica, now) and (held.samples == 0 or held.samples + samples <= slots)

        known_full = samples == self._no_room and now - self._heard < SILENT_SECONDS
        least = self._changed.first(has_room, keeps=False) if known_full else self._least.first(has_room)
        if least is None:
            if not known_full:
                self._no_room, self._changed = samples, LeastLoaded()
            return None
        most = self._least[least] + max(len(request.tokens), self._least[least] // 4)
        known = (self._homes[name] for name in request.affinity if name in self._homes)
        return next((i for i in known if self._awake(i, now) and has_room(i) and self._least[i] <= most), least)

    def _count(self) -> None:
        """Count the work of the replicas that have changed, or that report again."""
        for replica in self._uncounted:
            if (held := self._held.get(replica)) is not None and not held.retired:
                self._least.put(replica, held.count())
                if self._no_room is not None:
                    self._changed.put(replica, held.outstanding)
        self._uncounted.clear()

    def _leave(self, replica: int) -> None:
        self._least.drop(replica)
        self._changed.drop(replica)
        self._heard = max((held.heard for held in self._held.values() if not held.retired), default=0.0)

    def _put(self, replica: int, unsent: Unsent) -> Sent:
        id, places, begun, thief = unsent
        held, whole = self._held[replica], self._wholes[id]
        request = whole.request
        if whole.parts:
            seeds = [request.seeds[place] for place in places]
            request = replace(request, id=f"{id}~{whole.parts}", seeds=seeds, begun=begun)
        whole.parts += 1
        lengths = dict.fromkeys(range(len(places)), 0) | {i: len(s.tokens) for i, s in enumerate(begun)}
        held.parts[request.id] = part = PartialRequest(request, id, places, set(lengths), lengths)
        whole.homes[request.id] = replica
        held.stolen += len(places) if thief is not None else 0
        held.outstanding += part.outstanding
        held.samples += len(places)
        self._least.put(replica, held.outstanding)
        if replica in self._changed:
            self._changed.put(replica, held.outstanding)
        for name in request.affinity[:1]:
            self._homes[name] = replica
            self._homes.move_to_end(name)
        for name in request.affinity[1:]:
            self._homes.setdefault(name, replica)
        while len(self._homes) > MOST_NAMES:
            self._homes.popitem(last=False)
        return Sent(replica, request, id)

    def _part(self, replica: int, id: str) -> PartialRequest | None:
        return held.parts.get(id) if (held := self._held.get(replica)) else None

    def _drop_if_answered(self, replica: int, part: PartialRequest) -> None:
        if not part.unanswered:
            del self._held[replica].parts[part.request.id]
            del self._wholes[part.whole].homes[part.request.id]
