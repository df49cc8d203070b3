"""Contents of a published version, against which a reader checks its weights.

    run (the plan's copies, for one trainer rank and one reader) -> blocks of whole rows -> a checksum each

A block consists of whole rows of known parameters, so it can be gathered back from a live model and hashed in place.
Checksums have 64 bits: XXH3 on a host; on a GPU, where its serial steps would be slow, a sum of mixed words
(kernels/block_hash.py). They detect accidents, not adversaries. Pure, as the plan is.
"""

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import xxhash

from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import NO_NOTES, HashKind, Notes

T = TypeVar("T")

checksum = xxhash.xxh3_64_intdigest
"""Faster than memcpy, and releases the GIL."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive elements of a run: whole rows of `copies`."""

    start: int  # index of the first element in the run
    elements: int
    copies: tuple[Copy, ...]

    @property
    def params(self) -> str:
        return ", ".join(dict.fromkeys(copy.param for copy in self.copies))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of one run of one publication."""

    version: int
    serial: int  # counts publications: a version may be published twice, with other weights before RL begins
    slot: int
    layout: int  # hash of the run's layout, see layout()
    checksums: tuple[int, ...]  # one per block; empty if they are never compared
    digest: int  # hash of all the above

    @classmethod
    def of(cls, version: int, serial: int, slot: int, layout: int, checksums: tuple[int, ...]) -> "Manifest":
        return cls(version, serial, slot, layout, checksums, _digest(version, serial, slot, layout, checksums))

    @property
    def intact(self) -> bool:
        return self.digest == _digest(self.version, self.serial, self.slot, self.layout, self.checksums)


class PickledOnce(list[T]):
    """A list that is pickled once for many receivers: every replica gets the same sources, which are long. Neither it
    nor its items may change. It arrives as a plain list."""

    def __init__(self, values: Iterable[T]) -> None:
        super().__init__(values)
        self._pickled: bytes | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._pickled is None:
            self._pickled = pickle.dumps(list(self), protocol=pickle.HIGHEST_PROTOCOL)
        return pickle.loads, (self._pickled,)


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that every trainer rank has packed into the same slot."""

    version: int
    slot: int
    manifests: list[dict[int, Manifest]]  # by trainer rank, then by reader
    seconds: float  # to pack, on the slowest rank
    notes: Notes = NO_NOTES  # how it is sent

    def of(self, reader: int) -> list[Manifest]:
        """Return the manifests of the runs that a reader reads, in the order of the trainer ranks."""
        return [runs[reader] for runs in self.manifests if reader in runs]


def blocks(copies: Sequence[Copy], max_elements: int) -> tuple[Block, ...]:
    """Cut a run into blocks of at most `max_elements`. A longer row is a whole block. None has parts of an adapter and
    frozen weights, which need not be sent again."""
    result: list[Block] = []
    start, parts, elements = 0, [], 0
    for copy in (part for whole in copies for part in _cut(whole, max_elements)):
        if parts and (elements + copy.elements > max_elements or copy.adapts != parts[-1].adapts):
            result.append(Block(start, elements, tuple(parts)))
            start, parts, elements = start + elements, [], 0
        parts.append(copy)
        elements += copy.elements
    return (*result, Block(start, elements, tuple(parts))) if parts else ()


def layout(copies: Sequence[Copy], dtype: str, block_bytes: int, kind: HashKind = "xxh3") -> int:
    """Hash a run's layout: equal exactly if both ends mean the same rows of the same tensors, in the same order, dtype
    and blocks, and compute the same kind of checksums."""
    hashed = xxhash.xxh3_64((f"{dtype} {block_bytes}" + f" {kind}" * (kind != "xxh3")).encode())
    for copy in copies:
        hashed.update(repr(copy).encode())
    return hashed.intdigest()


def _cut(copy: Copy, max_elements: int) -> Iterator[Copy]:
    """Cut a copy into parts of whole rows, in the order of the run."""
    rows = max(1, max_elements // copy.cols)
    for row in range(0, copy.rows, rows):
        down = {"src_row0": copy.src_row0 + row, "dst_row0": copy.dst_row0 + row}
        yield replace(copy, **down, rows=min(rows, copy.rows - row))


def _digest(version: int, serial: int, slot: int, layout: int, checksums: tuple[int, ...]) -> int:
    return checksum(array("Q", (version % 2**64, serial, slot, layout, *checksums)).tobytes())
