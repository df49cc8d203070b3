"""Chains of hosts: the controller's part."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.relay.chains import RelayOffer, Relays, chained
from titan_rl.ext.relay.first_readers import first_readers, firsts, relayed
from titan_rl.meshes.replica import Replica
from titan_rl.wire.reports import EngineStats, SyncStats
from titan_rl.wire.weight_source import Connection, HostCopy, Offer, Source

EMPTY: Any = None


@given(st.integers(0, 80), st.integers(1, 9), st.data())
def test_every_host_is_in_one_chain_and_no_host_is_behind_a_broken_one(readers: int, senders: int, data: Any) -> None:
    hosts = [f"h{i}" for i in range(readers)]
    broken = data.draw(st.sets(st.sampled_from(hosts))) if hosts else set()
    chains = firsts(senders, max(1, readers))
    before = chained(hosts, chains, broken)
    good = len(hosts) - len(broken)
    assert not set(before.values()) & broken
    assert len(hosts) - len(before) == (min(chains, good) or len(broken)), "the others read from the trainers"
    followers = [first for host, first in before.items() if host not in broken]
    assert len(set(followers)) == len(followers), "a port sends a version once"
    for name in hosts:
        behind = [name]
        while (name := before.get(name, "")) and len(behind) <= readers:
            behind.append(name)
        assert len(behind) <= math.ceil(max(1, good) / chains) + bool(broken), "no ring, and no long chain"


@pytest.mark.parametrize(
    ("keys", "senders", "readers", "expected"),
    [
        ({}, 1, 2, False),
        ({}, 1, 3, True),
        ({}, 4, 11, False),
        ({}, 4, 64, True),
        ({"verify": "transfer"}, 4, 64, False),
        ({"transport": "broadcast"}, 4, 64, False),
        ({"transport": "shm"}, 4, 64, False),
        ({"relay": True}, 1, 1, True),
        ({"relay": False}, 1, 64, False),
    ],
)
def test_many_hosts_that_read_and_verify_pass_weights_on(
    keys: dict[str, Any], senders: int, readers: int, expected: bool
) -> None:
    assert relayed(WeightSyncSection(**keys), senders, readers) is expected
    first = first_readers(WeightSyncSection(**keys), senders, readers)
    assert first == (min(senders, readers) if expected else readers)


def test_readers_on_other_hosts_are_counted_unless_trainers_broadcast() -> None:
    def source(place: str, link: Any) -> Source:
        return Source(0, Offer(place, 1, 1, 8, (0, 0), 8, 1, link), (), "float32", 8)

    class Link:
        meets = ""

    class Sends:
        meets = "node1:26700"

    keys, places = WeightSyncSection(), ["a", "b", "b", "c", "d"]
    assert Relays.settled(keys, [[source("a", Link())]], places)
    assert not Relays.settled(keys, [[source("a", Link()), source("b", Link())]], places)
    assert not Relays.settled(keys, [[source("a", Sends())]], places)
    assert not Relays.settled(keys, [[source("a", None)]], places)
    assert not Relays.settled(keys, [[]], places)


class FakeReplica:
    def __init__(self, name: str, memory: int, *digests: int) -> None:
        self.name, self.tp, self.memory = name, max(1, len(digests)), ("here", memory)
        copy = HostCopy("here", 1, 1, memory)
        offers = [RelayOffer(digest, 1, EMPTY, ()) for digest in digests]
        self.connections = [Connection(["a link"], copy, relay=offer) for offer in offers]


def cost(names: Any, unreached: Any = (), relayed: int = 1) -> SyncStats:
    why = tuple(f"{name} failed" for name in unreached)
    return SyncStats(
        1, relayed=relayed, engines=dict.fromkeys(names, EngineStats()), fell_back=why, unreached=tuple(unreached)
    )


def before(relays: Relays, replicas: list[Any]) -> dict[str, str]:
    kept: list[Replica] = replicas
    return {name: note[0].name for name, note in relays.notes(kept, 1).replicas.items()}


def test_offers_are_sent_once_per_epoch_and_again_to_a_replica_that_was_replaced() -> None:
    relays, replicas = Relays(), [FakeReplica(f"g{i}", i, 7, 8) for i in range(4)]
    shares = FakeReplica("g9", 3, 7, 8)
    everyone: list[Any] = [*replicas, shares]
    notes = relays.notes(everyone, 1)
    assert {name: note[0].name for name, note in notes.replicas.items()} == {"g1": "g0", "g2": "g1", "g3": "g2"}
    assert [note.offer for note in notes.replicas["g2"]] == [c.relay for c in replicas[1].connections]
    patience = [notes.replicas[f"g{i}"][0].patience for i in (1, 2, 3)]
    assert patience == sorted(set(patience)), "the first host of a chain changes over first"
    assert relays.pulled(notes, cost(["g0", "g1", "g3"])) == ""
    again = relays.notes(everyone, 1)
    assert [[note.offer is None for note in each] for each in again.replicas.values()] == [
        [True] * 2,
        [False] * 2,
        [True] * 2,
    ]
    relays.pulled(again, cost(["g0", "g1", "g2", "g3"], relayed=0))
    assert relays.notes(everyone, 1).replicas["g2"][0].offer is not None, "its note may not have been sent"
    everyone[3] = FakeReplica("g3", 5, 7, 8)
    later = relays.notes(everyone, 1)
    assert later.replicas["g3"][0].offer is replicas[2].connections[0].relay
    assert later.replicas["g9"][0].offer is everyone[3].connections[0].relay


def test_a_host_that_failed_another_is_followed_by_none_until_it_is_replaced() -> None:
    relays: Relays = Relays()
    replicas: list[Any] = [FakeReplica(f"g{i}", i, 7) for i in range(4)]
    names = [replica.name for replica in replicas]
    notes = relays.notes(replicas, 1)
    warning = relays.pulled(notes, cost(names, ["g2", "g3"]))
    assert warning == "2 host(s) read from the trainers, as the host before failed; g2 failed"
    assert before(relays, replicas) == {"g2": "g0", "g3": "g2", "g1": "g3"}, "g3 had it from g2, which had it from g1"
    replicas[1] = FakeReplica("g1", 11, 7)
    assert before(relays, replicas) == {"g1": "g0", "g2": "g1", "g3": "g2"}
    del replicas[0]
    assert before(relays, replicas) == {"g2": "g1", "g3": "g2"}


def test_only_readers_of_the_same_runs_follow_each_other() -> None:
    relays: Relays = Relays()
    replicas: list[Any] = [FakeReplica(f"g{i}", i, *([7] if i % 2 else [8])) for i in range(5)]
    replicas.append(FakeReplica("none", 9))
    assert before(relays, replicas) == {"g2": "g0", "g4": "g2", "g3": "g1"}
