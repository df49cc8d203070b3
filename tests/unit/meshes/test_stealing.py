"""Stealing in virtual time, and the pace that it is decided by."""

from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.routing_world import MOST, Engine, World, batches, complete, even, fleets, fresh, groups, slots
from titan_rl.actors.vllm.engine import EngineReport
from titan_rl.meshes.stealing import Pace


@given(fleets, batches, st.none() | slots, st.booleans())
def test_no_sample_is_lost_or_answered_twice(
    fleet: list[Engine], batch: list[list[int]], slots: int | None, hints: bool
) -> None:
    requests, lengths = groups(batch, MOST, hints=hints)
    world = World(fresh(fleet), lengths, slots=slots)
    world.run(requests)
    complete(world, requests)
    assert [load[:2] for load in world.routing.loads().values()] == [(0, 0)] * len(fleet)
    if slots is None:
        assert all(len(set(c.versions)) == 1 for cs in world.answers.values() for c in cs), "none has moved"


@given(fleets, even, slots)
def test_stealing_costs_at_most_one_move_where_lengths_are_known(
    fleet: list[Engine], batch: list[list[int]], slots: int
) -> None:
    requests, lengths = groups(batch, MOST, hints=True)
    world, other = World(fresh(fleet), lengths, slots=slots), World(fresh(fleet), lengths, slots=slots, steals=False)
    assert world.run(requests) <= other.run(requests) + world.move_seconds + 1e-9


def test_stealing_shortens_the_makespan_of_uneven_fleets_though_no_length_is_known() -> None:
    ratios = []
    for seed in range(60):
        draw, slots = Random(seed), 64  # room for all: engines are alike with and without
        fleet = [Engine(10 ** draw.uniform(-3, -1), 10 ** draw.uniform(-4, -2)) for _ in range(draw.randint(2, 4))]
        requests, lengths = groups([[draw.randint(1, 200) for _ in range(8)] for _ in range(6)], 200)
        makespans = [World(fresh(fleet), lengths, slots=n).run(requests) for n in (slots, None)]
        ratios.append(makespans[0] / makespans[1])
    assert mean(ratios) < 0.6
    assert max(ratios) < 1.05


@given(fleets, batches, slots, st.floats(0.01, 1), st.floats(1, 30))
def test_a_stopped_replica_delays_only_what_it_alone_holds(
    fleet: list[Engine], batch: list[list[int]], slots: int, stops: float, lasts: float
) -> None:
    requests, lengths = groups(batch, MOST)
    for_ever = World(fresh(fleet, stops, 1e9), lengths, slots=slots)
    for_ever.run(requests, until=80)
    held = {id for id, replica in for_ever.sent if replica == 0}
    assert {request.id for request in requests} - for_ever.answers.keys() <= held

    back = World(fresh(fleet, stops, stops + lasts), lengths, slots=slots)
    back.run(requests)
    complete(back, requests)


def test_what_a_stopped_replica_held_is_stolen_as_soon_as_it_answers() -> None:
    requests, lengths = groups([[200] * 8] * 2, 200)
    fleet = [Engine(0.01, 0.0), Engine(0.01, 0.0)]
    world = World(fresh(fleet, 0.5, 6.0), lengths, slots=8)
    stopped, relieved = world.run(requests), world.routing.loads()[1].stolen
    assert relieved == 8
    assert world.at["r1"] < 2.1  # 200 steps: as if nothing had happened
    assert stopped < 6.0 + 1.6 + 2 * world.move_seconds  # what 150 steps take, and a move
    assert world.answers["r0"][0].versions[-1] == 1


def test_members_of_one_group_spread_when_that_finishes_sooner() -> None:
    requests, lengths = groups([[200] * 8], 200)
    world = World([Engine(0.0, 0.01), Engine(0.0, 0.01)], lengths, slots=8)
    assert world.run(requests) < 0.6 * 200 * 8 * 0.01
    complete(world, requests)
    assert [[c.versions[-1] for c in world.answers["r0"]].count(replica) for replica in (0, 1)] == [4, 4]


def test_nothing_moves_between_engines_that_are_no_faster_with_fewer_samples() -> None:
    requests, lengths = groups([[200] * 8], 200)
    world = World([Engine(0.01, 0.0), Engine(0.01, 0.0)], lengths, slots=8)
    world.run(requests)
    assert world.sent == [("r0", 0)]


@given(st.floats(0.001, 1), st.floats(0.0001, 0.1), st.lists(st.integers(1, 500), min_size=2, max_size=20))
def test_a_pace_is_the_line_through_what_was_measured(a: float, b: float, reads: list[int]) -> None:
    pace, report = Pace(), EngineReport()
    assert pace.line is None
    for read in reads:
        report = EngineReport(report.steps + 1, report.seconds + a + b * read, report.read + read)
        pace.measure(report)
    expected = (a, b) if max(reads) - min(reads) > 0.1 * max(reads) else (a + b * mean(reads), 0.0)
    if len(set(reads)) == 1 or expected == (a, b):
        assert pace.line == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_pace_forgets() -> None:
    pace, seconds = Pace(), 0.0
    for i in range(1, 60):
        seconds += 0.1 if i < 20 else 0.5
        pace.measure(EngineReport(i, seconds, 8 * i))
    assert pace.line == pytest.approx((0.5, 0.0), rel=0.02)
