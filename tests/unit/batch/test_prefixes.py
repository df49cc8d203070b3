"""Samples share equal places, and every trained token still sees the context that it would see alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import AGGREGATIONS, PAD, groups_of, microbatches
from titan_rl.batch.packing import Aggregation, Weighting, pack, unpack
from titan_rl.wire.types import Batch, Rows, Sample

Step = tuple[list[Sample], int, int, int]  # samples, seq_len, shards, rows per microbatch
steps = st.tuples(groups_of(10, 14), st.integers(25, 90), st.integers(1, 3), st.integers(1, 4))


def packed(step: Step, share: bool, together: int = 1, weighting: Aggregation = "token_mean") -> list[Batch]:
    samples, seq_len, shards, rows = step
    return pack(
        samples,
        shards=shards,
        seq_len=seq_len,
        rows_per_microbatch=rows,
        pad_id=PAD,
        together=together,
        weighting=Weighting(weighting),
        share=share,
    )


def computed(batches: list[Batch]) -> int:
    return sum(rows.tokens.size for rows in microbatches(batches))


def grouped(groups: int, members: int, prompt: int, answer: int) -> list[Sample]:
    """Return groups with different prompts."""
    return [
        Sample([9 * g + m for m in range(prompt)] + [m] * answer, [0] * prompt + [1] * answer, {}, prompt)
        for g in range(groups)
        for m in range(members)
    ]


def seen(rows: Rows) -> dict[int, tuple[list[int], list[int]]]:
    """Return the tokens and positions that each place attends to, its own last."""
    tokens, positions = rows.tokens.ravel(), rows.positions.ravel()
    found = {}
    for begin, length, prefix, size in rows.segments.tolist():
        for place in range(begin, begin + length):
            at = [*range(prefix, prefix + size), *range(begin, place + 1)]
            found[place] = tokens[at].tolist(), positions[at].tolist()
    return found


@given(steps)
def test_a_trained_token_sees_its_sample_and_nothing_else(step: Step) -> None:
    samples = step[0]
    trained = []
    for rows in microbatches(packed(step, share=True)):
        attends = seen(rows)
        assert attends.keys() == set(range(rows.tokens.size)), "each place is in one segment"
        assert (np.diff(rows.segments[:, 0]) > 0).all()
        for target in np.flatnonzero(rows.mask).tolist():
            owner = int(rows.samples[rows.sequences.ravel()[target]])
            tokens, positions = attends[int(rows.places.ravel()[target])]
            assert positions == list(range(len(tokens)))
            assert [*tokens, int(rows.targets.ravel()[target])] == list(samples[owner].tokens[: len(tokens) + 1])
            assert rows.columns["advantage"].ravel()[target] == samples[owner].columns["advantage"][len(tokens)]
            trained.append((owner, len(tokens)))
    expected = [(i, t) for i, s in enumerate(samples) for t in np.flatnonzero(s.mask).tolist()]
    assert sorted(trained) == expected


@given(steps, st.sampled_from(AGGREGATIONS))
def test_counts_weights_and_answers_are_those_of_plain_rows(step: Step, weighting: Aggregation) -> None:
    samples = step[0]
    plain, shared = (packed(step, share, weighting=weighting) for share in (False, True))
    assert {(b.tokens, b.sequences) for b in plain} == {(b.tokens, b.sequences) for b in shared}
    assert {b.unshared * len(plain) for b in [*plain, *shared]} == {computed(plain)}
    assert computed(shared) <= computed(plain)
    for ask in (lambda rows: rows.weights, lambda rows: np.where(rows.mask > 0, rows.columns.get("advantage", 0), 0)):
        ours, theirs = (
            unpack(b, [[ask(r) for r in each.microbatches] for each in b], samples) for b in (shared, plain)
        )
        assert [a.tolist() for a in ours] == [a.tolist() for a in theirs]


@given(steps)
def test_the_same_samples_make_the_same_rows(step: Step) -> None:
    one, two = (microbatches(packed(step, share=True)) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert (a.tokens == b.tokens).all()
        assert (a.segments == b.segments).all()
        assert (a.samples == b.samples).all()


def test_rows_by_hand() -> None:
    samples = [Sample([7, 8, 9, *answer], [0, 0, 0, 1, 1], {}, 3) for answer in ([1, 2], [3, 4], [1, 6])]
    (rows,) = microbatches(packed((samples, 6, 1, 1), share=True))
    assert rows.tokens.tolist() == [[7, 8, 9, 1, 3, PAD]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 3, 0]]
    assert rows.segments.tolist() == [[0, 3, 0, 0], [3, 1, 0, 3], [4, 1, 0, 3], [5, 1, 0, 0]]
    assert rows.samples[rows.sequences].tolist() == [[0, 0, 2, 2, 1, 1]]
    assert rows.targets.tolist() == [[1, 2, 1, 6, 3, 4]]
    assert rows.places.tolist() == [[2, 3, 2, 3, 2, 4]]
    assert rows.mask.tolist() == [[1] * 6]


def test_a_row_has_at_most_two_targets_per_place() -> None:
    """Answers of one token take no place, but memory."""
    samples = [Sample([7, 8, 9, 1], [0, 0, 0, 1], {}, 3) for _ in range(100)]
    batches = packed((samples, 16, 1, 1), share=True)
    targets = [int(rows.mask.sum()) for rows in microbatches(batches)]
    assert sum(targets) == 100
    assert max(targets) <= 32
    assert len(targets) == 4


@pytest.mark.parametrize(
    ("samples", "seq_len", "plain", "shared"),
    [
        (grouped(16, 16, 6, 5), 256, 2560, 1152),
        (grouped(1, 32, 200, 30), 2048, 4 * 1840, 1136),
        ([replace(s, tokens=[*s.tokens[:6], *[1] * 5]) for s in grouped(32, 4, 6, 5)], 256, 1280, 384),
    ],
    ids=["additions", "long prompts", "equal answers"],
)
def test_tokens_to_compute(samples: list[Sample], seq_len: int, plain: int, shared: int) -> None:
    rows = 8 if seq_len == 256 else 1
    assert computed(packed((samples, seq_len, 1, rows), share=False)) == plain
    assert computed(packed((samples, seq_len, 1, rows), share=True)) <= shared


def test_keys_are_copied_16_times_at_most() -> None:
    """A prompt of 1,000 tokens with 64 answers of 4 is computed 5 times, not once."""
    batches = packed((grouped(1, 64, 1000, 4), 2048, 1, 1), share=True)
    segments = np.concatenate([rows.segments for rows in microbatches(batches)])
    assert 5 <= np.count_nonzero(segments[:, 1] == 1000) <= 6
    assert segments[:, [1, 3]].sum() <= 16 * segments[:, 1].sum()


def test_equal_prompts_of_several_groups_are_one() -> None:
    first, other = grouped(2, 4, 20, 3)[:4], grouped(2, 4, 20, 3)[4:]
    (rows,) = microbatches(packed(([*first[:2], *other, *first[2:]], 128, 1, 1), share=True))
    prefixes = {(begin, size) for _, _, begin, size in rows.segments.tolist() if size}
    assert len(prefixes) == 2


def test_a_group_larger_than_a_row_is_cut_with_a_prompt_in_each_part() -> None:
    samples = grouped(1, 40, 30, 9)
    batches = packed((samples, 100, 1, 1), share=True)
    assert all(rows.tokens.shape[1] <= 100 for rows in microbatches(batches))
    assert sorted(int(s) for rows in microbatches(batches) for s in rows.samples) == list(range(40))
    assert 2 * computed(batches) < computed(packed((samples, 100, 1, 1), share=False))


def test_one_group_is_spread_over_the_ranks_if_that_is_less_work() -> None:
    samples = grouped(1, 80, 8, 25)
    batches = packed((samples, 2048, 4, 1), share=True)
    loads = [int((rows.tokens != PAD).sum()) for rows in microbatches(batches)]
    assert min(loads) > 0.8 * max(loads)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        grouped(8, 1, 20, 4),
        grouped(4, 4, 0, 4),
        [replace(s, prompt=0) for s in grouped(2, 4, 20, 4)],
        [replace(s, mask=[0, 1, *s.mask[2:]]) for s in grouped(2, 4, 20, 4)],
    ],
    ids=["nothing", "groups of one", "no prompt", "unknown prompts", "trained prompts"],
)
def test_what_cannot_be_shared_is_packed_as_ever(samples: list[Sample]) -> None:
    plain, shared = (microbatches(packed((samples, 64, 2, 2), share)) for share in (False, True))
    for a, b in zip(plain, shared, strict=True):
        assert (a.tokens == b.tokens).all()
        assert a.segments.tolist() == b.segments.tolist()
        assert not a.segments[:, 3].any()


@given(groups_of(10, 14, members=2), st.integers(1, 3), st.integers(1, 3))
def test_pairs_stay_whole_neighbours(samples: list[Sample], shards: int, rows: int) -> None:
    for r in microbatches(packed((samples, 60, shards, rows), share=True, together=2)):
        present = [i for i in r.samples.tolist() if len(samples[i - i % 2].tokens) > 1 < len(samples[i | 1].tokens)]
        assert {i ^ 1 for i in present} == set(present)
        for chosen in (i for i in present if i % 2 == 0):
            at = [np.argwhere(r.sequences == np.searchsorted(r.samples, owner)) for owner in (chosen, chosen + 1)]
            assert {int(row) for places in at for row, _ in places} == {int(at[0][0][0])}
            assert int(at[1][0][1]) == int(at[0][-1][1]) + 1
