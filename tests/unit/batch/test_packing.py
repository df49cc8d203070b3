import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import (
    AGGREGATIONS,
    PAD,
    expected,
    fill,
    microbatches,
    pairs_up_to,
    places,
    random_sample,
    sample,
    samples_up_to,
    shapes,
    weights,
    weights_of,
)
from titan_rl.batch.packing import ALIGN, Aggregation, UpTo, Weighting, pack, unpack
from titan_rl.wire.types import Sample


@given(shapes())
def test_every_place_arrives_once_and_the_rest_is_padding(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    packed = [place for rows in microbatches(batches) for place in places(rows)]
    real = [place for place in packed if place[0] != PAD]
    assert Counter(real) == Counter(expected(samples))
    assert all(place[2:] == (PAD, 0.0, 0.0, 0.0) for place in packed if place[0] == PAD)
    trained = sum(place[3] for place in real)
    assert all(batch.tokens == max(trained, 1) for batch in batches)


@given(shapes())
def test_microbatches_that_may_be_smaller_have_no_more_rows_than_needed(
    case: tuple[int, int, int, list[Sample]],
) -> None:
    shards, seq_len, most, samples = case
    full = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=most, pad_id=PAD)
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=UpTo(most), pad_id=PAD)
    packed = [place for rows in microbatches(batches) for place in places(rows)]
    assert Counter(place for place in packed if place[0] != PAD) == Counter(expected(samples))
    rounds, rows = len(batches[0].microbatches), len(batches[0].microbatches[0].tokens)
    assert {len(batch.microbatches) for batch in batches} == {len(full[0].microbatches)} == {rounds}
    assert rows <= most
    one_row = pack(samples, shards=1, seq_len=seq_len, rows_per_microbatch=1, pad_id=PAD)
    assert rows == -(-len(one_row[0].microbatches) // (shards * rounds))


@given(shapes())
def test_all_microbatches_have_one_shape(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    assert len(batches) == shards
    assert len({len(batch.microbatches) for batch in batches}) == 1
    (shape,) = {
        array.shape
        for rows in microbatches(batches)
        for array in (rows.tokens, rows.mask, rows.positions, rows.weights, rows.sequences, *rows.columns.values())
    }
    assert shape[0] == rows_per_microbatch
    assert shape[1] <= seq_len
    assert shape[1] % ALIGN == 0 or shape[1] == seq_len


@given(shapes())
def test_documents_are_whole_and_padding_is_its_own(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    documents = Counter[tuple[int, ...]]()
    for rows in microbatches(batches):
        for tokens, positions in zip(rows.tokens, rows.positions, strict=True):
            starts = np.flatnonzero(positions == 0)
            assert starts[0] == 0
            for document, position in zip(np.split(tokens, starts[1:]), np.split(positions, starts[1:]), strict=True):
                assert position.tolist() == list(range(len(document)))
                assert PAD not in document or set(document.tolist()) == {PAD}
                documents[tuple(document.tolist())] += PAD not in document
    assert +documents == Counter(tuple(s.tokens[:-1]) for s in samples if len(s.tokens) > 1)


@given(shapes())
def test_every_place_knows_its_sequence_and_every_sequence_its_sample(
    case: tuple[int, int, int, list[Sample]],
) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    for rows in microbatches(batches):
        assert ((rows.sequences == -1) == (rows.tokens == PAD)).all()
        assert np.unique(rows.sequences[rows.sequences >= 0]).tolist() == list(range(len(rows.samples)))
        for sequence, owner in enumerate(rows.samples.tolist()):
            assert rows.tokens[rows.sequences == sequence].tolist() == samples[owner].tokens[:-1]
    packed = sorted(int(owner) for rows in microbatches(batches) for owner in rows.samples)
    assert packed == [i for i, s in enumerate(samples) if len(s.tokens) > 1]


@given(shapes())
def test_answers_come_back_to_their_tokens(case: tuple[int, int, int, list[Sample]]) -> None:
    """Whatever the layout: every place answers with the advantage that it was packed with."""
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    # Padding answers too, with something that must reach no sample.
    answers = [[np.where(r.sequences < 0, 7e7, r.columns.get("advantage", 0)) for r in b.microbatches] for b in batches]
    got = unpack(batches, answers, samples)
    for s, values in zip(samples, got, strict=True):
        assert values.dtype == np.float32
        assert values.tolist() == [0.0, *np.asarray(s.columns["advantage"])[1:].tolist()][: len(s.tokens)]


@given(samples_up_to(33))
def test_packing_is_deterministic(samples: list[Sample]) -> None:
    one, two = (pack(samples, shards=2, seq_len=64, rows_per_microbatch=2, pad_id=PAD) for _ in range(2))
    assert [list(places(rows)) for rows in microbatches(one)] == [list(places(rows)) for rows in microbatches(two)]


@given(
    samples_up_to(33),
    st.sampled_from(AGGREGATIONS),
    *[st.tuples(st.integers(1, 4), st.integers(33, 99), st.integers(1, 4))] * 2,
)
def test_a_weighted_sum_does_not_depend_on_the_layout(
    samples: list[Sample], aggregation: Aggregation, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    """One process, FSDP2 and any microbatch size have the same loss: sum of weight x value over everything."""
    sums = []
    for shards, seq_len, rows in (one, other):
        how = {"weighting": Weighting(aggregation, 20), "pad_id": PAD}
        batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows, **how)
        sums.append(
            math.fsum(
                float((r.weights.astype(np.float64) * r.columns["advantage"]).sum())
                for r in microbatches(batches)
                if r.columns
            )
        )
    assert sums[0] == pytest.approx(sums[1], abs=1e-9)


@pytest.mark.parametrize(
    ("weighting", "by_sample", "by_token"),
    [
        (Weighting("token_mean"), [3 / 8, 5 / 8, 0], [1 / 8]),
        (Weighting("sequence_mean"), [1 / 2, 1 / 2, 0], [1 / 6, 1 / 10]),
        (Weighting("sequence_sum", 9), [3 / (9 * 2), 5 / (9 * 2), 0], [1 / 18]),
    ],
)
def test_trained_tokens_and_sequences_weigh_by_the_aggregation(
    weighting: Weighting, by_sample: list[float], by_token: list[float]
) -> None:
    samples = [sample(4), sample(8, prompt=3), sample(3, prompt=3)]
    batches = pack(samples, shards=2, seq_len=16, rows_per_microbatch=1, pad_id=0, weighting=weighting)
    assert {(batch.tokens, batch.sequences) for batch in batches} == {(3 + 5, 2)}
    assert weights_of(batches, samples) == pytest.approx(by_sample)
    assert set(weights(batches).tolist()) == {0.0, *np.array(by_token, np.float32).tolist()}


@given(shapes(), st.sampled_from(AGGREGATIONS))
def test_only_trained_tokens_have_weight(case: tuple[int, int, int, list[Sample]], aggregation: Aggregation) -> None:
    shards, seq_len, rows, samples = case
    how = {"weighting": Weighting(aggregation, 7), "pad_id": PAD}
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows, **how)
    assert all(((r.weights > 0) == (r.mask > 0)).all() for r in microbatches(batches))
    trained = [sum(s.mask[1:]) for s in samples]
    total = {"token_mean": any(trained), "sequence_mean": any(trained)}.get(
        aggregation, sum(trained) / (7 * max(sum(n > 0 for n in trained), 1))
    )
    assert weights(batches).sum() == pytest.approx(float(total), rel=1e-4)


@given(st.integers(1, 3), st.integers(1, 3), pairs_up_to(40))
def test_a_pair_lies_in_one_row_side_by_side_and_in_order(shards: int, rows: int, samples: list[Sample]) -> None:
    """DPO takes sequences 2k and 2k + 1 of a microbatch for chosen and rejected."""
    batches = pack(samples, shards=shards, seq_len=40, rows_per_microbatch=rows, pad_id=PAD, together=2)
    for r in microbatches(batches):
        for first in (owner for owner in r.samples.tolist() if owner % 2 == 0 and owner + 1 in r.samples):
            at = [np.argwhere(r.sequences == np.flatnonzero(r.samples == owner)[0]) for owner in (first, first + 1)]
            assert {int(row) for places in at for row, _ in places} == {int(at[0][0][0])}
            assert int(at[1][0][1]) == int(at[0][-1][1]) + 1
    owners = [set(r.samples.tolist()) for r in microbatches(batches)]
    pairs = [
        (2 * k, 2 * k + 1) for k in range(len(samples) // 2) if min(len(s.tokens) for s in samples[2 * k :][:2]) > 1
    ]
    assert all(any({chosen, rejected} <= found for found in owners) for chosen, rejected in pairs)


def test_whole_pairs_are_sequences_2k_and_2k_plus_1() -> None:
    samples = [sample(int(n)) for n in np.random.default_rng(0).integers(2, 20, 64)]
    for rows in microbatches(pack(samples, shards=2, seq_len=40, rows_per_microbatch=3, pad_id=PAD, together=2)):
        assert (rows.samples[0::2] % 2 == 0).all()
        assert (rows.samples[1::2] == rows.samples[0::2] + 1).all()


def test_dtypes() -> None:
    (rows,) = microbatches(pack([sample(4)], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0))
    indices = (rows.tokens, rows.positions, rows.targets, rows.sequences, rows.samples)
    assert {str(a.dtype) for a in indices} == {"int64"}
    assert {str(a.dtype) for a in (rows.mask, rows.weights, *rows.columns.values())} == {"float32"}


def test_one_document_by_hand() -> None:
    got = Sample([7, 8, 9], [0, 1, 1], {"behaviour": [0.0, -0.5, -0.25], "advantage": np.array([5.0, 2.0, 3.0])})
    (batch,) = pack([got], shards=1, seq_len=4, rows_per_microbatch=1, pad_id=0)
    (rows,) = batch.microbatches
    assert rows.tokens.tolist() == [[7, 8, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 0, 1]]
    assert rows.targets.tolist() == [[8, 9, 0, 0]]
    assert rows.mask.tolist() == [[1, 1, 0, 0]]
    assert rows.weights.tolist() == [[0.5, 0.5, 0, 0]]
    assert rows.sequences.tolist() == [[0, 0, -1, -1]]
    assert rows.samples.tolist() == [0]
    assert rows.columns["behaviour"].tolist() == [[-0.5, -0.25, 0, 0]]
    assert rows.columns["advantage"].tolist() == [[2, 3, 0, 0]]
    assert (batch.tokens, batch.sequences) == (2, 1)
    assert fill([batch]) == 0.5


def test_rows_are_as_short_as_the_microbatches_allow() -> None:
    """256 additions need 24 rows of 128, so 2 microbatches of 8 on each of 2 shards; in those, 96 places a row do."""
    batches = pack([sample(12)] * 256, shards=2, seq_len=128, rows_per_microbatch=8, pad_id=0)
    assert [[rows.tokens.shape for rows in batch.microbatches] for batch in batches] == [[(8, 96)] * 2] * 2
    assert fill(batches) == 256 * 11 / (32 * 96)


@given(shapes())
def test_shards_differ_by_a_row_at_most(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    loads = [sum(int((rows.tokens != PAD).sum()) for rows in batch.microbatches) for batch in batches]
    assert max(loads) - min(loads) <= batches[0].microbatches[0].tokens.shape[1]


def test_long_mixed_documents_leave_few_places_empty() -> None:
    samples = [sample(int(n)) for n in np.random.default_rng(0).integers(2, 400, 512)]
    assert fill(pack(samples, shards=4, seq_len=1024, rows_per_microbatch=4, pad_id=0)) > 0.95


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_logprob_is_not_trained_on(bad: float) -> None:
    got = Sample([1, 2, 3, 4], [0, 1, 1, 1], {"behaviour": [0.0, -0.5, bad, -0.25]})
    (batch,) = pack([got], shards=1, seq_len=3, rows_per_microbatch=1, pad_id=0)
    (rows,) = batch.microbatches
    assert rows.mask.tolist() == [[1, 0, 1]]
    assert rows.weights.tolist() == [[0.5, 0, 0.5]]
    assert rows.columns["behaviour"].tolist() == [[-0.5, 0, -0.25]]
    assert batch.tokens == 2


def test_a_sequence_whose_every_logprob_is_infinite_is_no_sequence_of_the_mean() -> None:
    samples = [Sample([1, 2], [0, 1], {"behaviour": [0.0, -math.inf]}), sample(3)]
    (batch,) = pack(samples, shards=1, seq_len=8, rows_per_microbatch=1, pad_id=0, weighting=Weighting("sequence_mean"))
    assert batch.sequences == 1
    assert weights_of([batch], samples) == [0, 1]


@pytest.mark.parametrize("samples", [[], [sample(1)], [Sample([1, 2], [0, 0], {"behaviour": [0.0, 0.0]})]])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_train_on_is_a_batch_of_padding(samples: list[Sample], aggregation: Aggregation) -> None:
    batches = pack(samples, shards=2, seq_len=16, rows_per_microbatch=2, pad_id=0, weighting=Weighting(aggregation))
    assert [(batch.tokens, batch.sequences) for batch in batches] == [(1, 1), (1, 1)]
    assert all(r.tokens.shape == (2, 16) and not r.mask.any() and not r.weights.any() for r in microbatches(batches))


def test_a_shard_without_a_document_answers_nothing() -> None:
    """Reward models judge few samples at a time: some ranks of theirs then see padding only."""
    batches = pack([sample(3)], shards=4, seq_len=16, rows_per_microbatch=2, pad_id=0)
    (values,) = unpack(batches, [[np.ones((2, 16), np.float32)]] * 4, [sample(3)])
    assert values.tolist() == [0, 1, 1]


def test_a_sample_that_fits_no_row_is_refused_with_the_numbers() -> None:
    pack([sample(17)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)
    with pytest.raises(ValueError, match=r"sample 1: 18 tokens take 17 places.* 16; set training\.seq_len .*17"):
        pack([sample(2), sample(18)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)


def test_a_pair_that_fits_no_row_is_refused_with_the_numbers() -> None:
    pack([sample(9), sample(9)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0, together=2)
    with pytest.raises(ValueError, match=r"samples 2 to 3: together take 17 places.* 16; set training\.seq_len .*17"):
        pack(
            [sample(2)] * 2 + [sample(9), sample(10)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0, together=2
        )


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a multiple of 2 samples, found 3"):
        pack([sample(2)] * 3, shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0, together=2)


def test_a_sample_of_unequal_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0: expected 2 entries of behaviour, one per token, found 1"):
        pack([Sample([1, 2], [0, 1], {"behaviour": [0.0]})], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)
    with pytest.raises(ValueError, match="sample 0: expected 2 entries of mask, one per token, found 3"):
        pack([Sample([1, 2], [0, 1, 1])], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)


@given(
    samples_up_to(30),
    st.sampled_from(AGGREGATIONS),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.integers(1, 4),
)
def test_a_rollout_of_several_branches_has_the_weight_of_one_sequence(
    samples: list[Sample], aggregation: Aggregation, mesh: tuple[int, int], branches: int
) -> None:
    """Cut every sample's mask into branches of one rollout, on any mesh: the weight of a rollout stays the same,
    and so does each of its tokens."""
    shards, rows = mesh
    how = {"seq_len": 32, "pad_id": PAD, "weighting": Weighting(aggregation, 7)}
    whole = pack(samples, shards=1, rows_per_microbatch=2, **how)
    cut = [
        replace(s, mask=np.where(np.arange(len(s.tokens)) % branches == k, s.mask, 0), sequence=i)
        for i, s in enumerate(samples)
        for k in range(branches)
    ]
    packed = pack(cut, shards=shards, rows_per_microbatch=rows, **how)
    assert {(batch.tokens, batch.sequences) for batch in packed} == {(whole[0].tokens, whole[0].sequences)}
    weight = np.array(weights_of(packed, cut)).reshape(-1, branches).sum(1)
    assert weight == pytest.approx(weights_of(whole, samples), rel=1e-5)
    alone = pack([replace(s, sequence=-1) for s in cut], shards=shards, rows_per_microbatch=rows, **how)
    if aggregation == "token_mean":
        assert weights_of(alone, cut) == pytest.approx(weights_of(packed, cut))


def test_samples_without_side_columns_pack_to_rows_without() -> None:
    rng = np.random.default_rng(0)
    rows = microbatches(pack([random_sample(rng, 9)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=PAD))
    assert rows[0].extras == {}


def test_the_row_that_the_module_draws() -> None:
    def answered(prompt: str, answer: str) -> Sample:
        tokens = [ord(letter) * 10 + i for word in (prompt, answer) for i, letter in enumerate(word)]
        behaviour = {"behaviour": [0.0] * len(tokens)}
        return Sample(tokens, [0] * len(prompt) + [1] * len(answer), behaviour, len(prompt))  # pyright: ignore[reportArgumentType]

    samples = [answered("pppp", "aaa"), answered("pppp", "bb"), answered("pppp", "ccc"), answered("qq", "ddd")]
    (batch,) = pack(samples, shards=1, seq_len=16, rows_per_microbatch=UpTo(1), pad_id=0, share=True)
    (row,) = batch.microbatches

    def named(tokens: np.ndarray) -> str:
        return " ".join(f"{chr(token // 10)}{token % 10}" for token in tokens.tolist() if token)

    assert named(row.tokens[0]) == "p0 p1 p2 p3 a0 a1 b0 c0 c1 q0 q1 d0 d1"
    assert row.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 4, 5, 0, 1, 2, 3, 0, 1, 2]
    predicted = {place: named(row.targets[row.places == place]) for place in range(13)}
    assert [predicted[place] for place in range(3, 9)] == ["a0 b0 c0", "a1", "a2", "b1", "c1", "c2"]
    assert [predicted[place] for place in range(9, 13)] == ["q1", "d0", "d1", "d2"]
    drawn = [[0, 4, 0, 0], [4, 2, 0, 4], [6, 1, 0, 4], [7, 2, 0, 4], [9, 4, 0, 0], [13, 3, 0, 0]]
    assert row.segments.tolist() == drawn
