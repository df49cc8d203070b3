import pickle
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.wire.kept_sets import KeptSets, packed, size_of
from titan_rl.wire.manifest import Manifest, PickledOnce, Publication
from titan_rl.wire.types import Branch, Completion, Rollout, Sample, Turn


def test_a_sample_with_more_columns_keeps_everything_else() -> None:
    routes = np.zeros((2, 1, 1), np.uint8)
    sample = Sample([5, 2], [0, 1], {"behaviour": [0.0, -0.1]}, prompt=1, sequence=7, routes=routes)
    found = sample.with_columns(advantage=[0.0, 0.5])
    assert found.columns == {"behaviour": [0.0, -0.1], "advantage": [0.0, 0.5]}
    assert replace(found, columns=sample.columns) == sample


VOCABULARY = 300  # an id takes 4 bytes, a mask 44


@st.composite
def masks(draw: st.DrawFn) -> list[np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shares = draw(st.lists(st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]), max_size=12))
    found = [rng.random(VOCABULARY) < share for share in shares]
    for kept in found:
        kept[rng.integers(VOCABULARY)] = True  # the sampled token
    return found


@given(masks(), st.integers(0, 2**32))
def test_sets_come_back_in_any_order(found: list[np.ndarray], seed: int) -> None:
    sets = [packed(kept) for kept in found]
    order = np.random.default_rng(seed).integers(len(found), size=2 * len(found)) if found else []
    counts, ids = KeptSets.of(sets).take(np.array(order, np.int64)).ids()
    ends = counts.cumsum()
    for i, number in enumerate(order):
        wanted = np.flatnonzero(found[number])
        own = ids[ends[i] - counts[i] : ends[i]].tolist()
        assert own == ([] if len(wanted) == VOCABULARY else wanted.tolist())
        assert size_of(sets[number]) == (0 if len(wanted) == VOCABULARY else len(wanted))


def test_a_set_takes_what_is_shorter_ids_or_a_mask_and_nothing_if_whole() -> None:
    kept = np.zeros(VOCABULARY, bool)
    kept[[3, 299]] = True
    assert len(packed(kept)) == 8
    kept[:200] = True
    assert len(packed(kept)) == 4 + 40  # a marker, and 300 bits in whole words
    assert packed(np.ones(VOCABULARY, bool)) == b""


def test_a_branch_has_the_sets_of_its_sampled_tokens_only() -> None:
    first = Turn([1, 2], Completion([5], [-0.5], [0], "stop", kept=[packed(np.arange(9) == 5)]))
    second = Turn([3], Completion([6, 7], [-0.5] * 2, [0] * 2, "stop", kept=[b"", packed(np.arange(9) > 6)]), index=1)
    branch = Branch([first, second])
    assert branch.kept is not None
    counts, ids = branch.kept.ids()
    assert (counts.tolist(), ids.tolist()) == ([0, 0, 1, 0, 0, 2], [5, 7, 8])
    assert Branch([Turn([1], Completion([5], [-0.5], [0], "stop"))]).kept is None
    assert Rollout([branch], "", 1.0).completion.kept == [*first.completion.kept, *second.completion.kept]


def test_a_list_is_pickled_once_and_arrives_plain() -> None:
    pickled: list[int] = []

    class Noted:
        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append(1)
            return str, ("noted",)

    shared = PickledOnce([Noted(), Noted()])
    for _ in range(5):
        arrived = pickle.loads(pickle.dumps(("connect", shared)))[1]
        assert type(arrived) is list
        assert arrived == ["noted", "noted"]
    assert len(pickled) == 2


def test_a_readers_manifests_are_in_the_order_of_the_trainer_ranks() -> None:
    packed = [{reader: Manifest.of(3, 1, 0, rank, ()) for reader in range(2)} for rank in range(4)]
    assert Publication(3, 0, packed, 0.0).of(1) == [runs[1] for runs in packed]
