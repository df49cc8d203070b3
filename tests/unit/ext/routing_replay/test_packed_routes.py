"""Routes of packed rows: of the token that each place reads, also where samples share places."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import PAD, shapes
from titan_rl.batch.packing import UpTo, pack
from titan_rl.wire.types import Sample


def routed(sample: Sample, rng: np.random.Generator) -> Sample:
    """Return the sample with random routes: unknown for the last token, and for cached ones."""
    routes = rng.integers(0, 9, (len(sample.tokens), 3, 2)).astype(np.uint8)
    routes[-1:] = routes[: rng.integers(4)] = 255
    return replace(sample, extras={"routes": routes})


@given(shapes(), st.integers(0, 2**32))
def test_each_place_has_the_routes_of_the_token_that_it_reads(
    case: tuple[int, int, int, list[Sample]], seed: int
) -> None:
    shards, seq_len, rows_per_microbatch, samples = case
    rng = np.random.default_rng(seed)
    samples = [routed(sample, rng) for sample in samples]
    samples[1:2] = [replace(sample, extras={}) for sample in samples[1:2]]
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows_per_microbatch, pad_id=PAD)
    for batch in batches:
        for rows in batch.microbatches:
            if not any(sample.extras for sample in samples):
                assert rows.extras == {}
                continue
            found = rows.extras["routes"]
            assert (found.dtype, found.shape) == (np.int16, (*rows.tokens.shape, 3, 2))
            filled = rows.sequences >= 0
            assert (found.reshape(-1, 3, 2)[np.setdiff1d(np.arange(rows.tokens.size), rows.places[filled])] == -1).all()
            for place, sequence in zip(rows.places[filled], rows.sequences[filled], strict=True):
                own = samples[rows.samples[sequence]].extras.get("routes")
                row = -1 if own is None else own[rows.positions.reshape(-1)[place]].astype(int)
                row = np.where(row == 255, -1, row)
                assert (found.reshape(-1, 3, 2)[place] == row).all()


def test_a_shared_prompt_has_the_routes_of_one_sample() -> None:
    rng, prompt = np.random.default_rng(0), list(range(5, 45))
    samples = [replace(routed(Sample([*prompt, 3 + i, 4], [0] * 40 + [1] * 2), rng), prompt=40) for i in range(4)]
    (batch,) = pack(samples, shards=1, seq_len=128, rows_per_microbatch=UpTo(2), pad_id=PAD, share=True)
    (rows,) = batch.microbatches
    assert (rows.segments[:, 3] > 0).any()
    flat = rows.extras["routes"].reshape(-1, 3, 2)
    tokens = rows.tokens.reshape(-1)
    for begin, length, *_ in rows.segments[rows.segments[:, 3] > 0]:
        (sample,) = (s for s in samples if list(s.tokens[40:-1]) == tokens[begin : begin + length].tolist())
        assert np.array_equal(flat[begin : begin + length], sample.extras["routes"][40:-1])
    shared = int(rows.segments[rows.segments[:, 3] > 0][0, 2])
    prompts = [s.extras["routes"][:40] for s in samples]
    whole = [np.where(each == 255, -1, each.astype(int)) for each in prompts]
    assert any(np.array_equal(flat[shared : shared + 40], each) for each in whole)


def test_a_wrong_number_of_routes_is_refused() -> None:
    sample = Sample([1, 2, 3], [0, 1, 1], {}, extras={"routes": np.zeros((2, 3, 2), np.uint8)})
    with pytest.raises(ValueError, match="sample 0: expected 3 entries of routes, one per token, found 2"):
        pack([sample], shards=1, seq_len=8, rows_per_microbatch=1, pad_id=PAD)
