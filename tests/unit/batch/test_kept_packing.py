"""Kept sets of truncated sampling on their way into packed rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import PAD, groups_of, microbatches, random_sample
from titan_rl.batch.packing import UpTo, pack
from titan_rl.wire.kept_sets import KeptSets, packed
from titan_rl.wire.types import Rows, Sample

VOCABULARY = 200


def truncated(sample: Sample, rng: np.random.Generator) -> Sample:
    """Give each trained token a set that has it, of any size, and each third one the whole vocabulary."""
    sets = [b""] * len(sample.tokens)
    for i in np.flatnonzero(np.asarray(sample.mask)):
        kept = rng.random(VOCABULARY) < rng.choice([0.01, 0.5])
        kept[sample.tokens[i]] = True
        sets[i] = b"" if rng.random() < 0.3 else packed(kept)
    return replace(sample, kept=KeptSets.of(sets))


def by_place(rows: Rows) -> list[list[int]]:
    assert rows.kept is not None
    counts, ids = rows.kept.ids()
    assert len(counts) == rows.targets.size
    return [part.tolist() for part in np.split(ids, counts.cumsum()[:-1])]


@given(st.integers(0, 2**32), groups_of(10, 14), st.integers(1, 3), st.booleans())
def test_each_set_is_its_targets(seed: int, samples: list[Sample], shards: int, share: bool) -> None:
    rng = np.random.default_rng(seed)
    samples = [truncated(s, rng) for s in samples] or [truncated(random_sample(rng, 9), rng)]
    samples[1:2] = [replace(sample, kept=None) for sample in samples[1:2]]  # it counts as whole
    batches = pack(samples, shards=shards, seq_len=64, rows_per_microbatch=UpTo(2), pad_id=PAD, share=share)
    found = 0
    for rows in microbatches(batches):
        owner, mask = rows.sequences.ravel(), rows.mask.ravel()
        positions = rows.positions.ravel()[rows.places.ravel()]
        for i, ids in enumerate(by_place(rows)):
            if owner[i] < 0 or not mask[i]:
                assert ids == []
                continue
            sample = samples[rows.samples[owner[i]]]
            want = sample.kept.take(np.array([positions[i] + 1])).ids()[1].tolist() if sample.kept else []
            assert ids == want
            found += 1
    assert found == sum(int(np.asarray(s.mask[1:]).sum()) for s in samples)


def test_samples_without_sets_pack_as_they_did() -> None:
    rng = np.random.default_rng(0)
    rows = microbatches(pack([random_sample(rng, 9)], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=PAD))
    assert rows[0].kept is None


def test_a_set_too_few_is_refused() -> None:
    sample = Sample([1, 2, 3], [0, 1, 1], {}, kept=KeptSets.of([b"", b""]))
    with pytest.raises(ValueError, match="sample 0: expected 3 entries of kept, one per token, found 2"):
        pack([sample], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=PAD)
