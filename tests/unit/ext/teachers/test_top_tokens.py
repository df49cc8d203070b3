"""Top tokens of packed rows: each trained target's, also where they come back as answers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import PAD, shapes
from titan_rl.batch.packing import pack, unpack
from titan_rl.wire.types import ENTRY, Sample, entries


def topped(sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the sample with random top tokens."""
    shape = int((np.asarray(sample.mask) > 0).sum()), 3
    return replace(sample, extras={"top": entries(rng.integers(0, 99, shape), rng.random(shape))})


@given(shapes(), st.integers(0, 2**32))
def test_each_trained_target_has_its_top_tokens_and_they_come_back(
    case: tuple[int, int, int, list[Sample]], seed: int
) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    rng = np.random.default_rng(seed)
    samples = [
        replace(s, mask=[0] * min(len(s.tokens), 1) + [*s.mask[1:]]) for s in samples
    ]  # a first one is no target
    samples = [topped(sample, rng) for sample in samples]
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    if not samples:
        return
    for rows in (rows for batch in batches for rows in batch.microbatches):
        owner, place = rows.samples[rows.sequences[rows.mask > 0]], rows.places[rows.mask > 0]
        for i, read, top in zip(owner, rows.positions.reshape(-1)[place], rows.extras["top"], strict=True):
            own = samples[i].extras["top"]
            assert np.array_equal(own[int((np.asarray(samples[i].mask)[: read + 1] > 0).sum())], top)
    answers = [[rows.extras["top"] for rows in batch.microbatches] for batch in batches]
    back = unpack(batches, answers, samples, trained=True)
    assert all(np.array_equal(own, s.extras["top"]) for own, s in zip(back, samples, strict=True))


@pytest.mark.parametrize("top", [None, np.zeros((1, 3), ENTRY)])
def test_a_wrong_number_of_top_tokens_is_refused(top: np.ndarray | None) -> None:
    found = [{"top": np.zeros((2, 3), ENTRY)}, {} if top is None else {"top": top}]
    samples = [Sample([1, 2, 3], [0, 1, 1], {}, extras=extras) for extras in found]
    count = 0 if top is None else 1
    match = f"sample 1: expected 2 rows of top tokens, one per trained token, found {count}"
    with pytest.raises(ValueError, match=match):
        pack(samples, shards=1, seq_len=8, rows_per_microbatch=1, pad_id=PAD)
