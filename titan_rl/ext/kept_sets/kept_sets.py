"""Kept sets: of each sampled token, the tokens that top_p, top_k and min_p left to choose from.

A set travels as bytes, which hold uint32 words:

    none                  the whole vocabulary: nothing was dropped
    ids, ascending        4 bytes per kept token
    BITS, then a mask     one bit per token of the vocabulary, where that is shorter
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from titan_rl.wire.side_columns import Places, RankPart, SideColumn, check_lengths
from titan_rl.wire.types import Branch, Rollout, Sample, Turn

BITS = 2**32 - 1  # no id
WORD = np.dtype("<u4")
MASK = np.array(BITS, WORD).tobytes()


def packed(kept: np.ndarray) -> bytes:
    """Return a set, given as one bool per token of the vocabulary."""
    ids = np.flatnonzero(kept)
    if len(ids) == len(kept):
        return b""
    if len(ids) <= 1 + -(-len(kept) // 32):
        return ids.astype(WORD).tobytes()
    mask = np.packbits(kept, bitorder="little").tobytes()
    return MASK + mask + bytes(-len(mask) % 4)


def size_of(kept: bytes) -> int:
    """Return the number of tokens in a set, 0 for the whole vocabulary."""
    if not kept.startswith(MASK):
        return len(kept) // WORD.itemsize
    return int(np.bitwise_count(np.frombuffer(kept, WORD)[1:]).sum())


@dataclass(frozen=True, slots=True)
class KeptSets:
    """One set per entry, end to end: of each token of a sample, or of each place of a microbatch."""

    sizes: np.ndarray  # [N] int64, in words
    words: np.ndarray  # [sum of sizes] uint32

    @classmethod
    def of(cls, sets: Sequence[bytes]) -> "KeptSets":
        sizes = np.fromiter((len(kept) // WORD.itemsize for kept in sets), np.int64, len(sets))
        return cls(sizes, np.frombuffer(b"".join(sets), WORD))

    @classmethod
    def whole(cls, entries: int) -> "KeptSets":
        return cls(np.zeros(entries, np.int64), np.zeros(0, WORD))

    @classmethod
    def joined(cls, parts: Sequence["KeptSets"]) -> "KeptSets":
        return cls(np.concatenate([p.sizes for p in parts]), np.concatenate([p.words for p in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, entries: np.ndarray) -> "KeptSets":
        """Return the sets of these entries, [M], in their order."""
        sizes = self.sizes[entries]
        begins = (self.sizes.cumsum() - self.sizes)[entries]
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        return KeptSets(sizes, self.words[np.repeat(begins, sizes) + within])

    def only(self, entries: np.ndarray) -> "KeptSets":
        """Return the sets, but keep the whole vocabulary where `entries`, [N] bool, is false."""
        return KeptSets(np.where(entries, self.sizes, 0), self.words[np.repeat(entries, self.sizes)])

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each entry's number of ids, [N], and all ids; an entry without ids keeps the whole vocabulary."""
        begins = self.sizes.cumsum() - self.sizes
        masks = [i for i in np.flatnonzero(self.sizes) if self.words[begins[i]] == BITS]
        if not masks:
            return self.sizes, self.words.astype(np.int64)
        sizes, parts = self.sizes.copy(), np.split(self.words.astype(np.int64), begins[1:])
        for i in masks:
            mask = self.words[begins[i] + 1 : begins[i] + self.sizes[i]].view(np.uint8)
            parts[i] = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            sizes[i] = len(parts[i])
        return sizes, np.concatenate(parts)


class KeptColumn(SideColumn):
    """Of completions the set of each sampled token, of samples `KeptSets` for all tokens, of rows for all targets."""

    def of_branches(self, branches: Sequence[Branch]) -> list[KeptSets | None]:
        """Return the sets, the whole vocabulary where the mask is 0."""
        return [_of_turns(branch.turns) for branch in branches]

    def packed(self, samples: Sequence[Sample]) -> Callable[[Places], KeptSets]:
        check_lengths("kept", samples)
        sets = KeptSets.joined([_joined(samples), KeptSets.whole(1)])
        return lambda places: sets.take(np.where(places.on, places.targets, -1).ravel())

    def on_device(self, value: KeptSets, part: RankPart) -> tuple[Any, Any]:
        """Return each target's number of ids, [B * T], and all ids."""
        counts, ids = (value if part.own is None else value.only(part.own.ravel())).ids()
        return part.to(counts), part.to(ids)

    def arrays(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        sets = _joined(samples)
        return {"kept_sizes": sets.sizes, "kept_words": sets.words}

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> list[KeptSets]:
        sets, ends = KeptSets(arrays["kept_sizes"], arrays["kept_words"]), arrays["length"].cumsum()
        return [sets.take(np.arange(end - n, end)) for end, n in zip(ends, arrays["length"], strict=True)]

    def after_context(self, value: KeptSets, context: int, read: int) -> KeptSets:
        return KeptSets.joined([KeptSets.whole(read), value.take(np.arange(context, len(value)))])

    def logged(self, rollout: Rollout) -> list[int]:
        return [size_of(kept) for kept in _sampled(rollout)]

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        sizes = np.array([size for rollout in rollouts for size in self.logged(rollout)])
        cut = sizes[sizes > 0]
        return {"kept/mean": float(cut.mean()) if cut.size else 0.0, "kept/whole": float((sizes == 0).mean())}


def _of_turns(turns: Sequence[Turn]) -> KeptSets | None:
    if not any(turn.completion.extras.get("kept") for turn in turns):
        return None
    parts = ([b""] * len(turn.context) + turn.completion.extras.get("kept", []) for turn in turns)
    return KeptSets.of(list(chain.from_iterable(parts)))


def _joined(samples: Sequence[Sample]) -> KeptSets:
    return KeptSets.joined([s.extras.get("kept") or KeptSets.whole(len(s.tokens)) for s in samples])


def _sampled(rollout: Rollout) -> Iterable[bytes]:
    turns = chain.from_iterable(branch.turns for branch in rollout.branches)
    return chain.from_iterable(turn.completion.extras.get("kept", []) for turn in turns)


KEPT = KeptColumn()
