"""Which host reads a version from which: the controller decides it for each publication.

    trainers' hosts ──> host 1 ──> host 3 ──> host 5     a chain for each host of the trainers; each host passes
                   └──> host 2 ──> host 4 ──> host 6     a slice on as soon as it has it

With B bytes a second through each port and direction, S bytes of a version, T hosts of trainers and H hosts of readers,
no port sends more than S: the last host has the version after S / B + (H / T - 1) x f seconds, where f is about twice
the time of the slices in flight (remote_run.LANES of each rank). Trainers that send to all readers take H / T x S / B.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.relay.first_readers import firsts, relayed
from titan_rl.meshes.replica import Replica
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.weight_source import Notes, Source

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

STALL_SECONDS = 15.0  # without a new slice, until the first host of a chain counts as lost
STALL_SECONDS_PER_HOST = 1.0  # more for each host behind, so that one that changes over keeps the hosts behind it


@dataclass(frozen=True, slots=True, eq=False)
class RelayOffer:
    """Where readers of other hosts find the memory of a host."""

    digest: int  # equal for readers of the same runs
    senders: int  # hosts of the trainers
    header: "RDMABuffer"
    slices: "tuple[list[RDMABuffer], ...]"  # by run


class Followed(NamedTuple):
    """The host that a reader reads from: its note about a publication."""

    name: str  # the replica
    epoch: int  # changes with the chains
    offer: RelayOffer | None  # None: as in the epoch's first note
    patience: float  # seconds without a new slice, until the reader reads from the trainers


def chained(hosts: Sequence[str], chains: int, broken: Collection[str] = ()) -> dict[str, str]:
    """Return the host before each one, except before the first of each chain. No host is behind a `broken` one."""
    good = [host for host in hosts if host not in broken]
    before = {host: good[i] for i, host in enumerate(good[chains:])}
    lasts = good[-chains:]
    for i, host in enumerate(host for host in hosts if host in broken and good):
        before[host] = lasts[i % len(lasts)]
    return before


class Relays:
    """Keeps the chains for as long as their hosts and offers stay the same."""

    def __init__(self) -> None:
        self._epoch = 0
        self._before: dict[str, tuple[str, Sequence[RelayOffer]]] = {}  # by replica: the one that it follows
        self._offers: dict[str, Sequence[RelayOffer]] = {}  # by replica, one of each rank
        self._broken = set[RelayOffer]()  # that gave no slice in time, or wrong bytes: no host follows them
        self._informed = set[RelayOffer]()  # own offers of replicas that have this epoch's notes

    @staticmethod
    def settled(keys: WeightSyncSection, sources: Sequence[Sequence[Source]], places: Collection[str]) -> bool:
        """Return whether readers at these places pass weights on."""
        if not relayed(keys, 1, len(set(places))):
            return False
        offers = [source.offer for reader in sources for source in reader]
        linked = bool(offers) and all(offer.link is not None and not offer.link.meets for offer in offers)
        senders = {offer.place for offer in offers}
        return linked and relayed(keys, len(senders), len(set(places) - senders))

    def notes(self, replicas: Collection[Replica], trainers: int) -> Notes:
        """Return the host before each one, as for the last publication or in other chains, if a replica has joined,
        was lost or has failed."""
        self._offers = dict(_offers_of(replicas))
        before = {name: (first, self._offers[first]) for name, first in self._chains().items()}
        if before != self._before:
            self._epoch, self._before, self._informed = self._epoch + 1, before, set()
        notes = {}
        for name, (first, offers) in before.items():
            patience = STALL_SECONDS + STALL_SECONDS_PER_HOST * self._hosts_before(name)
            informed = self._offers[name][0] in self._informed
            given: Sequence[RelayOffer | None] = [None] * len(offers) if informed else offers
            notes[name] = [Followed(first, self._epoch, offer, patience) for offer in given]
        return Notes([], notes)

    def pulled(self, notes: Notes, cost: SyncStats) -> str:
        """Let no host follow one that has failed another. Return a warning, or ""."""
        unreached = set(cost.unreached)
        if cost.relayed:  # else the notes may not have been sent, as when a replica was lost just before
            reached = cost.engines.keys() - unreached
            self._informed |= {self._offers[name][0] for name in notes.replicas if name in reached}
        self._informed -= {self._offers[name][0] for name in unreached if name in self._offers}
        for name in {notes.replicas[name][0].name for name in unreached if name in notes.replicas} - unreached:
            self._broken.update(self._offers.get(name, ()))
        if not unreached:
            return ""
        hosts = f"{len(unreached)} host(s) read from the trainers, as the host before failed"
        return f"{hosts}; {cost.fell_back[0]}"

    def _chains(self) -> dict[str, str]:
        alike: dict[tuple[int, ...], list[str]] = {}
        for name, offers in self._offers.items():
            alike.setdefault(tuple(offer.digest for offer in offers), []).append(name)
        before: dict[str, str] = {}
        for names in alike.values():
            broken = {name for name in names if not self._broken.isdisjoint(self._offers[name])}
            before |= chained(names, firsts(self._offers[names[0]][0].senders, len(names)), broken)
        return before

    def _hosts_before(self, name: str) -> int:
        count = 0
        while name in self._before:
            name, count = self._before[name][0], count + 1
        return count


def _offers_of(replicas: Collection[Replica]) -> Iterator[tuple[str, Sequence[RelayOffer]]]:
    """Yield the offers of the first replica of each host."""
    seen = set[tuple[str, int]]()
    for replica in replicas:
        offers = [connection.relay for connection in replica.connections if connection.relay is not None]
        if replica.memory is not None and replica.memory not in seen and len(offers) == replica.tp:
            seen.add(replica.memory)
            yield replica.name, offers
