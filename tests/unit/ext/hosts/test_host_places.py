"""Where meshes go while hosts are lost and come back."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config.toml import find, load
from titan_rl.ext.hosts.host_places import HostPlaces
from titan_rl.meshes.hosts import Host
from titan_rl.wire.errors import RunError


class Hosts:
    """Three hosts of three slots, with a run of two trainers and two replicas on them."""

    def __init__(self, **keys: object) -> None:
        self.lost: set[int] = set()
        given = {"hosts.kind": "processes", "hosts.count": 3, "hosts.slots": 3, "generator.replicas": 2}
        given |= {"placement.hosts": '{trainer = "0-1"}', "hosts.threads": 1}
        given |= {key.replace("__", "."): value for key, value in keys.items()}
        config = load(find("grpo_llama"), [(key, str(value)) for key, value in given.items()])
        nothing: Any = None
        self.all = [Host(nothing, f"host{n}", lost=lambda n=n: n in self.lost, joined=0.0) for n in range(3)]
        setup: Any = SimpleNamespace(config=config, device="cpu")
        self.rank_places = HostPlaces(setup, self.all)

    def trainer(self) -> list[tuple[str, int]]:
        return [(rank_place.host.name, rank_place.ranks) for rank_place in self.rank_places.of_model("trainer")]

    def replica(self, index: int) -> str:
        return self.rank_places.of_replica(index).host.name

    def elsewhere(self, index: int) -> str:
        return self.rank_places.of_replica(index, elsewhere=True).host.name


def test_no_slot_is_dealt_twice_once_meshes_have_moved() -> None:
    hosts = Hosts()
    assert hosts.trainer() == [("host0", 1), ("host1", 1)]
    assert [hosts.replica(0), hosts.replica(1)] == ["host0", "host0"]
    hosts.lost = {0}
    assert hosts.trainer() == [("host1", 2)]
    assert [hosts.replica(0), hosts.replica(1)] == ["host1", "host2"]
    assert hosts.replica(2) == "host2", "the slot of host1 that was meant for it is the trainer's"
    assert hosts.replica(3) == "host2"
    with pytest.raises(RunError, match="generator4 cannot be started again without host0"):
        hosts.replica(4)
    hosts.lost = set()
    assert hosts.replica(4) == "host0", "it is back"
    assert hosts.trainer() == [("host1", 2)], "a trainer that has moved stays"


def test_a_trainer_with_fewer_rows_gets_the_others_back_when_it_starts_again() -> None:
    hosts = Hosts(hosts__slots=2, fault__min_trainers=1)
    assert [hosts.replica(0), hosts.replica(1)] == ["host0", "host1"]
    hosts.lost = {0, 2}
    assert hosts.trainer() == [("host1", 1)]
    hosts.lost = {2}
    assert hosts.trainer() == [("host0", 1), ("host1", 1)]


def test_a_host_counts_for_more_rows_when_it_has_been_there_for_long_enough() -> None:
    hosts = Hosts(hosts__slots=2, fault__min_trainers=1)
    assert hosts.rank_places.rows() == 2
    hosts.lost = {0, 2}
    assert hosts.trainer() == [("host1", 1)]
    assert hosts.rank_places.rows() == 1
    hosts.lost = {2}
    hosts.all[0] = replace(hosts.all[0], joined=time.monotonic())
    assert hosts.rank_places.rows() == 2
    assert hosts.rank_places.rows(1000) == 1
    hosts.all[0] = replace(hosts.all[0], joined=time.monotonic() - 2000)
    assert hosts.rank_places.rows(1000) == 2
    hosts.lost = {0, 1, 2}
    assert hosts.rank_places.rows() == 0, "nothing is raised: the loss of its host is about to be noticed"


def test_a_host_on_which_the_trainer_did_not_start_is_left_out_until_it_is_joined_anew() -> None:
    hosts = Hosts(hosts__slots=2, fault__min_trainers=1)
    hosts.lost = {0, 2}
    assert hosts.trainer() == [("host1", 1)]
    hosts.lost = {2}
    assert hosts.trainer() == [("host0", 1), ("host1", 1)]
    assert hosts.rank_places.leave_out() == ["host0"]
    assert hosts.rank_places.rows() == 1
    assert hosts.trainer() == [("host1", 1)]
    assert hosts.replica(0) == "host0", "others are started there"
    hosts.all[0] = replace(hosts.all[0], name="host0 anew")
    assert hosts.trainer() == [("host0 anew", 1), ("host1", 1)]
    hosts.lost = {1, 2}
    assert hosts.rank_places.leave_out() == [], "the host that was lost is the reason"


def test_a_replica_goes_round_the_hosts_on_which_it_did_not_start() -> None:
    hosts = Hosts(hosts__slots=2)
    assert (hosts.trainer(), hosts.replica(0), hosts.replica(1)) == ([("host0", 1), ("host1", 1)], "host0", "host1")
    assert [hosts.elsewhere(1), hosts.replica(1)] == ["host2", "host2"], "a later loss leaves it there"
    assert hosts.replica(0) == "host0", "what fails for one replica may serve another"
    assert hosts.elsewhere(1) == "host2", "it has failed on both that have room"
    assert hosts.elsewhere(1) == "host1"
    hosts.lost = {1}
    assert hosts.replica(1) == "host2", "better a host on which it failed than none"


def test_colocated_meshes_of_a_lost_host_share_slots_on_another() -> None:
    hosts = Hosts(placement__kind="colocated", placement__hosts="{}", hosts__slots=1)
    assert (hosts.trainer(), hosts.replica(0), hosts.replica(1)) == ([("host0", 1), ("host1", 1)], "host0", "host1")
    hosts.lost = {0}
    assert hosts.replica(0) == "host2"
    assert hosts.trainer() == [("host1", 1), ("host2", 1)]
    hosts.lost = {0, 1}
    with pytest.raises(RunError, match=r"generator1 cannot be started again without host0, host1: hosts\.slots"):
        hosts.replica(1)
