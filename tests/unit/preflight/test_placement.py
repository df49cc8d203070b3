"""Which host and which slot each rank gets, and the refusals."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.config.toml import find, load
from titan_rl.ext.run_plan.tables import ROOM, after_loss, host_rows
from titan_rl.preflight.checks import problems
from titan_rl.preflight.placement import (
    Share,
    Unplaceable,
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
    assert host_rows(run, place(run, 16), 16) == [
        ("host0", "generator0", "1 of 16"),
        ("host1", "generator1", "1 of 16"),
        ("host2", "trainer 0-1", "2 of 16"),
        ("host3", "trainer 2-3, generator2", "3 of 16"),
    ]


def test_hosts_that_are_alike_are_one_row() -> None:
    run = config(
        hosts__count=128,
        hosts__slots=8,
        parallelism__data_parallel_shard_degree=64,
        parallelism__tensor_parallel_degree=8,
        generator__replicas=120,
        generator__tensor_parallel_degree=4,
        environment__name="calc",
        environment__processes=256,
    )
    assert host_rows(run, place(run, 8), 8) == [
        ("host0 to host63", "trainer 0-511, 8 on each; 2 environments", "8 of 8 each"),
        ("host64 to host123", "generators 0-119 of 4 ranks, 2 on each; 2 environments", "8 of 8 each"),
        ("host124 to host127", "2 environments", "0 of 8 each"),
    ]
    run = config(hosts__count=3, generator__replicas=6, placement__hosts='{trainer = "1", generator = "0,2"}')
    assert host_rows(run, place(run, 16), 16) == [
        ("host0", "generator0, generator2, generator4", "3 of 16"),
        ("host1", "trainer 0-1", "2 of 16"),
        ("host2", "generator1, generator3, generator5", "3 of 16"),
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


def test_a_trainer_moves_with_as_many_rows_as_there_is_room_for() -> None:
    keys = {"parallelism__data_parallel_shard_degree": 3, "parallelism__tensor_parallel_degree": 2}
    run = config(hosts__count=3, hosts__slots=3, generator__replicas=2, fault__min_trainers=1, **keys)
    placed = place(run, 3)
    assert [placed["generator0"], placed["generator1"]] == [[Share(0, (2,))], [Share(1, (2,))]]
    assert place_again(run, "trainer", placed, 3, [0]) == [Share(1, (0, 1)), Share(2, (0, 1))]
    assert place_again(run, "trainer", placed, 3, [0, 2]) == [Share(1, (0, 1))]
    with pytest.raises(Unplaceable, match="expected 2 more free slots on the other hosts, of 3 each"):
        place_again(run, "trainer", placed, 3, [0, 1, 2])
    shrunk = {**placed, "trainer": [Share(1, (0, 1))]}
    assert place_again(run, "trainer", shrunk, 3, []) == placed["trainer"], "there is room again"
    with pytest.raises(Unplaceable, match="expected 1 more free slots"):
        place_again(run, "generator0", placed, 2, [0, 2])


def test_colocated_meshes_move_together() -> None:
    """Each of three hosts has a slot of two that a colocated pair takes; host 0 is lost."""
    run = config(hosts__count=3, hosts__slots=1, generator__replicas=2, placement__kind="colocated")
    placed = place(run, 1)
    assert place_again(run, "trainer", placed, 1, [0]) == [Share(1, (0,)), Share(2, (0,))]
    assert place_again(run, "generator0", placed, 1, [0]) == [Share(2, (0,))]
    with pytest.raises(Unplaceable, match="expected 1 more free slots on the other hosts, of 1 each"):
        place_again(run, "generator0", placed, 1, [0, 2])
    fewer = config(
        hosts__count=3, hosts__slots=1, generator__replicas=2, placement__kind="colocated", fault__min_trainers=1
    )
    assert place_again(fewer, "trainer", placed, 1, [0, 2]) == [Share(1, (0,))]


COLOCATED = {"hosts__slots": 1, "generator__replicas": 2, "placement__kind": "colocated"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hosts__count": 3, "hosts__slots": 2}, ROOM),
        ({"hosts__count": 3, **COLOCATED}, ROOM),
        (
            {"hosts__count": 2, **COLOCATED},
            "without host0: the run ends, resumable: no room for trainer (it needs a spare host or fault.min_trainers)",
        ),
        (
            {"hosts__count": 2, **COLOCATED, "fault__min_trainers": 1},
            "without host0: the trainer has 1 of 2 dp rows until there is room, no generator0 until there is room",
        ),
        (
            {"hosts__count": 3, "hosts__slots": 1},
            "without host0: the run ends, resumable: no room for trainer "
            "(it needs a spare host or fault.min_trainers); "
            "without host2: the run ends, resumable: no room for generator0 (it needs a spare host)",
        ),
        (
            {"hosts__count": 4, "hosts__slots": 2, "placement__hosts": '{trainer = "0-1", generator = "2"}'},
            ROOM,
        ),
        (
            {"hosts__count": 3, "hosts__slots": 2, "generator__replicas": 3, "fault__min_replicas": 2}
            | {"placement__hosts": '{trainer = "0", generator = "1-2"}'},
            "without host0: the run ends, resumable: no room for trainer "
            "(it needs a spare host or fault.min_trainers); "
            "without host1: no generator2 until there is room; without host2: no generator1 until there is room",
        ),
        ({"hosts__count": 2, "fault__max_restarts": 0}, "the run ends, resumable: fault.max_restarts = 0"),
    ],
)
def test_the_plan_says_what_the_loss_of_a_host_comes_to(keys: dict[str, object], expected: str) -> None:
    run = config(**keys)
    assert after_loss(run, place(run, slots := slots_per_host(run, 0)), slots) == expected


def test_a_colocated_mesh_takes_slots_that_it_can_share_first() -> None:
    run = config(hosts__count=3, hosts__slots=4, generator__replicas=2, placement__kind="colocated")
    moved = {"trainer": [Share(2, (2, 3))], "generator0": [Share(0, (0,))], "generator1": [Share(2, (2,))]}
    assert place_again(run, "generator0", moved, 4, [0]) == [Share(2, (3,))], "next to a trainer, not on host 1"
    moved = {"trainer": [Share(0, (0, 1))], "generator0": [Share(1, (2,))], "generator1": [Share(1, (3,))]}
    assert place_again(run, "trainer", moved, 4, [0]) == [Share(1, (2, 3))]
    apart = config(hosts__count=3, hosts__slots=4, generator__replicas=2)
    assert place_again(apart, "trainer", moved, 4, [0]) == [Share(1, (0, 1))]


@pytest.mark.parametrize(
    ("replicate", "shard", "rows", "then"),
    [(1, 4, 3, (1, 3)), (2, 2, 2, (1, 2)), (3, 2, 4, (2, 2)), (2, 4, 5, (1, 5)), (2, 2, 1, (1, 1))],
)
def test_fewer_rows_keep_whole_copies_of_the_weights(
    replicate: int, shard: int, rows: int, then: tuple[int, int]
) -> None:
    full = ParallelismSection(data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)
    fewer = full.of_rows(rows)
    assert (fewer.data_parallel_replicate_degree, fewer.data_parallel_shard_degree) == then
    assert full.of_rows(full.dp) == full


def test_ranks_that_share_rows_share_a_host() -> None:
    degrees = {"data_parallel_shard_degree": 3, "context_parallel_degree": 2, "tensor_parallel_degree": 2}
    run = config(hosts__count=4, hosts__slots=6, **{f"parallelism__{key}": n for key, n in degrees.items()})
    assert [(share.host, len(share.slots)) for share in place(run, 6)["trainer"]] == [(0, 4), (1, 4), (2, 4)]
    assert run.parallelism.of_rows(2).world_size == 8


def test_no_more_trainers_are_demanded_than_there_are() -> None:
    (problem,) = [p for p in problems(config(fault__min_trainers=3)) if "min_trainers" in p]
    assert problem == "fault.min_trainers: expected at most 2, the trainer's dp rows, found 3"


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
            {"hosts__count": 2, "hosts__slots": 2, "generator__replicas": 9},
            "hosts.slots: expected room for 7 more ranks of generator2 to generator8, 1 of them on one host",
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
