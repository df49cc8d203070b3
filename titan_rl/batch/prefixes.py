"""Decides which places of a packed row samples share: their prompt, and answers that are equal.

    plain     p0 p1 p2 a0 | p0 p1 p2 b0 | p0 p1 p2 a0     the samples p a0 a1, p b0 b1 and p a0 a2
    shared    p0 p1 p2 | a0 | b0                          p2 predicts a0, b0 and a0; a0's place a1 and a2

A segment is a run of places. A prefix is a segment with the prompt. Each answer's segment begins with its first token,
and attends to the prefix and to itself; answers that differ in nothing or in their last token, which no place reads,
have one segment. A target is predicted at a place that has read the same tokens as it would in a separate document: the
results are the same, to rounding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.wire.types import ImagePlace, Sample

PARTS = (1, 2, 4, 8)  # units of at most this part of a row are tried: small ones fill rows and ranks more evenly
MOST_KEYS = 16  # per place of a unit: attention copies a prefix's keys and values for each answer, which takes memory
MOST_TARGETS = 2  # per place of a row: the head takes memory for each


@dataclass(frozen=True, slots=True)
class Targets:
    """Runs of targets, [R] each, in the order of segments: what consecutive places predict for one sample."""

    sample: np.ndarray
    start: np.ndarray  # the place in that sample where the run starts
    length: np.ndarray
    segment: np.ndarray  # with the places that predict the run
    offset: np.ndarray  # in that segment


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments to pack, [G] each. Those of a unit are consecutive, and stay together in one row, in this order."""

    sample: np.ndarray  # whose tokens it has
    start: np.ndarray  # the place in that sample where it starts
    length: np.ndarray  # in places
    prefix: np.ndarray  # the segment that it attends to besides itself; -1: none
    unit: np.ndarray
    targets: Targets

    @property
    def units(self) -> np.ndarray:
        """Return the places that each unit takes."""
        return np.bincount(self.unit, weights=self.length).astype(np.int64)

    @property
    def needs(self) -> np.ndarray:
        """Return the places of a row that each unit needs, so that no row has too many targets."""
        targets = np.bincount(self.unit[self.targets.segment], weights=self.targets.length, minlength=len(self.units))
        return np.maximum(self.units, -(-targets.astype(np.int64) // MOST_TARGETS))


def plain(places: np.ndarray, together: int) -> Layout:
    """Return one segment per sample; `together` consecutive ones are a unit."""
    every = np.arange(len(places))
    none = np.zeros_like(every)
    return Layout(every, none, places, none - 1, every // together, Targets(every, none, places, every, none))


def shared(samples: Sequence[Sample], places: np.ndarray, together: int, seq_len: int) -> list[Layout]:
    """Return layouts whose samples share places, if there are prompts to share. They differ in how large their units
    may get. With `together`, only those consecutive samples share, so that they stay neighbours."""
    groups = _pairs(samples, together) if together > 1 else _groups(samples)
    if all(len(members) == 1 or not prefix for prefix, members in groups):
        return []
    lengths = places.tolist()
    if together > 1:
        return [_layout(groups, lengths)]
    layouts, largest = list[Layout](), seq_len + 1
    for part in PARTS:
        if largest > seq_len // part:  # else it would give the units of the previous part again
            units = [u for g in groups for u in _split(*g, lengths, seq_len // part)]
            layouts.append(_layout(units, lengths))
            largest = int(layouts[-1].needs.max())
    return layouts


Member = tuple[int, bytes]  # a sample, and what its places after the shared prefix read
Group = tuple[int, list[Member]]  # places of the shared prefix, and the samples that share it


def _groups(samples: Sequence[Sample]) -> list[Group]:
    """Return the samples by prompt, in the order of each prompt's first sample. Equal answers are neighbours."""
    by_prompt: dict[tuple[int, bytes], dict[bytes, list[Member]]] = {}
    for i, (sample, prefix) in enumerate(zip(samples, _prefixes(samples), strict=True)):
        tokens = np.asarray(sample.tokens, np.int64)
        key = prefix, _prompt(sample, prefix) if prefix else b"%d" % i
        member = i, _read(sample, prefix, tokens) if prefix else b""
        by_prompt.setdefault(key, {}).setdefault(member[1], []).append(member)
    return [
        (prefix, [m for alike in by_reading.values() for m in alike]) for (prefix, _), by_reading in by_prompt.items()
    ]


def _pairs(samples: Sequence[Sample], together: int) -> list[Group]:
    """Return consecutive samples. They share if their prompts are equal and no answer is empty: none may vanish."""
    groups: list[Group] = []
    prefixes = _prefixes(samples)
    for i in range(0, len(samples), together):
        tokens_of_pair = [np.asarray(sample.tokens, np.int64) for sample in samples[i : i + together]]
        pair = zip(samples[i : i + together], prefixes[i : i + together], strict=True)
        prompts = {_prompt(sample, n) for sample, n in pair}
        prefix = min(prefixes[i : i + together]) if len(prompts) == 1 else 0
        members = [(i + k, _read(samples[i + k], prefix, tokens)) for k, tokens in enumerate(tokens_of_pair)]
        groups.append((prefix, members))
    return groups


def _prompt(sample: Sample, prefix: int) -> bytes:
    """Return what the places of a prefix read: equal tokens may stand for different images."""
    tokens = np.asarray(sample.tokens[:prefix], np.int64)
    return tokens.tobytes() + _named(image for image in sample.images if image.begin < prefix)


def _read(sample: Sample, prefix: int, tokens: np.ndarray) -> bytes:
    """Return what the places after a prefix read."""
    return tokens[prefix:-1].tobytes() + _named(image for image in sample.images if image.begin >= prefix)


def _named(images: Iterable[ImagePlace]) -> bytes:
    return "".join(f" {image.name} {image.begin}" for image in images).encode()


def _prefixes(samples: Sequence[Sample]) -> list[int]:
    """Return the places of each sample that may be shared: none if its answer is empty, or a token of its prompt is
    trained on."""
    trained = np.append(0, np.concatenate([[], *(s.mask for s in samples)]).astype(bool).cumsum())
    sizes, prompts = (np.array(n, np.int64) for n in ([len(s.tokens) for s in samples], [s.prompt for s in samples]))
    begins = sizes.cumsum() - sizes
    free = trained[begins + np.minimum(prompts, sizes)] == trained[begins + np.minimum(prompts, 1)]
    return np.where(free & (prompts < sizes), prompts, 0).tolist()


def _split(prefix: int, members: list[Member], places: list[int], limit: int) -> list[Group]:
    """Cut a group into units that need at most `limit` places. Each has a copy of the prefix."""
    units: list[Group] = []
    size = keys = targets = 0
    last: bytes | None = None  # what the member before reads
    for member in members:
        sample, reads = member
        suffix, answer = places[sample] - prefix, places[sample] - max(prefix - 1, 0)
        if reads != last:
            size, keys = size + suffix, keys + places[sample]
        targets += answer
        if not units or max(size, -(-targets // MOST_TARGETS)) > limit or keys > MOST_KEYS * size:
            units.append((prefix, []))
            size, keys, targets = places[sample], prefix + places[sample], answer
        units[-1][1].append(member)
        last = reads
    return units


def _layout(units: Sequence[Group], places: list[int]) -> Layout:
    segments: list[tuple[int, int, int, int, int]] = []  # the fields of a segment
    targets: list[tuple[int, int, int, int, int]] = []  # the fields of a run of targets
    for unit, (prefix, members) in enumerate(units):
        if len(members) == 1 or not prefix:
            for sample, _ in members:
                targets.append((sample, 0, places[sample], len(segments), 0))
                segments.append((sample, 0, places[sample], -1, unit))
            continue
        head, last = len(segments), None
        segments.append((members[0][0], 0, prefix, -1, unit))
        for sample, reads in members:
            if reads != last:
                segments.append((sample, prefix, places[sample] - prefix, head, unit))
            targets.append((sample, prefix - 1, 1, head, prefix - 1))
            targets.append((sample, prefix, places[sample] - prefix, len(segments) - 1, 0))
            last = reads
    sample, start, length, prefix, unit_of = np.array(segments, np.int64).reshape(-1, 5).T
    return Layout(sample, start, length, prefix, unit_of, Targets(*np.array(targets, np.int64).reshape(-1, 5).T))
