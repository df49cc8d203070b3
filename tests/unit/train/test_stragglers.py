"""Who is named as slow, and how often."""

from collections.abc import Mapping, Sequence
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from support.operations import instructions
from titan_rl.train.stragglers import Stragglers

FACTOR, STEPS = 2.0, 3
TIMES = st.sampled_from([0.0, 0.9, 1.0, 1.9, 2.1, 5.0, float("nan")])


def watched(history: Sequence[Mapping[str, float]], factor: float = FACTOR, steps: int = STEPS) -> list[list[str]]:
    """Return the stragglers that each step names."""
    watch = Stragglers(factor, steps)
    return [names(watch.seen(step, seconds)) for step, seconds in enumerate(history, 1)]


def names(sentences: Sequence[str]) -> list[str]:
    return [sentence.partition(" ")[0] for sentence in sentences]


def slow(step: Mapping[str, float], name: str) -> bool:
    others = [value for other, value in step.items() if other != name and value > 0]
    return name in step and bool(others) and step[name] > FACTOR * median(others)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), TIMES), max_size=30), st.integers(0, 4))
def test_a_rank_is_named_exactly_when_it_has_been_slow_for_the_given_number_of_steps(
    history: list[dict[str, float]], steps: int
) -> None:
    for step, stragglers in enumerate(watched(history, steps=steps)):
        for name in "abcd":
            run = 0
            while run <= step and slow(history[step - run], name):
                run += 1
            assert (name in stragglers) == (run == steps > 0)


@given(st.lists(st.floats(1, 1.9), min_size=1, max_size=8), st.floats(4, 100), st.integers(2, 10))
def test_one_much_slower_rank_is_named_once_and_its_peers_never(
    peers: list[float], straggler: float, steps: int
) -> None:
    step = {"slow": straggler, **{f"peer{i}": value for i, value in enumerate(peers)}}
    named = watched([step] * (3 * steps), steps=steps)
    assert [name for names in named for name in names] == ["slow"]
    assert named[steps - 1] == ["slow"]


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), TIMES), max_size=12), st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter(history: list[dict[str, float]], unit: float) -> None:
    exact = 2.0 ** round(unit).bit_length()  # a float's product with it is exact
    scaled = [{name: value * exact for name, value in step.items()} for step in history]
    assert watched(scaled) == watched(history)


def test_of_two_peers_the_median_of_the_others_is_the_other() -> None:
    assert watched([{"a": 1.0, "b": 2.5}] * 3) == [[], [], ["b"]]
    assert watched([{"a": 1.0, "b": 1.9}] * 9) == [[]] * 9


def test_steps_that_do_not_follow_each_other_are_not_in_a_row() -> None:
    """After a rewind, or where a step was not measured."""
    watch, bad = Stragglers(FACTOR, STEPS), {"a": 1.0, "b": 9.0}
    assert [names(watch.seen(step, bad)) for step in (4, 5, 4, 5, 7, 8, 9)] == [[], [], [], [], [], [], ["b"]]


def test_a_replica_that_is_replaced_begins_anew_and_one_alone_is_nobodys_peer() -> None:
    both, alone = {"a": 1.0, "b": 9.0}, {"a": 1.0}
    assert watched([both, both, alone, both, both, both]) == [[], [], [], [], [], ["b"]]
    assert watched([{"b": 9.0}] * 9) == [[]] * 9
    assert watched([{"a": 0.0, "b": 9.0}] * 9) == [[]] * 9


def test_the_message_has_the_times_and_the_key_that_sets_the_limit() -> None:
    watch = Stragglers(2.0, 1)
    (sentence,) = watch.seen(41, {"generator0": 0.011, "generator1": 0.013, "generator2": 0.0468})
    assert sentence == (
        "generator2 is a straggler: 0.0468 s where its peers' median is 0.012 s (3.9 times), "
        "1 steps in a row up to step 41"
    )


def test_a_rank_costs_the_same_among_many() -> None:
    """Instructions are counted, not seconds."""

    def step(ranks: int) -> float:
        seconds = {f"trainer[dp={i}]": 1.0 + i % 7 for i in range(ranks)}
        return instructions(lambda: Stragglers(FACTOR, STEPS).seen(1, seconds), "train/stragglers.py") / ranks

    assert step(256) < 1.2 * step(64)
