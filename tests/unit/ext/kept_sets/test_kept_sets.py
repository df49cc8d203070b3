"""Kept sets of truncated sampling: their bytes, and their way from completions to rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packed_rows import PAD, groups_of, microbatches, random_sample
from titan_rl.batch.packing import UpTo, pack
from titan_rl.ext.kept_sets.kept_sets import KeptSets, packed, size_of
from titan_rl.record.metric_docs import DOCS
from titan_rl.wire.side_columns import extras_of, logged_extras, metrics_of_extras
from titan_rl.wire.types import Branch, Completion, Rollout, Rows, Sample, Turn

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
    first = Turn([1, 2], Completion([5], [-0.5], [0], "stop", extras={"kept": [packed(np.arange(9) == 5)]}))
    later = {"kept": [b"", packed(np.arange(9) > 6)]}
    second = Turn([3], Completion([6, 7], [-0.5] * 2, [0] * 2, "stop", extras=later), index=1)
    branch = Branch([first, second])
    bare = Branch([Turn([1], Completion([5], [-0.5], [0], "stop"))])
    found, none = extras_of([branch, bare])
    counts, ids = found["kept"].ids()
    assert (counts.tolist(), ids.tolist()) == ([0, 0, 1, 0, 0, 2], [5, 7, 8])
    assert none == {}
    assert logged_extras(Rollout([branch], "", 1.0)) == {"kept": [1, 0, 2]}


PACKED_VOCABULARY = 200


def truncated(sample: Sample, rng: np.random.Generator) -> Sample:
    """Give each trained token a set that has it, of any size, and each third one the whole vocabulary."""
    sets = [b""] * len(sample.tokens)
    for i in np.flatnonzero(np.asarray(sample.mask)):
        kept = rng.random(PACKED_VOCABULARY) < rng.choice([0.01, 0.5])
        kept[sample.tokens[i]] = True
        sets[i] = b"" if rng.random() < 0.3 else packed(kept)
    return replace(sample, extras={"kept": KeptSets.of(sets)})


def by_place(rows: Rows) -> list[list[int]]:
    counts, ids = rows.extras["kept"].ids()
    assert len(counts) == rows.targets.size
    return [part.tolist() for part in np.split(ids, counts.cumsum()[:-1])]


@given(st.integers(0, 2**32), groups_of(10, 14), st.integers(1, 3), st.booleans())
def test_each_set_is_its_targets(seed: int, samples: list[Sample], shards: int, share: bool) -> None:
    rng = np.random.default_rng(seed)
    samples = [truncated(s, rng) for s in samples] or [truncated(random_sample(rng, 9), rng)]
    samples[1:2] = [replace(sample, extras={}) for sample in samples[1:2]]  # it counts as whole
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
            sets = sample.extras.get("kept")
            want = sets.take(np.array([positions[i] + 1])).ids()[1].tolist() if sets else []
            assert ids == want
            found += 1
    assert found == sum(int(np.asarray(s.mask[1:]).sum()) for s in samples)


def test_a_set_too_few_is_refused() -> None:
    sample = Sample([1, 2, 3], [0, 1, 1], {}, extras={"kept": KeptSets.of([b"", b""])})
    with pytest.raises(ValueError, match="sample 0: expected 3 entries of kept, one per token, found 2"):
        pack([sample], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=PAD)


def test_kept_sets_are_counted_where_sampling_was_truncated() -> None:
    kept = [packed(np.arange(99) < 3), packed(np.arange(99) < 50), b"", b""]
    cut = Completion([1] * 4, [-0.5] * 4, [2] * 4, "stop", extras={"kept": kept})
    logged = metrics_of_extras([Rollout([Branch([Turn([1, 4, 5], cut)])], "", 1.0)])
    assert (logged["kept/mean"], logged["kept/whole"]) == (26.5, 0.5)
    assert logged.keys() <= DOCS.keys()
    assert metrics_of_extras([Rollout([Branch([Turn([1], Completion([5], [-0.5], [0], "stop"))])], "", 1.0)]) == {}
