"""Groups to batches: token sequences of any length in microbatches of one shape.

    Group -> samples_of -> Sample -> pack -> one Batch a data-parallel rank, all of equally many [B, L] microbatches

A document of n tokens takes n - 1 places: place i reads tokens[i] and predicts tokens[i + 1], whose mask and sampling
log-prob lie at place i. So a document's first token is read, but is nobody's target.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np

from titan_rl.types import Batch, Group, Rows, Sample

ALIGN = 16  # row lengths are multiples of it: few shapes in a run, and divisible by the usual TP degrees


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """Every rollout of every group, in order."""
    return [Sample(r.tokens, r.mask, r.logprobs, r.advantage) for group in groups for r in group.rollouts]


def pack(samples: Sequence[Sample], *, shards: int, seq_len: int, rows_per_microbatch: int, pad_id: int) -> list[Batch]:
    """The samples as one Batch a shard, all of equally many microbatches of [rows_per_microbatch, L].

    How many: as few as rows of seq_len allow. L: the shortest length at which the samples still fit those rows, since
    an empty place costs what a filled one does. A token whose sampling log-prob is not finite is masked out.
    """
    _check(samples, seq_len)
    places = np.array([max(len(s.tokens) - 1, 0) for s in samples], dtype=np.int64)  # [N]
    round_of_rows = shards * rows_per_microbatch
    rounds = max(-(-_rows_needed(places, seq_len) // round_of_rows), 1)
    slots = rounds * round_of_rows
    rows = _write(samples, places, slots, _shortest(places, seq_len, slots), pad_id)

    # Rows come fullest first and are dealt back and forth, so that shards carry nearly equal tokens.
    deal = np.arange(slots).reshape(-1, shards)
    deal[1::2] = deal[1::2, ::-1].copy()
    hands = deal.T.reshape(shards, rounds, rows_per_microbatch)
    # A denominator, so at least 1: a step without a trained token has loss 0, not nan.
    global_tokens = max(int(rows.mask.sum()), 1)
    return [Batch([_take(rows, numbers) for numbers in hand], global_tokens) for hand in hands]


def fill(batches: Iterable[Batch]) -> float:
    """The share of places that hold a document. (A row's last document is padding if none of it is trained on.)"""
    filled = total = 0
    for rows in chain.from_iterable(batch.microbatches for batch in batches):
        length = rows.positions.shape[1]
        last = length - 1 - np.argmax(rows.positions[:, ::-1] == 0, axis=1)  # [B] where each row's last document begins
        trained = (rows.mask * (np.arange(length) >= last[:, None])).any(axis=1)
        filled += int(np.where(trained, length, last).sum())
        total += rows.positions.size
    return filled / max(total, 1)


def _check(samples: Sequence[Sample], seq_len: int) -> None:
    for i, s in enumerate(samples):
        n = len(s.tokens)
        if not n == len(s.mask) == len(s.logprobs):  # one short list would shift every later sample's training data
            raise ValueError(f"sample {i}: {n} tokens, but {len(s.mask)} mask entries and {len(s.logprobs)} log-probs")
        if n > seq_len + 1:
            raise ValueError(
                f"sample {i}: {n} tokens take {n - 1} places, a packed row has {seq_len}; "
                f"set training.seq_len to at least {n - 1}, or lower rollout.max_new_tokens"
            )


def _best_fit(places: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and offset of each document: longest first, each into the fullest row that has room for it. Deterministic,
    and n log n where first-fit scans every open row."""
    row, offset = np.zeros_like(places), np.zeros_like(places)
    rooms: list[tuple[int, int]] = []  # (free places, row), ascending
    sizes = places.tolist()
    for i in np.argsort(-places, kind="stable").tolist():
        fits = bisect_left(rooms, (sizes[i],))
        room, row[i] = rooms.pop(fits) if fits < len(rooms) else (capacity, len(rooms))
        offset[i] = capacity - room
        insort(rooms, (room - sizes[i], int(row[i])))
    return row, offset


def _rows_needed(places: np.ndarray, capacity: int) -> int:
    return int(_best_fit(places, capacity)[0].max(initial=-1)) + 1


def _shortest(places: np.ndarray, seq_len: int, slots: int) -> int:
    """The shortest aligned row length at which the documents fit `slots` rows; seq_len is known to."""
    least = max(int(places.max(initial=1)), -(-int(places.sum()) // slots))
    lengths = range(-(-least // ALIGN) * ALIGN, seq_len, ALIGN)
    first = bisect_left(lengths, True, key=lambda length: _rows_needed(places, length) <= slots)
    return lengths[first] if first < len(lengths) else seq_len


def _write(samples: Sequence[Sample], places: np.ndarray, slots: int, length: int, pad_id: int) -> Rows:
    """All rows of the step, fullest first, as one [slots, length] block."""
    row, offset = _best_fit(places, length)
    filled = np.bincount(row, weights=places, minlength=slots).astype(np.int64)  # [slots]
    fullest = np.argsort(-filled, kind="stable")
    row = np.argsort(fullest)[row]  # a permutation's argsort is its inverse

    # Per place, [P]: its position in its document, where it goes, and which flat source token it predicts.
    sizes = np.array([len(s.tokens) for s in samples], dtype=np.int64)
    position = np.arange(places.sum()) - np.repeat(places.cumsum() - places, places)
    goes = np.repeat(row * length + offset, places) + position
    target = np.repeat(sizes.cumsum() - sizes, places) + position + 1

    def flat(values: Iterable[Sequence[float]], dtype: type) -> np.ndarray:
        return np.fromiter(chain.from_iterable(values), dtype, count=int(sizes.sum()))

    def block(values: np.ndarray, padding: np.ndarray | float) -> np.ndarray:
        out = np.empty((slots, length), values.dtype)
        out[:] = padding
        out.reshape(-1)[goes] = values
        return out

    tokens = flat((s.tokens for s in samples), np.int64)
    logprobs = flat((s.logprobs for s in samples), np.float32)[target]
    finite = np.isfinite(logprobs)
    return Rows(
        tokens=block(tokens[target - 1], pad_id),
        positions=block(position, np.arange(length) - filled[fullest, None]),  # padding is a document of its own
        targets=block(tokens[target], pad_id),
        mask=block(flat((s.mask for s in samples), np.float32)[target] * finite, 0.0),
        logprobs=block(np.where(finite, logprobs, np.float32(0)), 0.0),
        advantages=block(np.repeat(np.array([s.advantage for s in samples], np.float32), places), 0.0),
    )


def _take(rows: Rows, numbers: np.ndarray) -> Rows:
    return Rows(**{f.name: getattr(rows, f.name)[numbers] for f in fields(Rows)})
