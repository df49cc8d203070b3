"""The trainer's side of a weight sync: this rank's shards, packed for their readers.

    parameters -> shards_of -> (plan) -> Staging.offer, once: where each reader finds its run
    every version:                       Staging.pack: cast, lay out and hash each run

On a GPU runs are packed through a buffer there, in parts, which are hashed while they are copied into the slot.

There are two slots: a version is packed into one while readers may still use the other. The caller of pack() must make
sure that no reader uses its slot: titan_rl.train.weight_sync keeps track of the readers. If the plan has adapters, all
other weights are frozen: they are packed into each slot once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from titan_rl.actors.sync.checksums import checksums_of, gpu_of, kind_on, parts_of
from titan_rl.actors.sync.held_shards import local_tensors
from titan_rl.actors.sync.transport import PACKING, How, Memory, TrainerLink, octets
from titan_rl.kernels.pack_weights import pack, pack_one_by_one
from titan_rl.wire.manifest import Block, Manifest, blocks, checksum, layout
from titan_rl.wire.parts import needed_part
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import SLOTS, HashKind, Offer

Pack = Callable[[Mapping[str, Tensor], Sequence[Copy], Tensor], None]
View = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
SLICE_BYTES = 8 << 20
"""Size of one read over a link: 4 to 8 MiB measured best over Monarch's TCP fallback."""

BUFFER_BYTES = 64 << 20
"""Size of the buffer on a GPU, at least one block: the host prepares a part while the one before is copied."""


@dataclass(frozen=True, slots=True)
class BufferedPart:
    """Consecutive blocks of a run that are packed into the buffer together."""

    first: int  # index of its first block
    start: int  # index of its first element in the run
    elements: int
    copies: tuple[Copy, ...]
    checksums: Callable[[], list[int]]  # hashes its blocks in the buffer


