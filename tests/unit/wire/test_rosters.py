"""Rosters: every process of a broadcast finds its groups, and none waits in a ring."""

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.wire.rosters import Roster


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
