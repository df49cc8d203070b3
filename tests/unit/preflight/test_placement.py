"""Which host and which slot each rank gets, and what is refused."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import problems
from titan_rl.preflight.placement import (
    Share,
    Unplaceable,
    host_rows,
    most_replicas,
    place,
    place_again,
    slots_per_host,
)
from titan_rl.wire.gpus import Gpus


def config(**keys: object) -> Config:
    flags = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load(find("grpo_llama"), [("hosts.kind", "processes"), *flags])


def dealt(run: Config, slots: int) -> dict[str, list[tuple[int, int]]]:
    """Return (host, slot) of each rank."""
    return {
        mesh: [(share.host, slot) for share in shares for slot in share.slots]
        for mesh, shares in place(run, slots).items()
    }


def test_meshes_fill_hosts_in_order_and_no_unit_is_cut() -> None:
    run = config(
        hosts__count=3,
        parallelism__data_parallel_shard_degree=3,
        parallelism__tensor_parallel_degree=2,
        generator__tensor_parallel_degree=4,
    )
    found = dealt(run, 5)
    assert found["trainer"] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]  # the last slot of host 0 is too few
    assert found["generator0"] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert most_replicas(run, 5) == 1, "three slots are left on host 1, one on each other"


def test_roles_go_where_placement_hosts_says() -> None:
    run = config(
        hosts__count=4,
        generator__replicas=3,
        parallelism__data_parallel_shard_degree=4,
        placement__hosts='{trainer = "2-3", generator = "0-1,3"}',
    )
    found = dealt(run, slots_per_host(run, 0))
    assert found["trainer"] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert [found[f"generator{i}"] for i in range(3)] == [[(0, 0)], [(1, 0)], [(3, 2)]]
    assert host_rows(run, 16) == [
        ("host0", "generator0", "1 of 16"),
        ("host1", "generator1", "1 of 16"),
        ("host2", "trainer 0-1", "2 of 16"),
        ("host3", "trainer 2-3, generator2", "3 of 16"),
    ]


def test_colocated_generators_have_the_slots_of_the_trainer() -> None:
    run = config(
        hosts__count=2, generator__replicas=4, parallelism__data_parallel_shard_degree=4, placement__kind="colocated"
    )
    found = dealt(run, 2)
    assert [found[f"generator{i}"][0] for i in range(4)] == found["trainer"] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert most_replicas(run, 2) == 4


def test_a_mesh_moves_to_free_slots_of_the_hosts_that_are_left() -> None:
    run = config(hosts__count=3, parallelism__data_parallel_shard_degree=4, generator__replicas=2)
    placed = place(run, 4)
    assert dealt(run, 4)["trainer"] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert place_again(run, "trainer", placed, 4, [0]) == [Share(1, (2, 3)), Share(2, (0, 1))]
    assert place_again(run, "generator0", placed, 4, [1]) == [Share(2, (0,))]
    with pytest.raises(Unplaceable, match="expected 2 more free slots on the other hosts, of 4 each"):
        place_again(run, "trainer", placed, 4, [0, 2])


def test_ranks_on_cpus_are_shared_out_and_gpus_divided() -> None:
    run = config(hosts__count=3, generator__replicas=4)
    assert slots_per_host(run, 0) == 2
    assert [host for host, _ in chain(*dealt(run, 2).values())] == [0, 0, 1, 1, 2, 2]
    assert slots_per_host(run, 6) == 2, "three hosts on a machine of six GPUs"
    assert most_replicas(run, 3) == 7


@given(
    hosts=st.integers(1, 5),
    slots=st.integers(1, 6),
    dp=st.integers(1, 6),
    tp=st.integers(1, 4),
    replicas=st.integers(1, 5),
    engine=st.integers(1, 4),
)
def test_every_rank_has_a_slot_of_its_own_and_every_unit_one_host(
    hosts: int, slots: int, dp: int, tp: int, replicas: int, engine: int
) -> None:
    run = config(
        hosts__count=hosts,
        parallelism__data_parallel_shard_degree=dp,
        parallelism__tensor_parallel_degree=tp,
        generator__replicas=replicas,
        generator__tensor_parallel_degree=engine,
    )
    try:
        found = dealt(run, slots)
    except Unplaceable:
        assert dp * tp + replicas * engine > hosts * (slots - max(tp, engine) + 1) or max(tp, engine) > slots
        return
    seats = list(chain(*found.values()))
    assert len(set(seats)) == len(seats) == dp * tp + replicas * engine
    assert all(host < hosts and slot < slots for host, slot in seats)
    assert found["trainer"] == sorted(found["trainer"])
    units = [found["trainer"][row * tp : (row + 1) * tp] for row in range(dp)]
    units += [found[f"generator{i}"] for i in range(replicas)]
    assert all(len({host for host, _ in unit}) == 1 for unit in units)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hosts__kind": "local", "hosts__count": 2}, 'hosts.count: expected 1 with hosts.kind = "local", found 2'),
        ({"hosts__count": 65}, "hosts.count: expected at most 64"),
        ({"hosts__addresses": "a"}, 'hosts.addresses: expected none with hosts.kind = "processes", found ["a"]'),
        (
            {"hosts__count": 2, "hosts__slots": 1},
            "hosts.slots: expected room for 1 more ranks of generator0, 1 of them on one host, found 2 hosts of 1",
        ),
        (
            {"hosts__count": 2, "placement__hosts": '{trainers = "0"}'},
            'placement.hosts: expected roles of this run (trainer, generator), found "trainers"',
        ),
        (
            {"hosts__count": 2, "placement__hosts": '{trainer = "0-2"}'},
            'placement.hosts: expected each of the hosts 0 to 1 once for trainer, found "0-2"',
        ),
        ({"hosts__count": 2, "placement__hosts": '{trainer = "all"}'}, 'found "all"'),
        (
            {"hosts__count": 2, "hosts__slots": 1, "placement__hosts": '{trainer = "1"}'},
            "found host 1 (placement.hosts) of 1 slots",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(keys: dict[str, object], expected: str) -> None:
    (problem,) = problems(config(**keys))
    assert expected in problem


def test_hosts_of_gpus_are_counted_each() -> None:
    run = config(hosts__count=2, generator__replicas=3)
    assert not [problem for problem in problems(run, gpus=Gpus(6)) if "hosts." in problem]
    assert "hosts.slots: expected room for" in "".join(problems(run, gpus=Gpus(4)))