class Staging:
    """Host memory with a contiguous run for every reader in each of two slots, rewritten by pack().

    Parameters are keyed by Hugging Face names (held_shards.local_tensors). Sharded ones are looked up again at every
    pack, because FSDP may swap their storage.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        copies: Mapping[int, tuple[Copy, ...]],
        dtype: torch.dtype,
        *,
        slice_bytes: int = SLICE_BYTES,
        block_bytes: int,
        checksums: bool = True,
        view: View = local_tensors,
    ) -> None:
        """`view` returns this rank's tensors as they are packed (adaptation.py)."""
        for key, nbytes in {"slice_bytes": slice_bytes, "block_bytes": block_bytes}.items():
            if nbytes < dtype.itemsize:
                raise ValueError(f"{key}: expected at least one element of {dtype}, found {nbytes} bytes")
        self._params, self._view = params, view
        local = local_tensors(params)
        if absent := sorted({copy.name for run in copies.values() for copy in run} - set(local)):
            raise ValueError(f"expected parameters for every planned copy, found none for {', '.join(absent)}")
        self._copies = copies
        self._slice_bytes = slice_bytes
        self._checksums = checksums
        named = str(dtype).removeprefix("torch.")
        self._blocks = {reader: blocks(run, block_bytes // dtype.itemsize) for reader, run in copies.items()}
        self._gpu = gpu_of(params.values())
        self._kind: HashKind = kind_on(self._gpu)
        self._layouts = {reader: layout(run, named, block_bytes, self._kind) for reader, run in copies.items()}
        sizes = [dtype.itemsize * sum(copy.elements for copy in run) for run in copies.values()]
        self._memory = Memory(sizes, pinned=self._gpu is not None)
        self.runs = [  # by slot and reader: parts of the memory
            {
                reader: self._memory.bytes[starts[slot] : starts[slot] + nbytes].view(dtype)
                for reader, starts, nbytes in zip(copies, self._memory.starts, sizes, strict=True)
            }
            for slot in range(SLOTS)
        ]
        self._parts: dict[int, list[BufferedPart]] = {}
        if self._gpu is not None:
            self._parts = self._buffered(self._gpu, dtype, BUFFER_BYTES // dtype.itemsize)
        self._adapters = {reader: tuple(copy for copy in run if copy.adapts) for reader, run in copies.items()}
        self._frozen: list[dict[int, list[int]]] = [{}, {}]  # checksums of the frozen blocks in a slot, by reader
        self._link: TrainerLink | None = None

    def forget_frozen(self) -> None:
        """Pack also the frozen weights again, because packed bytes have been damaged."""
        self._frozen = [{}, {}]

    @torch.no_grad()
    def pack(self, version: int, slot: int, serial: int) -> dict[int, Manifest]:
        """Pack the parameters' current values into a slot. Return a manifest of each run."""
        self._memory.stamps[slot] = PACKING
        checksums = self._pack_blocks(slot) if self._gpu is None else self._pack_runs(slot)
        self._memory.stamps[slot] = serial
        for reader, sums in checksums.items():
            if self._adapters[reader]:
                frozen = sum(not block.copies[0].adapts for block in self._blocks[reader])
                self._frozen[slot][reader] = sums[:frozen]
        return {
            reader: Manifest.of(version, serial, slot, self._layouts[reader], tuple(sums))
            for reader, sums in checksums.items()
        }

    def _pack_blocks(self, slot: int) -> dict[int, list[int]]:
        """Pack block by block. Return the checksums of each run."""
        (local, pack), checksums = self._current(), dict[int, list[int]]()
        for reader, run in self.runs[slot].items():
            checksums[reader] = [*self._frozen[slot].get(reader, ())]
            for block in self._blocks[reader][len(checksums[reader]) :]:
                pack(local, block.copies, run[block.start : block.start + block.elements])
                if self._checksums:  # while the block is in the cache
                    checksums[reader].append(checksum(octets(run, block)))
        return checksums

    def _pack_runs(self, slot: int) -> dict[int, list[int]]:
        """Pack part by part into the buffer, and from there copy and hash it. Return the checksums of each run."""
        (local, pack), checksums = self._current(), dict[int, list[int]]()
        for reader, run in self.runs[slot].items():
            checksums[reader] = [*self._frozen[slot].get(reader, ())]
            known = len(checksums[reader])
            for part in self._parts[reader]:
                if part.first < known:
                    continue
                packed = self._buffer[: part.elements]
                pack(local, part.copies, packed)
                torch.cuda.synchronize(self._gpu)  # the hash has a separate stream
                run[part.start : part.start + part.elements].copy_(packed, non_blocking=True)
                checksums[reader] += part.checksums()
        torch.cuda.synchronize(self._gpu)  # readers map a slot as soon as it has its stamp
        return checksums

    def _buffered(self, gpu: torch.device, dtype: torch.dtype, most: int) -> dict[int, list[BufferedPart]]:
        """Allocate the buffer, and cut the runs into parts of `most` elements, or of one block. None has adapters and
        frozen weights."""
        cuts = {reader: [*_cut(every, most)] for reader, every in self._blocks.items()}
        ends = [(part[0].start, part[-1].start + part[-1].elements) for cut in cuts.values() for part in cut]
        largest = max((end - start for start, end in ends), default=0)
        self._buffer = torch.empty(largest, dtype=dtype, device=gpu)

        def buffered(first: int, part: Sequence[Block]) -> BufferedPart:
            start, end = part[0].start, part[-1].start + part[-1].elements
            hashed: Callable[[], list[int]] = list
            if self._checksums:
                windows = [parts_of(self._buffer[block.start - start :], replace(block, start=0)) for block in part]
                hashed = partial(checksums_of(windows, gpu), range(len(part)))
            return BufferedPart(first, start, end - start, tuple(c for b in part for c in b.copies), hashed)

        parts = dict[int, list[BufferedPart]]()
        for reader, cut in cuts.items():
            firsts = accumulate((len(part) for part in cut), initial=0)
            parts[reader] = [buffered(first, part) for first, part in zip(firsts, cut, strict=False)]
        return parts

    def _current(self) -> tuple[Mapping[str, Tensor], Pack]:
        """Return this rank's tensors, and how they are packed: those computed when they are read, one at a time."""
        tensors = self._view(self._params)
        return tensors, pack if isinstance(tensors, dict) else pack_one_by_one

    def offer(self, *, remote: bool, how: How = "auto") -> dict[int, Offer]:
        """Return where each reader finds its run. If any reader is `remote`, the runs are linked, once."""
        if remote and self._link is None:
            make = needed_part("links of trainers", "weight_sync.transport")
            slots = [{reader: list(self._slices(reader, run)) for reader, run in runs.items()} for runs in self.runs]
            self._link = make(self._memory.stamps, slots, how, self._gpu)
        links = self._link.offers if self._link else {}
        return {
            reader: self._memory.offer(i, run.nbytes, self._layouts[reader], links.get(reader), self._kind)
            for i, (reader, run) in enumerate(self.runs[0].items())
        }

    def announce(self, slot: int, serial: int, note: Any, seconds: float) -> None:
        """Begin to send a slot's publication over the link."""
        assert self._link is not None
        self._link.announce(slot, serial, note, seconds)

    async def drop(self) -> None:
        """Make the memory unreachable. Processes that have mapped it keep it; a remote read in progress fails within
        its timeout."""
        link, self._link = self._link, None
        if link is not None:
            await link.drop()
        self._memory.close()

    def _slices(self, reader: int, run: Tensor) -> Iterator[Tensor]:
        """Cut a run into slices, none of which has adapters and frozen weights."""
        frozen = sum(copy.elements for copy in self._copies[reader] if not copy.adapts)
        parts = (run[:frozen], run[frozen:])
        return (part for half in parts for part in half.view(torch.uint8).split(self._slice_bytes) if len(part))


def _cut(blocks: Sequence[Block], most: int) -> Iterator[list[Block]]:
    """Cut a run's blocks into parts of at most `most` elements, or of one block, without frozen weights beside
    adapters."""
    part, elements = list[Block](), 0
    for block in blocks:
        if part and (elements + block.elements > most or block.copies[0].adapts != part[0].copies[0].adapts):
            yield part
            part, elements = [], 0
        part.append(block)
        elements += block.elements
    if part:
        yield part
