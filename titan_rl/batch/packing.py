"""Packs token sequences of any length into microbatches of one shape, and returns per-token answers to their samples.

    samples -> pack -> one Batch per data-parallel rank, all with the same number of microbatches
    samples <- unpack <- one array per microbatch

A document of n tokens takes n - 1 places: place i reads tokens[i] and predicts tokens[i + 1], its target. So a
document's first token is read, but is never a target. Documents may share places, which then predict several targets
each: prefixes.py. A row of 16 places, with three answers to the prompt p, and one to q:

    place      0  1  2  3   4  5   6   7  8   9 10 11 12  13 14 15
    reads     p0 p1 p2 p3  a0 a1  b0  c0 c1  q0 q1 d0 d1   padding
    position   0  1  2  3   4  5   4   4  5   0  1  2  3   0  1  2
    predicts           a0  a1 a2  b1  c1 c2  q1 d0 d1 d2
                       b0
                       c0
    segment    0            1      2   3      4            5
    prefix     -            0      0   0      -            -         the places 0 to 3
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from titan_rl.batch import prefixes
from titan_rl.batch.prefixes import Layout
from titan_rl.config.sections import Aggregation
from titan_rl.wire.side_columns import Places, packed_extras
from titan_rl.wire.types import Batch, Column, ImagePlace, Rows, Sample, ranges

ALIGN = 16  # row lengths are multiples of this: few shapes in a run, and divisible by the usual TP degrees


@dataclass(frozen=True, slots=True)
class Weighting:
    """How tokens are weighted in the loss. If the samples are not the `whole` update, the weights are not yet divided
    by its `divisor`, and a batch counts this part only."""

    aggregation: Aggregation = "token_mean"
    length: int = 1  # tokens; the constant that "sequence_sum" divides by
    whole: bool = True


TOKEN_MEAN = Weighting()


@dataclass(frozen=True, slots=True)
class UpTo:
    """The most rows of a microbatch: it has no more than the samples need."""

    rows: int


def pack(
    samples: Sequence[Sample],
    *,
    shards: int,
    seq_len: int,
    rows_per_microbatch: int | UpTo,
    pad_id: int,
    together: int = 1,
    weighting: Weighting = TOKEN_MEAN,
    share: bool = False,
) -> list[Batch]:
    """Return one Batch per shard, all with the same number of microbatches of [rows_per_microbatch, L].

    The number of microbatches is the least that rows of seq_len allow. L is the shortest length at which the samples
    still fit those rows, because an empty place costs as much as a filled one. A token whose sampling log-prob is not
    finite is masked out. `together` consecutive samples always share a row: a preference pair needs both members in one
    row. `share` prompts where that leaves fewer places, full and empty, to compute.
    """
    fit, plain = fitted(samples, shards, seq_len, rows_per_microbatch, together=together, share=share)
    block = _write(samples, fit, pad_id)
    weights, tokens, sequences = _weights(block, samples, weighting)
    if weighting.whole:
        tokens, sequences = max(tokens, 1), max(sequences, 1)  # a step without trained tokens has loss 0
        weights = weights / divisor(weighting.aggregation, tokens, sequences)
    weights = weights.astype(np.float32)

    # Rows are sorted fullest first and dealt back and forth, so that shards get nearly equal numbers of tokens.
    deal = np.arange(fit.slots).reshape(-1, shards)
    deal[1::2] = deal[1::2, ::-1].copy()
    hands = deal.T.reshape(shards, -1, fit.rows)
    unshared = plain.places // shards
    return [Batch([_take(block, weights, numbers) for numbers in hand], tokens, sequences, unshared) for hand in hands]


def fitted(
    samples: Sequence[Sample],
    shards: int,
    seq_len: int,
    rows_per_microbatch: int | UpTo,
    *,
    together: int = 1,
    share: bool = False,
) -> tuple["Fit", "Fit"]:
    """Return the rows of the fewest places that hold the samples, and the rows without shared places."""
    places = np.array([max(len(s.tokens) - 1, 0) for s in samples], dtype=np.int64)  # [N]
    _check(samples, places, seq_len, together)
    plain = _fit(prefixes.plain(places, together), seq_len, shards, rows_per_microbatch)
    shared = prefixes.shared(samples, places, together, seq_len) if share else []
    fits = (plain, *(_fit(layout, seq_len, shards, rows_per_microbatch) for layout in shared))
    return min(fits, key=lambda fit: fit.places), plain


def divisor(aggregation: Aggregation, tokens: int, sequences: int) -> int:
    """Return the denominator of the loss, known once all samples of an update are."""
    return tokens if aggregation == "token_mean" else sequences


def unpack(
    batches: Sequence[Batch], answers: Sequence[Sequence[np.ndarray]], samples: Sequence[Sample], trained: bool = False
) -> list[np.ndarray]:
    """Return the answers for targets, given by batch and microbatch, as one float32 array per sample. A sample's first
    token is never a target and gets 0. Answers for `trained` targets alone, [N, k], become arrays for trained tokens.
    """
    sizes = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    begins, ends = sizes.cumsum() - sizes, sizes.cumsum()
    entry, flat = np.arange(sizes.sum()), np.zeros(sizes.sum(), np.float32)
    if trained:
        on = np.concatenate([np.zeros(0, bool), *(np.asarray(sample.mask) > 0 for sample in samples)])
        entry, ends = on.cumsum() - 1, np.append(0, on.cumsum())[ends]
        flat = np.zeros((on.sum(), *answers[0][0].shape[1:]), answers[0][0].dtype)
    for batch, answered in zip(batches, answers, strict=True):
        for rows, values in zip(batch.microbatches, answered, strict=True):
            chosen = rows.mask > 0 if trained else rows.sequences >= 0
            owner = rows.samples[rows.sequences[chosen]]
            token = begins[owner] + rows.positions.reshape(-1)[rows.places[chosen]] + 1
            flat[entry[token]] = values if trained else values[chosen]
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


def _check(samples: Sequence[Sample], places: np.ndarray, seq_len: int, together: int) -> None:
    if len(samples) % together:
        raise ValueError(f"expected a multiple of {together} samples, found {len(samples)}")
    sizes = [len(s.tokens) for s in samples]
    for name in ("mask", *(samples[0].columns if samples else ())):
        entries = [_entries(s, name) for s in samples]
        if entries != sizes:  # a short list would shift the training data of every later sample
            i, n, count = next((i, n, m) for i, (n, m) in enumerate(zip(sizes, entries, strict=True)) if n != m)
            raise ValueError(f"sample {i}: expected {n} entries of {name}, one per token, found {count}")
    units = places.reshape(-1, together).sum(1)
    if (units > seq_len).any():
        first = int(np.argmax(units > seq_len))
        i, unit = first * together, int(units[first])
        subject = f"sample {i}: {unit + 1} tokens" if together == 1 else f"samples {i} to {i + together - 1}: together"
        raise ValueError(
            f"{subject} take {unit} places, a packed row has {seq_len}; "
            f"set training.seq_len to at least {unit}, or lower rollout.max_new_tokens"
        )


def _entries(sample: Sample, name: Literal["mask"] | Column) -> int:
    return len(sample.mask if name == "mask" else sample.columns[name])


def _best_fit(needs: np.ndarray, places: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and offset of each unit: the neediest first, each into the fullest row that has room for it.
    Deterministic, and O(n log n), whereas first-fit scans every open row."""
    order = np.argsort(-needs, kind="stable")
    row, offset = np.empty_like(places), np.empty_like(places)
    row[order] = rows = np.array(_filled(needs, capacity)[0], np.int64)
    offset[order] = _offsets(rows, places[order])
    return row, offset


