"""The nodes that mix sources: their draws depend on the seed, the sizes and the weights alone, from any state on."""

import json
from itertools import accumulate, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.actors.source_mixture import decoded, encoded, mixture

SOURCES = st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(SOURCES, st.integers(0, 2**62), st.integers(0, 2200))
def test_any_state_continues_and_each_epoch_of_a_source_has_all_of_its_rows(
    drawn: list[tuple[int, float]], seed: int, place: int
) -> None:
    sources = [(f"source{i}", size, weight) for i, (size, weight) in enumerate(drawn)]
    node = mixture(sources, seed)
    rows = list(islice(node, place))
    state = json.dumps(encoded(node.state_dict()))
    rest = list(islice(node, 300))
    again = mixture(sources, seed)
    again.reset(decoded(json.loads(state)))
    assert list(islice(again, 300)) == rest
    assert list(islice(mixture(sources, seed), place)) == rows

    ends = list(accumulate(size for size, _ in drawn))
    for (size, _), end in zip(drawn, ends, strict=True):
        own = [row for row in [*rows, *rest] if end - size <= row < end]
        for first in range(0, len(own) - size + 1, size):
            assert sorted(own[first : first + size]) == list(range(end - size, end))


def test_weights_are_shares_whatever_the_sizes() -> None:
    rows = list(islice(mixture([("small", 10, 3.0), ("large", 1000, 1.0)], 7), 8000))
    assert abs(sum(row < 10 for row in rows) / 8000 - 0.75) < 0.02


def test_a_source_may_have_any_name_that_a_table_may_have() -> None:
    node = mixture([("place", 3, 1.0), ("tensor", 3, 1.0)], 7)
    next(node)
    again = mixture([("place", 3, 1.0), ("tensor", 3, 1.0)], 7)
    again.reset(decoded(json.loads(json.dumps(encoded(node.state_dict())))))
    assert list(islice(again, 20)) == list(islice(node, 20))
