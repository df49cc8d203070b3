import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.wire.kept_sets import KeptSets, packed, size_of
from titan_rl.wire.manifest import Manifest, PickledOnce, Publication
from titan_rl.wire.types import Branch, Completion, ContextScore, Request, Rollout, Sample, Sampling, Turn


def test_a_completion_crosses_processes_unchanged() -> None:
    sent = Completion([5, 2], [-0.1, float("-inf")], [3, 4], "length", replica="generator1")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert type(arrived) is Completion


@pytest.mark.parametrize("versions", [[3] * 100, [3] * 60 + [4] * 40])
def test_a_long_completion_crosses_processes_unchanged(versions: list[int]) -> None:
    logprobs = [-k / 7 for k in range(98)] + [float("-inf"), -0.0]
    sent = Completion(list(range(2**40, 2**40 + 100)), logprobs, versions, "stop")
    arrived = pickle.loads(pickle.dumps(sent, protocol=5))
    assert arrived == sent
    assert [type(part) for part in (arrived.tokens[0], arrived.logprobs[0], arrived.versions[0])] == [int, float, int]
    assert str(arrived.logprobs[-1]) == "-0.0"


def test_a_request_crosses_processes_unchanged() -> None:
    begun = [Completion([5], [-0.5], [1], "abort")]
    sent = Request("a", [1, 2], [7], Sampling(9, 0.5, 0.9, (3,)), begun, expected=4, affinity=("b",))
    assert pickle.loads(pickle.dumps(sent, protocol=5)) == sent


def test_a_sample_with_more_columns_keeps_everything_else() -> None:
    sample = Sample([5, 2], [0, 1], {"behaviour": [0.0, -0.1]}, prompt=1, sequence=7)
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


def test_completions_and_sampling_cross_processes_with_their_truncation() -> None:
    sampling = Sampling(8, 0.7, 0.9, (2,), top_k=8, min_p=0.05)
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    for length in (2, 100):
        sent = Completion([5] * length, [-0.5] * length, [1] * length, "stop", kept=[b"\5\0\0\0", b""] * (length // 2))
        assert pickle.loads(pickle.dumps(sent)) == sent
        scored = Completion([5] * length, [-0.5] * length, [1] * length, "stop", context=[ContextScore(-1.0, 4, -0.5)])
        assert pickle.loads(pickle.dumps(scored)) == scored
        bare = Completion([5] * length, [-0.5] * length, [1] * length, "stop")
        assert pickle.loads(pickle.dumps(bare)) == bare


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