def _offsets(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return where each of these parts begins in its row, if a row takes its parts in this order."""
    order = np.argsort(rows, kind="stable")
    begins = np.append(0, sizes[order].cumsum())[:-1]
    sorted_rows, offset = rows[order], np.empty_like(sizes)
    offset[order] = begins - begins[np.searchsorted(sorted_rows, sorted_rows)] if len(sorted_rows) else begins
    return offset


def _filled(needs: np.ndarray, capacity: int) -> tuple[list[int], int]:
    """Return the row of each unit, from the neediest on, and the number of rows. Units of one size go together: a row
    that has taken one stays the fullest with room for the next."""
    rows: list[int] = []
    rooms: list[tuple[int, int]] = []  # (free places, row), ascending
    for size, remaining in sorted(Counter(needs.tolist()).items(), reverse=True):
        while remaining:
            fits = bisect_left(rooms, (size,))
            room, row = rooms.pop(fits) if fits < len(rooms) else (capacity, len(rooms))
            count = min(remaining, room // max(size, 1) or 1)
            rows += [row] * count
            insort(rooms, (room - size * count, row))
            remaining -= count
    return rows, len(rooms)


def _rows_needed(needs: np.ndarray, capacity: int) -> int:
    return _filled(needs, capacity)[1]


def _shortest(needs: np.ndarray, seq_len: int, slots: int) -> int:
    """Return the shortest aligned row length at which the units fit into `slots` rows. They do at seq_len."""
    least = max(int(needs.max(initial=1)), -(-int(needs.sum()) // slots))
    lengths = range(_aligned(least), seq_len, ALIGN)
    first = bisect_left(lengths, True, key=lambda length: _rows_needed(needs, length) <= slots)
    return lengths[first] if first < len(lengths) else seq_len


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout, and the rows that hold it."""

    layout: Layout
    rows: int  # per microbatch
    slots: int  # rows in all
    length: int
    unit_row: np.ndarray
    unit_offset: np.ndarray

    @property
    def places(self) -> int:
        return self.slots * self.length


def _fit(layout: Layout, seq_len: int, shards: int, rows: int | UpTo) -> Fit:
    needs, units = layout.needs, layout.units
    needed, max_rows = max(_rows_needed(needs, seq_len), 1), rows.rows if isinstance(rows, UpTo) else rows
    rounds = -(-needed // (shards * max_rows))
    microbatch_rows = -(-needed // (shards * rounds)) if isinstance(rows, UpTo) else max_rows
    slots = rounds * shards * microbatch_rows
    length = _shortest(needs, seq_len, slots)
    row, offset = _best_fit(needs, units, length)
    if (needs > units).any():  # the places alone may need less
        length = min(length, _aligned(max(int((offset + units).max()), 1)))
    return Fit(layout, microbatch_rows, slots, length, row, offset)


@dataclass(frozen=True, slots=True)
class _Block:
    """All rows of the step, fullest first."""

    tokens: np.ndarray  # [slots, L], as positions
    positions: np.ndarray
    segments: np.ndarray  # [G, 5]: row, offset in it, length; offset and length of its prefix
    targets: np.ndarray  # [slots, T], as all that follow
    places: np.ndarray  # the place in the row that predicts the target
    mask: np.ndarray
    owner: np.ndarray  # the target's sample; -1 is padding
    columns: dict[Column, np.ndarray]
    source: np.ndarray  # the target among the tokens of all samples; -1 is padding
    reads: np.ndarray  # the token of each place among the tokens of all samples; -1 is padding
    extras: dict[str, Callable[[Places], Any]]  # side columns of a microbatch
    images: Sequence[tuple[ImagePlace, ...]]  # by row


def _write(samples: Sequence[Sample], fit: Fit, pad_id: int) -> _Block:
    layout, targets, length, slots = fit.layout, fit.layout.targets, fit.length, fit.slots
    filled = np.bincount(fit.unit_row, weights=layout.units, minlength=slots).astype(np.int64)  # [slots]
    fullest = np.argsort(-filled, kind="stable")
    unit_row = np.argsort(fullest)[fit.unit_row]  # a permutation's argsort is its inverse
    before = layout.length.cumsum() - layout.length  # places before each segment, over all units
    row, offset = (
        unit_row[layout.unit],
        fit.unit_offset[layout.unit] + before - (layout.units.cumsum() - layout.units)[layout.unit],
    )
    order = np.lexsort(
        (fit.unit_offset[layout.unit[targets.segment]], row[targets.segment])
    )  # sorts runs as their units lie in rows
    run_row, run = row[targets.segment[order]], targets.length[order]
    run_offset = _offsets(run_row, run)

    # Per place, [P], and per target, [Q]: its destination, and its flat token, which the place reads.
    sizes = np.array([len(s.tokens) for s in samples], dtype=np.int64)
    starts = sizes.cumsum() - sizes
    goes, position = ranges(row * length + offset, layout.length), ranges(layout.start, layout.length)
    max_targets = int((run_offset + run).max(initial=1))
    width = length if max_targets <= length else _aligned(max_targets)  # targets per row
    target_goes = ranges(run_row * width + run_offset, run)

    def block(goes: np.ndarray, wide: int, values: np.ndarray, padding: np.ndarray | int) -> np.ndarray:
        out = np.empty((slots, wide), values.dtype)
        out[:] = padding
        out.reshape(-1)[goes] = values
        return out

    def flat(values: Iterable[Sequence[float] | np.ndarray], dtype: type, padding: float = 0) -> np.ndarray:
        return np.concatenate([*values, [padding]], dtype=dtype, casting="unsafe")

    reads = block(goes, length, ranges(starts[layout.sample] + layout.start, layout.length), -1)
    source = block(target_goes, width, ranges((starts[targets.sample] + targets.start)[order], run) + 1, -1)
    tokens = flat((s.tokens for s in samples), np.int64, pad_id)
    mask = flat((s.mask for s in samples), np.float32)[source]
    names = samples[0].columns if samples else ()
    columns: dict[Column, np.ndarray] = {
        name: flat((s.columns[name] for s in samples), np.float32)[source] for name in names
    }
    if "behaviour" in columns:
        mask = mask * np.isfinite(columns["behaviour"])
    place = ranges((offset[targets.segment] + targets.offset)[order], run)
    return _Block(
        tokens=tokens[reads],
        positions=block(goes, length, position, np.arange(length) - filled[fullest, None]),  # padding: its own document
        segments=np.concatenate([_written(layout, row, offset), _padding(filled[fullest], length)]),
        targets=tokens[source],
        places=block(target_goes, width, place, np.minimum(np.arange(width), length - 1)),
        mask=mask,
        owner=block(target_goes, width, np.repeat(targets.sample[order], run), -1),
        columns={name: np.where(np.isfinite(c), c, np.float32(0)) for name, c in columns.items()},
        source=source,
        reads=reads,
        extras=packed_extras(samples),
        images=_images(samples, layout, row, offset, slots),
    )


def _images(
    samples: Sequence[Sample], layout: Layout, row: np.ndarray, offset: np.ndarray, slots: int
) -> list[tuple[ImagePlace, ...]]:
    """Return each row's images. One lies in one segment: in the shared prompt, or after it."""
    if not any(sample.images for sample in samples):
        return []
    found: list[tuple[ImagePlace, ...]] = [()] * slots
    for segment in np.argsort(offset, kind="stable").tolist():
        start, length = int(layout.start[segment]), int(layout.length[segment])
        moved = int(offset[segment]) - start
        for name, begin in samples[int(layout.sample[segment])].images:
            if start <= begin < start + length:
                found[int(row[segment])] += (ImagePlace(name, begin + moved),)
    return found


def _written(layout: Layout, row: np.ndarray, offset: np.ndarray) -> np.ndarray:
    unprefixed = layout.prefix < 0  # -1 would index the last segment
    prefix = np.where(unprefixed, 0, offset[layout.prefix]), np.where(unprefixed, 0, layout.length[layout.prefix])
    return np.stack([row, offset, layout.length, *prefix], 1)[layout.length > 0]


def _padding(filled: np.ndarray, length: int) -> np.ndarray:
    """Return a segment for the empty places at the end of each row. It attends to itself."""
    none = np.zeros_like(filled)
    return np.stack([np.arange(len(filled)), filled, length - filled, none, none], 1)[filled < length]


def _weights(block: _Block, samples: Sequence[Sample], weighting: Weighting) -> tuple[np.ndarray, int, int]:
    """Return each token's weight before the divisor, and the numbers of trained tokens and sequences. The numbers are
    global, which makes the loss independent of mesh and microbatching. All branches of a rollout are one sequence.

    token_mean      1 / tokens
    sequence_mean   1 / (tokens of the sequence x sequences)
    sequence_sum    1 / (length x sequences)        Dr.GRPO's constant
    """
    on = block.mask > 0
    owners = np.array([-1 - i if s.sequence < 0 else s.sequence for i, s in enumerate(samples)], np.int64)
    sequence = np.unique(owners, return_inverse=True)[1]  # [N]
    per_sequence = np.bincount(sequence[block.owner[on]], minlength=len(samples))
    weights = block.mask.astype(np.float64)
    if weighting.aggregation == "sequence_mean":
        tokens_of_sequence = np.append(per_sequence[sequence], 1)[block.owner]  # padding, -1, indexes the appended 1
        weights = weights / np.maximum(tokens_of_sequence, 1)
    elif weighting.aggregation == "sequence_sum":
        weights = weights / weighting.length
    return weights, int(on.sum()), int((per_sequence > 0).sum())


def _take(block: _Block, weights: np.ndarray, numbers: np.ndarray) -> Rows:
    owner = block.owner[numbers]
    samples = np.unique(owner[owner >= 0])
    index = np.full(len(block.tokens), -1)  # row -> its number in this microbatch
    index[numbers] = np.arange(len(numbers))
    segments = block.segments[index[block.segments[:, 0]] >= 0]
    length = block.tokens.shape[1]
    begins = index[segments[:, 0]] * length
    segments = np.stack([begins + segments[:, 1], segments[:, 2], begins + segments[:, 3], segments[:, 4]], 1)
    places = Places(block.reads[numbers], block.source[numbers], block.mask[numbers] > 0)
    return Rows(
        tokens=block.tokens[numbers],
        positions=block.positions[numbers],
        targets=block.targets[numbers],
        places=block.places[numbers] + np.arange(len(numbers))[:, None] * length,
        mask=block.mask[numbers],
        weights=weights[numbers],
        sequences=np.where(owner >= 0, np.searchsorted(samples, owner), -1),
        samples=samples,
        columns={name: column[numbers] for name, column in block.columns.items()},
        segments=segments[np.argsort(segments[:, 0])],
        extras={name: value_at(places) for name, value_at in block.extras.items()},
        images=[block.images[number] for number in numbers] if block.images else (),
    )
