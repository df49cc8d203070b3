"""Who takes part in the broadcasts of a publication: the controller decides it, and sends each process its seats.

    run of (trainer rank, reader)    a group: the trainer rank is 0, then the first replica of each host that gets it

Every process takes its groups in one order that all of them share, so none waits in a ring. In that order a trainer
rank begins with another reader than its neighbours do, so that most groups are busy at once.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from titan_rl.meshes.replica import Replica
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.weight_source import Notes

Pair = tuple[int, int]  # trainer rank, reader


class Seat(NamedTuple):
    """A process's place in the group of one run."""

    peer: int  # at a trainer rank the reader, at a reader the trainer rank
    pair: Pair
    rank: int  # in the group; the trainer rank has 0
    size: int


class Gathering(NamedTuple):
    """The groups of one process, in the order in which it takes them."""

    epoch: int  # the roster's; groups of another epoch are made anew
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Roster:
    """The replicas that receive each run by broadcast. A roster is valid until one of them fails or another joins."""

    epoch: int
    replicas: Mapping[Pair, tuple[str, ...]]

    @property
    def names(self) -> set[str]:
        return {name for names in self.replicas.values() for name in names}

    def of_trainer(self, rank: int) -> Gathering:
        seats = (Seat(reader, (t, reader), 0, 1 + len(names)) for (t, reader), names in self._turns() if t == rank)
        return Gathering(self.epoch, tuple(seats))

    def of_reader(self, replica: str, reader: int) -> Gathering:
        seats = (
            Seat(t, (t, r), 1 + names.index(replica), 1 + len(names))
            for (t, r), names in self._turns()
            if r == reader and replica in names
        )
        return Gathering(self.epoch, tuple(seats))

    def _turns(self) -> Iterator[tuple[Pair, tuple[str, ...]]]:
        period = 1 + max((max(pair) for pair in self.replicas), default=0)
        return iter(sorted(self.replicas.items(), key=lambda item: (sum(item[0]) % period, item[0])))


class Rosters:
    """Keeps a roster for as long as it is valid."""

    def __init__(self) -> None:
        self._epoch = 0  # the last roster's
        self._roster: Roster | None = None  # None: no replica can receive, or a broadcast failed

    def notes(self, replicas: Collection[Replica], trainers: int) -> Notes:
        """Return the groups of the next publication: as for the last one, or others if a replica joined or a broadcast
        failed."""
        tp = {replica.name: replica.tp for replica in replicas}
        receivers = receivers_of(replicas)
        if not receivers:
            return Notes()
        if self._roster is None or self._roster.replicas != receivers:
            self._epoch += 1
            self._roster = Roster(self._epoch, receivers)
        roster = self._roster
        readers = dict[str, list[Gathering]]()
        for name in roster.names:
            readers[name] = [roster.of_reader(name, rank) for rank in range(tp[name])]
        return Notes([roster.of_trainer(rank) for rank in range(trainers)], readers)

    def pulled(self, notes: Notes, cost: SyncStats) -> str:
        """Have the groups made anew for the next publication if a broadcast failed. Return a warning, or ""."""
        if cost.fell_back or not notes.replicas.keys() <= set(cost.engines):
            self._roster = None
        if not cost.fell_back:
            return ""
        readers = f"{len(cost.fell_back)} generator rank(s)"
        return f"{readers} read them one-sided, as their broadcast failed; {cost.fell_back[0]}"


def receivers_of(replicas: Collection[Replica]) -> dict[Pair, tuple[str, ...]]:
    """Return which replicas can receive a broadcast, the first of each memory, by trainer rank and reader."""
    first = {replica.memory: replica for replica in reversed([*replicas]) if replica.memory is not None}
    receivers: dict[Pair, tuple[str, ...]] = {}
    for replica in first.values():
        for reader, connection in enumerate(replica.connections):
            for rank in connection.senders:
                receivers[rank, reader] = (*receivers.get((rank, reader), ()), replica.name)
    return receivers
