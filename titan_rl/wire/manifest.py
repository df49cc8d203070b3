"""What a published version consists of, so that a reader can check whether it holds that version.

    run (the plan's copies, for one trainer rank and one reader) -> blocks of whole rows -> a checksum each

A block consists of whole rows of known parameters, so it can be gathered back from a live model and hashed in place.
Checksums have 64 bits: XXH3 on a host; on a GPU, where its serial steps would be slow, a sum of mixed words
(kernels/block_hash.py). They detect accidents, not adversaries. Pure, as the plan is.
"""

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import xxhash

from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import HashKind

T = TypeVar("T")

checksum = xxhash.xxh3_64_intdigest
"""13 GB/s on one core where memcpy reaches 10; it releases the GIL meanwhile."""


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
    """What one run of one publication contains."""

    version: int
    serial: int  # counts publications: a version may be published twice, with other weights before RL begins
    slot: int
    layout: int  # of the run, see layout()
    checksums: tuple[int, ...]  # by block; empty if they are never compared
    digest: int  # of all of the above

    @classmethod
    def of(cls, version: int, serial: int, slot: int, layout: int, checksums: tuple[int, ...]) -> "Manifest":
        return cls(version, serial, slot, layout, checksums, _digest(version, serial, slot, layout, checksums))

    @property
    def intact(self) -> bool:
        return self.digest == _digest(self.version, self.serial, self.slot, self.layout, self.checksums)


class PickledOnce(list[T]):
    """A list that is sent to many processes and pickled for the first of them only: every replica reads from every
    trainer rank, and gets the same lists. Do not change it, or what it contains. It arrives as a plain list."""

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
    seconds: float  # that packing took the slowest rank
    _of: dict[int, PickledOnce[Manifest]] = field(default_factory=dict, compare=False, repr=False)  # by reader

    def of(self, reader: int) -> list[Manifest]:
        """Return the manifests of the runs that a reader reads, in the order of the trainer ranks: the same list for
        all replicas."""
        if reader not in self._of:
            self._of[reader] = PickledOnce(runs[reader] for runs in self.manifests if reader in runs)
        return self._of[reader]


def blocks(copies: Sequence[Copy], most: int) -> tuple[Block, ...]:
    """Cut a run into blocks of at most `most` elements. A row that is longer is a block of its own."""
    found: list[Block] = []
    start, taken, elements = 0, [], 0
    for copy in (part for whole in copies for part in _cut(whole, most)):
        if taken and elements + copy.elements > most:
            found.append(Block(start, elements, tuple(taken)))
            start, taken, elements = start + elements, [], 0
        taken.append(copy)
        elements += copy.elements
    return (*found, Block(start, elements, tuple(taken))) if taken else ()


def layout(copies: Sequence[Copy], dtype: str, block_bytes: int, kind: HashKind = "xxh3") -> int:
    """Hash a run's layout: equal exactly if both ends mean the same rows of the same tensors, in the same order, dtype
    and blocks, and compute the same kind of checksums."""
    hashed = xxhash.xxh3_64((f"{dtype} {block_bytes}" + f" {kind}" * (kind != "xxh3")).encode())
    for copy in copies:
        hashed.update(repr(copy).encode())
    return hashed.intdigest()


def _cut(copy: Copy, most: int) -> Iterator[Copy]:
    """Cut a copy into parts of whole rows, in the order of the run."""
    rows = max(1, most // copy.cols)
    for row in range(0, copy.rows, rows):
        down = {"src_row0": copy.src_row0 + row, "dst_row0": copy.dst_row0 + row}
        yield replace(copy, **down, rows=min(rows, copy.rows - row))


def _digest(version: int, serial: int, slot: int, layout: int, checksums: tuple[int, ...]) -> int:
    return checksum(array("Q", (version % 2**64, serial, slot, layout, *checksums)).tobytes())
