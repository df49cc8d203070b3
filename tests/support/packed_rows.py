"""Samples of any length to pack, and what their packed rows hold."""

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from titan_rl.batch.packing import Aggregation, unpack
from titan_rl.wire.types import Batch, Rows, Sample

PAD = 999  # no sample has this token, so tests can tell padding from documents
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum")
Place = tuple[int, int, int, float, float, float]  # token, position, target, mask, behaviour, advantage


@st.composite
def samples_up_to(draw: st.DrawFn, tokens: int) -> list[Sample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [random_sample(rng, n) for n in draw(st.lists(st.integers(0, tokens), max_size=40))]


@st.composite
def pairs_up_to(draw: st.DrawFn, tokens: int) -> list[Sample]:
    """Two neighbours together take at most `tokens` places."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    firsts = draw(st.lists(st.integers(0, tokens), max_size=20))
    return [random_sample(rng, n) for first in firsts for n in (first, int(rng.integers(0, tokens - first + 1)))]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, list[Sample]]:
    seq_len = draw(st.integers(2, 150))
    return draw(st.integers(1, 4)), seq_len, draw(st.integers(1, 5)), draw(samples_up_to(seq_len + 1))


def random_sample(rng: np.random.Generator, tokens: int) -> Sample:
    mask = rng.integers(0, 2, tokens)
    behaviour = np.where(mask, -rng.random(tokens, dtype=np.float32), 0)
    columns = {"behaviour": behaviour.tolist(), "advantage": rng.standard_normal(tokens).astype(np.float32)}
    return Sample(rng.integers(0, 50, tokens).tolist(), mask.tolist(), {}).with_columns(**columns)


def expected(samples: Sequence[Sample]) -> list[Place]:
    return [
        (
            s.tokens[i],
            i,
            s.tokens[i + 1],
            float(s.mask[i + 1]),
            float(s.columns["behaviour"][i + 1]),
            float(s.columns["advantage"][i + 1]),
        )
        for s in samples
        for i in range(len(s.tokens) - 1)
    ]


def microbatches(batches: Sequence[Batch]) -> list[Rows]:
    return [rows for batch in batches for rows in batch.microbatches]


def places(rows: Rows) -> Iterator[Place]:
    empty = np.zeros(rows.mask.shape)
    columns = [rows.columns.get(name, empty) for name in ("behaviour", "advantage")]
    arrays = (rows.tokens, rows.positions, rows.targets, rows.mask, *columns)
    return zip(*(array.ravel().tolist() for array in arrays), strict=True)


def sample(tokens: int, prompt: int = 1) -> Sample:
    trained = tokens - prompt
    mask = [0] * prompt + [1] * trained
    return Sample(list(range(tokens)), mask, {"behaviour": [0.0] * prompt + [-0.5] * trained})


def weights(batches: Sequence[Batch]) -> np.ndarray:
    return np.concatenate([rows.weights.ravel() for rows in microbatches(batches)])


def weights_of(batches: Sequence[Batch], samples: Sequence[Sample]) -> list[float]:
    """Return the weight of each sample in the loss."""
    per_place = unpack(batches, [[rows.weights for rows in b.microbatches] for b in batches], samples)
    return [float(w.sum()) for w in per_place]


def fill(batches: Sequence[Batch]) -> float:
    """Return the share of places that hold a document."""
    return float(np.mean([rows.sequences >= 0 for rows in microbatches(batches)]))


@st.composite
def groups_of(draw: st.DrawFn, prompt: int, answer: int, members: int = 0) -> list[Sample]:
    """Return groups with at most `prompt` and `answer` tokens: some answers are empty or equal, some tokens or
    whole answers are not trained on, and some groups have equal prompts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made = []
    for size in draw(st.lists(st.integers(1, prompt), max_size=6)):
        asked = rng.integers(0, 2 if size < 3 else 50, size).tolist()
        for _ in range(members or int(rng.integers(1, 9))):
            n = size + int(rng.integers(0, answer + 1))
            mask = [0] * size + (rng.random(n - size) < rng.choice([0.0, 0.8, 1.0])).astype(int).tolist()
            values = rng.standard_normal((3, n)).astype(np.float32)
            columns = {"behaviour": -4 + 0.1 * values[0], "reference": -4 + 0.1 * values[1], "advantage": values[2]}
            tokens = asked + rng.integers(0, rng.choice([2, 50]), n - size).tolist()
            made.append(Sample(tokens, mask, {}, size).with_columns(**columns))
    return made
