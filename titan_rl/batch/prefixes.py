"""Decides which samples share a copy of their prompt in a packed row.

    plain     p0 p1 p2 a0 a1   p0 p1 p2 b0 b1
    shared    p0 p1 | p2 a0 a1 | p2 b0 b1          positions 0 1 | 2 3 4 | 2 3 4

A segment is a run of places of one sample. A prefix is a segment without an owner, which has no targets: the prompt
without its last token. Each answer's segment begins with that last token, whose place predicts the first sampled token,
and attends to the prefix and to itself. So every place still has one target, and every token sees what it would see in
a document of its own: the results are the same, to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.wire.types import Sample

PARTS = (1, 2, 4, 8)  # units of at most this part of a row are tried: small ones fill rows and ranks more evenly
MOST_KEYS = 16  # per place of a unit: attention copies a prefix's keys and values for each answer, which takes memory


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments to pack, [G] each. Those of a unit are consecutive, and stay together in one row, in this order."""

    sample: np.ndarray  # whose tokens it has
    start: np.ndarray  # the place in that sample where it starts
    length: np.ndarray  # in places
    owner: np.ndarray  # the sample that its places answer to; -1: none, it is a prefix
    prefix: np.ndarray  # the segment that it attends to besides itself; -1: none
    unit: np.ndarray

    @property
    def units(self) -> np.ndarray:
        """Return the places that each unit takes."""
        return np.bincount(self.unit, weights=self.length).astype(np.int64)


def plain(places: np.ndarray, together: int) -> Layout:
    """Return one segment per sample; `together` consecutive ones are a unit."""
    every = np.arange(len(places))
    return Layout(every, np.zeros_like(every), places, every, np.full_like(every, -1), every // together)


def shared(samples: Sequence[Sample], places: np.ndarray, together: int, seq_len: int) -> list[Layout]:
    """Return layouts that share prompts, if there are prompts to share. They differ in how large their units may get.
    With `together`, only those consecutive samples share, so that they stay neighbours."""
    groups = _pairs(samples, places, together) if together > 1 else _groups(samples)
    if all(len(members) == 1 or not prefix for prefix, members in groups):
        return []
    lengths = places.tolist()
    if together > 1:
        return [_layout(groups, lengths)]
    layouts, largest = list[Layout](), seq_len + 1
    for part in PARTS:
        if largest > seq_len // part:  # else its units are those of the part before
            units = [u for g in groups for u in _split(*g, lengths, seq_len // part)]
            layouts.append(_layout(units, lengths))
            largest = int(layouts[-1].units.max())
    return layouts


Group = tuple[int, list[int]]  # places of the shared prefix, and the samples that share it


def _groups(samples: Sequence[Sample]) -> list[Group]:
    """Return the samples by prompt, in the order of their first."""
    found: dict[tuple[int, bytes], list[int]] = {}
    for i, (sample, prefix) in enumerate(zip(samples, _prefixes(samples), strict=True)):
        found.setdefault((prefix, _prompt(sample) if prefix else b"%d" % i), []).append(i)
    return [(prefix, members) for (prefix, _), members in found.items()]


def _pairs(samples: Sequence[Sample], places: np.ndarray, together: int) -> list[Group]:
    """Return consecutive samples. They share if their prompts are equal and no answer is empty: none may vanish."""
    groups: list[Group] = []
    prefixes = _prefixes(samples)
    for i in range(0, len(samples), together):
        members = list(range(i, i + together))
        prompts = {_prompt(samples[m]) for m in members}
        prefix = min(prefixes[i : i + together]) if len(prompts) == 1 else 0
        groups.append((prefix if all(places[m] > prefix for m in members) else 0, members))
    return groups


def _prefixes(samples: Sequence[Sample]) -> list[int]:
    """Return the places of each sample that may be shared: none if a token of its prompt is trained on."""
    trained = np.append(0, np.concatenate([[], *(s.mask for s in samples)]).astype(bool).cumsum())
    sizes, prompts = (np.array(n, np.int64) for n in ([len(s.tokens) for s in samples], [s.prompt for s in samples]))
    begins = sizes.cumsum() - sizes
    free = trained[begins + np.minimum(prompts, sizes)] == trained[begins + np.minimum(prompts, 1)]
    return np.where(free, np.maximum(prompts - 1, 0), 0).tolist()


def _prompt(sample: Sample) -> bytes:
    return np.asarray(sample.tokens[: sample.prompt], np.int64).tobytes()


def _split(prefix: int, members: list[int], places: list[int], limit: int) -> list[Group]:
    """Cut a group into units of at most `limit` places. Each has a copy of the prefix."""
    units: list[Group] = []
    size = keys = 0
    for member in members:
        size += places[member] - prefix
        keys += places[member]
        if not units or size > limit or keys > MOST_KEYS * size:
            units.append((prefix, []))
            size, keys = places[member], prefix + places[member]
        units[-1][1].append(member)
    return units


def _layout(units: Sequence[Group], places: list[int]) -> Layout:
    rows: list[tuple[int, int, int, int, int, int]] = []  # the fields of a segment
    for unit, (prefix, members) in enumerate(units):
        start = prefix if len(members) > 1 else 0
        head = -1
        if start:
            head = len(rows)
            rows.append((members[0], 0, start, -1, -1, unit))
        rows += [(m, start, places[m] - start, m, head, unit) for m in members]
    return Layout(*np.array(rows, np.int64).reshape(-1, 6).T)
