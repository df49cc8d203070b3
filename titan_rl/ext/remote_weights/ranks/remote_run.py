"""One run over a link: slices that the memory of this host's readers lacks, by RDMABuffer reads or by a broadcast."""

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from titan_rl.actors.sync.transport import Transport
from titan_rl.ext.remote_weights.ranks.host_memory import EMPTY, HeldRun, Words
from titan_rl.ext.remote_weights.registered import Registered
from titan_rl.wire.manifest import Manifest, checksum
from titan_rl.wire.weight_source import SLOTS, one_sided

if TYPE_CHECKING:
    from monarch.rdma import RDMAAction, RDMABuffer


LANES = 4  # slices in flight where they are passed on one by one


class RemoteRun(Transport):
    """Reads of a run's slices, all in flight together."""

    def __init__(
        self,
        registered: Registered,
        host_run: HeldRun,
        blocks: Sequence[tuple[int, int]],
        *,
        delta: bool,
        name: str = "",
        passes_on: bool = False,
    ) -> None:
        """`blocks` has the bytes of each of the run's blocks, [start, end). With `delta` equal checksums count as equal
        bytes, so that unchanged slices of an earlier publication are not fetched again. `name`: of broadcasts, if they
        come first. If other hosts read the run from this one, it `passes_on` each slice as soon as it is here."""
        self.name = name or one_sided(registered.stamps.backend)
        self.received = 0  # bytes that this reader has fetched
        self._registered = registered
        self._held, self._delta, self._passes_on = host_run, delta, passes_on
        sizes = [part.size() for part in registered.slices[0]]
        self._parts: list[list[tuple[RDMABuffer, Tensor]]] = [
            list(zip(slices, host_run.octets.split(sizes), strict=True)) for slices in registered.slices
        ]
        self._whole = [reads(parts) for parts in self._parts]  # resubmitted: addresses never change
        self._stamps = torch.empty(SLOTS, dtype=torch.int64)
        self._stamp = reads([(registered.stamps, self._stamps.view(torch.uint8))])
        self._found: int | None = None  # the trainer's stamp, if the last read brought another publication
        ends = np.cumsum(sizes)
        firsts, lasts = np.array([first for first, _ in blocks]), np.array([last for _, last in blocks])
        # By block, the slices that it touches; by slice, the blocks. Both are ranges [first, last).
        self._touched = list(
            zip(
                np.searchsorted(ends, firsts, side="right").tolist(),
                np.searchsorted(ends - sizes, lasts, side="left").tolist(),
                strict=True,
            )
        )
        self._touching = list(
            zip(
                np.searchsorted(lasts, ends - sizes, side="right").tolist(),
                np.searchsorted(firsts, ends, side="left").tolist(),
                strict=True,
            )
        )

    def run(self, slot: int) -> Tensor:
        """Return the run's bytes, as the last fetch of any reader of this host left them.  # [nbytes]"""
        return self._held.octets

    async def fetch_blocks(
        self, manifest: Manifest, wanted: Sequence[int], timeout: float, *, again: bool = False
    ) -> None:
        """Fetch the slices of the `wanted` blocks that the memory lacks; with `again`, all of them. The caller holds
        the memory's lock."""
        run, keys, self._found = self._held, self._keys(manifest), None
        if again:
            run.keys[self._slices_of(wanted)] = EMPTY
        missing = self._missing(wanted, keys)
        if missing:
            self._empty(manifest, missing)
            if self._passes_on:
                await self._fetch_singly(manifest, missing, keys, timeout)
                if self._found is not None:
                    return
                missing = []
        if missing:
            parts = self._parts[manifest.slot]
            whole = len(missing) == len(parts)
            action = self._whole[manifest.slot] if whole else reads([parts[part] for part in missing])
            await action.submit(timeout=math.ceil(timeout))
            await self._stamp.submit(timeout=math.ceil(timeout))  # after the bytes: it vouches for them
            self.received += sum(len(parts[part][1]) for part in missing)
            if (stamp := int(self._stamps[manifest.slot])) != manifest.serial:
                self._found = stamp
                return
            run.keys[missing] = keys[missing]
        run.stamp[0] = manifest.serial

    async def _fetch_singly(self, manifest: Manifest, missing: Sequence[int], keys: Words, timeout: float) -> None:
        """Fetch slices one by one, so that each can be passed on while the next ones come."""
        parts, waiting = self._parts[manifest.slot], iter(missing)

        async def fetch_in_turn() -> None:
            stamps = torch.empty(SLOTS, dtype=torch.int64)
            stamp = reads([(self._registered.stamps, stamps.view(torch.uint8))])
            for part in waiting:
                await reads([parts[part]]).submit(timeout=math.ceil(timeout))
                await stamp.submit(timeout=math.ceil(timeout))  # after the bytes: it vouches for them
                self.received += len(parts[part][1])
                if (found := int(stamps[manifest.slot])) != manifest.serial:
                    self._found = found
                    return
                self._held.keys[part] = keys[part]

        await asyncio.gather(*(fetch_in_turn() for _ in range(min(LANES, len(missing)))))

    def await_relayed(self, manifest: Manifest, wanted: Sequence[int]) -> Mapping[int, int]:
        """Return the key of each slice that the memory lacks and that one of the `wanted` blocks needs. They are marked
        as no publication's. The caller holds the memory's lock."""
        keys = self._keys(manifest)
        missing = self._missing(wanted, keys)
        if missing:
            self._empty(manifest, missing)
        return {part: int(keys[part]) for part in missing}

    def place_of(self, part: int) -> Tensor:
        """Return the bytes of a slice."""
        return self._parts[0][part][1]

    def relayed(self, part: int, key: int) -> None:
        """Mark a slice as the one with this key."""
        self.received += len(self.place_of(part))
        self._held.keys[part] = key

    def missing(self, manifest: Manifest, wanted: Sequence[int]) -> list[bool]:
        """Return, by slice, whether the memory lacks it and one of the `wanted` blocks needs it."""
        missing = set(self._missing(wanted, self._keys(manifest)))
        return [part in missing for part in range(len(self._touching))]

    def expect(self, manifest: Manifest, parts: Sequence[int]) -> list[Tensor]:
        """Return where a broadcast puts these slices and the slot's stamp, which follows them. The caller holds the
        memory's lock, and ends with `arrived` if all of them have come."""
        self._empty(manifest, parts)
        targets = self._parts[manifest.slot]
        stamp = self._stamps[manifest.slot : manifest.slot + 1].view(torch.uint8)
        return [*(targets[part][1] for part in parts), stamp]

    def arrived(self, manifest: Manifest, parts: Sequence[int]) -> None:
        """Mark slices as a publication's, if the stamp that followed them was its serial."""
        targets = self._parts[manifest.slot]
        self.received += sum(len(targets[part][1]) for part in parts)
        if int(self._stamps[manifest.slot]) == manifest.serial:
            self._held.keys[parts] = self._keys(manifest)[parts]

    def stamp(self, slot: int) -> int:
        """Return the publication that the run holds now. If the trainer's slot had another one when this reader read
        it, return that."""
        return int(self._held.stamp[0]) if self._found is None else self._found

    def _slices_of(self, blocks: Sequence[int]) -> list[int]:
        return sorted({part for block in blocks for part in range(*self._touched[block])})

    def _missing(self, wanted: Sequence[int], keys: Words) -> list[int]:
        return [part for part in self._slices_of(wanted) if self._held.keys[part] != keys[part]]

    def _empty(self, manifest: Manifest, parts: Sequence[int]) -> None:
        """Mark slices as no publication's: they are about to change."""
        if self._held.stamp[0] != manifest.serial:
            self._held.stamp[0] = EMPTY
        self._held.keys[parts] = EMPTY

    def _keys(self, manifest: Manifest) -> Words:
        """Return the keys of slices that hold this publication.  # [slices]"""
        if not self._delta:
            return np.full(len(self._touching), manifest.serial, np.uint64)
        sums = array("Q", manifest.checksums)
        return np.array([checksum(sums[first:last].tobytes()) for first, last in self._touching], np.uint64)


def reads(parts: "Sequence[tuple[RDMABuffer, Tensor]]") -> "RDMAAction":
    from monarch.rdma import RDMAAction  # where every reader maps the memory, Monarch is not needed

    action = RDMAAction()
    for source, target in parts:
        action.read_remote(target, source)
    return action
