"""Rosters: every process of a broadcast finds its groups, and none waits in a ring."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_trainers import FakeTrainers, running
from support.weight_layouts import TINY
from titan_rl.config import sections as c
from titan_rl.ext.broadcast.rosters import Roster, Seat
from titan_rl.wire.weight_source import NO_NOTES, Connection, HostCopy


@given(st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 3)), st.sets(st.sampled_from("abc"), min_size=1)))
def test_processes_that_take_their_groups_in_turn_all_finish(replicas: dict[tuple[int, int], set[str]]) -> None:
    roster = Roster(3, {pair: tuple(sorted(names)) for pair, names in replicas.items()})
    turns = {f"trainer {t}": [seat.pair for seat in roster.of_trainer(t).seats] for t in range(6)}
    for name in roster.names:
        for reader in range(4):
            seats = roster.of_reader(name, reader).seats
            assert all(seat.rank == 1 + roster.replicas[seat.pair].index(name) for seat in seats)
            turns[f"{name} {reader}"] = [seat.pair for seat in seats]
    waiting = dict(turns)
    while any(waiting.values()):
        nexts = [turn[0] for turn in waiting.values() if turn]
        ready = {pair for pair in nexts if nexts.count(pair) == 1 + len(replicas[pair])}
        assert ready, "some group has all of its processes"
        waiting = {who: turn[1:] if turn and turn[0] in ready else turn for who, turn in waiting.items()}


def test_trainer_ranks_begin_with_different_readers() -> None:
    roster = Roster(1, {(t, r): ("a",) for t in range(4) for r in range(4)})
    assert {roster.of_trainer(t).seats[0].peer for t in range(4)} == set(range(4))


@pytest.mark.usefixtures("no_ranks")
async def test_broadcasts_reach_another_roster_after_one_has_failed(tmp_path: Path) -> None:
    """The replica that receives them is another one then, or has another address."""
    trainers, warnings = FakeTrainers(), list[str]()
    mesh, weights, (reader,) = await running(trainers, tmp_path)
    weights._warn = warnings.append
    reader.connects = Connection(["broadcast (gloo)"], HostCopy("here", 1, 1, 1), senders=(0,))
    await weights.connect(c.Config(), TINY)
    for failure in ("", "", "generator0[tp=0]: a socket closed", ""):
        reader.fell_back = failure
        await weights.sync(1)
    assert [notes.trainers and notes.trainers[0].epoch for notes in trainers.notes] == [(), 1, 1, 1, 2]
    assert trainers.notes[-1].trainers[0].seats == (Seat(0, (0, 0), 0, 2),)
    assert trainers.notes[-1].replicas["generator0"][0].seats == (Seat(0, (0, 0), 1, 2),)
    assert [note and note.epoch for note in reader.notes] == [None, 1, 1, 1, 2]
    (warning,) = warnings
    assert warning == (
        "weights of step 1: 1 generator rank(s) read them one-sided, as their broadcast failed; "
        "generator0[tp=0]: a socket closed"
    )
    publication = await weights.publish(2)
    mesh.replicas[0].name = "generator1"  # as if the other one had died since
    await weights.pull(publication)
    assert reader.notes[-1] is None, "its group would wait for the dead one"
    repacked = await weights.publish_again()
    assert repacked is not None
    assert repacked.notes == NO_NOTES
