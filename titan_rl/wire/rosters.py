"""Who takes part in the broadcasts of a publication: the controller decides it, and sends each process its seats.

    run of (trainer rank, reader)    a group: the trainer rank is 0, then the first replica of each host that gets it

Every process takes its groups in one order that all of them share, so none waits in a ring. In that order a trainer
rank begins with another reader than its neighbours do, so that most groups are busy at once. Pure, as the plan is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
