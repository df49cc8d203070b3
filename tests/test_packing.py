import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.packing import ALIGN, fill, pack, samples_of
from titan_rl.types import Batch, Completion, Group, Prompt, Rollout, Rows, Sample, Turn

PAD = 999  # no sample has this token, so tests can tell padding from documents
Place = tuple[int, int, int, float, float, float]  # token, position, target, mask, log-prob, advantage


@st.composite
def samples_up_to(draw: st.DrawFn, tokens: int) -> list[Sample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(0, tokens), max_size=40))
    samples = []
    for n in sizes:
        mask = rng.integers(0, 2, n)
        logprobs = np.where(mask, -rng.random(n, dtype=np.float32), 0)
        advantage = float(rng.standard_normal(dtype=np.float32))
        samples.append(Sample(rng.integers(0, 50, n).tolist(), mask.tolist(), logprobs.tolist(), advantage))
    return samples


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, list[Sample]]:
    seq_len = draw(st.integers(2, 150))
    return draw(st.integers(1, 4)), seq_len, draw(st.integers(1, 5)), draw(samples_up_to(seq_len + 1))


def expected(samples: Sequence[Sample]) -> list[Place]:
    return [
        (s.tokens[i], i, s.tokens[i + 1], float(s.mask[i + 1]), s.logprobs[i + 1], s.advantage)
        for s in samples
        for i in range(len(s.tokens) - 1)
    ]


def microbatches(batches: Sequence[Batch]) -> list[Rows]:
    return [rows for batch in batches for rows in batch.microbatches]


def places(rows: Rows) -> Iterator[Place]:
    columns = (rows.tokens, rows.positions, rows.targets, rows.mask, rows.logprobs, rows.advantages)
    return zip(*(column.ravel().tolist() for column in columns), strict=True)


def sample(tokens: int, prompt: int = 1, advantage: float = 1.0) -> Sample:
    trained = tokens - prompt
    return Sample(list(range(tokens)), [0] * prompt + [1] * trained, [0.0] * prompt + [-0.5] * trained, advantage)


@given(shapes())
def test_every_place_arrives_once_and_the_rest_is_padding(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    packed = [place for rows in microbatches(batches) for place in places(rows)]
    real = [place for place in packed if place[0] != PAD]
    assert Counter(real) == Counter(expected(samples))
    assert all(place[2:] == (PAD, 0.0, 0.0, 0.0) for place in packed if place[0] == PAD)
    trained = sum(place[3] for place in real)
    assert all(batch.global_tokens == max(trained, 1) for batch in batches)


@given(shapes())
def test_all_microbatches_have_one_shape(case: tuple[int, int, int, list[Sample]]) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    assert len(batches) == shards
    assert len({len(batch.microbatches) for batch in batches}) == 1
    (shape,) = {array.shape for rows in microbatches(batches) for array in (rows.tokens, rows.mask, rows.positions)}
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


@given(samples_up_to(33))
def test_packing_is_deterministic(samples: list[Sample]) -> None:
    one, two = (pack(samples, shards=2, seq_len=64, rows_per_microbatch=2, pad_id=PAD) for _ in range(2))
    assert [list(places(rows)) for rows in microbatches(one)] == [list(places(rows)) for rows in microbatches(two)]


def test_dtypes() -> None:
    (rows,) = microbatches(pack([sample(4)], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0))
    assert {str(a.dtype) for a in (rows.tokens, rows.positions, rows.targets)} == {"int64"}
    assert {str(a.dtype) for a in (rows.mask, rows.logprobs, rows.advantages)} == {"float32"}


def test_one_document_by_hand() -> None:
    got = Sample([7, 8, 9], [0, 1, 1], [0.0, -0.5, -0.25], 2.0)
    (batch,) = pack([got], shards=1, seq_len=4, rows_per_microbatch=1, pad_id=0)
    (rows,) = batch.microbatches
    assert rows.tokens.tolist() == [[7, 8, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 0, 1]]
    assert rows.targets.tolist() == [[8, 9, 0, 0]]
    assert rows.mask.tolist() == [[1, 1, 0, 0]]
    assert rows.logprobs.tolist() == [[-0.5, -0.25, 0, 0]]
    assert rows.advantages.tolist() == [[2, 2, 0, 0]]
    assert batch.global_tokens == 2
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


@given(st.lists(st.integers(2, 65), max_size=40), st.integers(1, 3), st.integers(1, 3))
def test_fill_is_the_share_of_places_that_are_not_padding(
    sizes: list[int], shards: int, rows_per_microbatch: int
) -> None:
    samples = [sample(n) for n in sizes]
    batches = pack(samples, shards=shards, seq_len=64, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    assert fill(batches) == np.mean([rows.tokens != PAD for rows in microbatches(batches)])


def test_long_mixed_documents_leave_few_places_empty() -> None:
    samples = [sample(int(n)) for n in np.random.default_rng(0).integers(2, 400, 512)]
    assert fill(pack(samples, shards=4, seq_len=1024, rows_per_microbatch=4, pad_id=0)) > 0.95


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_logprob_is_not_trained_on(bad: float) -> None:
    got = Sample([1, 2, 3, 4], [0, 1, 1, 1], [0.0, -0.5, bad, -0.25], 1.0)
    (batch,) = pack([got], shards=1, seq_len=3, rows_per_microbatch=1, pad_id=0)
    assert batch.microbatches[0].mask.tolist() == [[1, 0, 1]]
    assert batch.microbatches[0].logprobs.tolist() == [[-0.5, 0, -0.25]]
    assert batch.global_tokens == 2


@pytest.mark.parametrize("samples", [[], [sample(1)], [Sample([1, 2], [0, 0], [0.0, 0.0], 1.0)]])
def test_nothing_to_train_on_is_a_batch_of_padding(samples: list[Sample]) -> None:
    batches = pack(samples, shards=2, seq_len=16, rows_per_microbatch=2, pad_id=0)
    assert [batch.global_tokens for batch in batches] == [1, 1]
    assert all(rows.tokens.shape == (2, 16) and not rows.mask.any() for rows in microbatches(batches))


def test_a_sample_that_fits_no_row_is_refused_with_the_numbers() -> None:
    pack([sample(17)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)
    with pytest.raises(ValueError, match=r"sample 1: 18 tokens take 17 places.* 16; set training\.seq_len .*17"):
        pack([sample(2), sample(18)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)


def test_a_sample_of_unequal_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0: 2 tokens, but 2 mask entries and 1 log-probs"):
        pack([Sample([1, 2], [0, 1], [0.0], 1.0)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=0)


def test_samples_are_the_rollouts_in_order() -> None:
    first = Turn([1, 2], Completion([3], [-0.1], [0], "stop"))
    second = Turn([4], Completion([5, 6], [-0.2, -0.3], [0, 1], "length"))
    groups = [Group(Prompt(0, "", [1, 2], ""), [Rollout([first, second], "", 1.0, 0.5), Rollout([first], "", 0.0)])]
    assert samples_of(groups) == [
        Sample([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], [0.0, 0.0, -0.1, 0.0, -0.2, -0.3], 0.5),
        Sample([1, 2, 3], [0, 0, 1], [0.0, 0.0, -0.1], 0.0),
    ]
