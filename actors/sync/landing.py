"""The generator's side of a weight sync: fetch a publication, write it into vLLM's parameters, and verify that they
hold it.

    fetch_weights -> check layout, slot and (verify = "transfer") every byte against the manifests   during sampling
    write_weights -> in place; (verify = "live") gather the parameters back and compare              between two steps

An engine with quantized weights gets whole rows instead, which are quantized as they are written (row_writer.py).

A wrong block is fetched and written a second time, and then refused by name. Replicas, tensor-parallel ranks and
restarted processes all use the same code: a Landing knows one rank's parameters and the runs that it reads.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_rl.actors.sync.checksums import checksums_of, gpu_of, kind_on, parts_of
from titan_rl.actors.sync.row_writer import RowWriter
from titan_rl.actors.sync.transport import ReaderLink, Shared, Transport, is_remote
from titan_rl.config.choices import Quantization
from titan_rl.config.sections import WeightSyncSection
from titan_rl.kernels.pack_weights import window
from titan_rl.wire import failpoints
from titan_rl.wire.errors import WeightsRefused
from titan_rl.wire.manifest import Manifest, blocks, layout
from titan_rl.wire.parts import needed_part
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.weight_plan import Copy
from titan_rl.wire.weight_source import Connection, HostCopy, Source

WRITE_BYTES = 64 << 20  # at most, of one copy into the parameters: a strided one takes as much of a GPU for a moment


class Landing:
    """Brings a publication into the parameters of one rank. fetch_weights() may overlap with sampling; write_weights()
    must not."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        sources: Sequence[Source],
        sync: WeightSyncSection | None = None,
        reader: str = "reader",
        siblings: Sequence[HostCopy] = (),
        quantization: Quantization = "none",
    ) -> None:
        """`reader` names this rank in errors. `siblings` are ranks of other replicas that read the same, with which it
        shares remote reads if they are on its host."""
        self._sync = sync or WeightSyncSection()
        self._reader = reader
        self._adapters = any(copy.adapts for source in sources for copy in source.copies)
        self._writer: RowWriter | None = None
        if quantization != "none":
            self._writer = needed_part("quantized rows", "generator.quantization")(params, quantization)
        params = self._writer.planned if self._writer else params
        self._runs = [_Run(params, source, self._writer) for source in sources]
        self._far = [run for run in self._runs if is_remote(run.source.offer.place, self._sync.transport)]
        self._link: ReaderLink | None = self._linked(siblings) if self._far else None
        linked = iter(self._link.runs if self._link else ())
        for run in self._runs:
            shared = None if run in self._far else Shared(run.source.offer, pinned=run.gpu is not None)
            run.connect(params, shared or next(linked), self._sync)
        if self._writer and self._runs:
            self._writer.connect([run.source.copies for run in self._runs], [run.by_slot for run in self._runs])
        self._announced: list[Manifest] | None = None  # fetched completely, to be written
        self._wanted: list[list[int]] = []  # by run: the blocks that differ from what the parameters hold
        self._held: list[tuple[int, ...]] | None = None  # checksums of what the parameters hold; None: unknown

    @property
    def connection(self) -> Connection:
        names, link = [run.transport.name for run in self._runs], self._link
        return Connection(names, link.copy, link.senders, link.relay) if link else Connection(names, None)

    def _linked(self, siblings: Sequence[HostCopy]) -> ReaderLink:
        """Link this reader to the trainer ranks whose memory it cannot map."""
        sources, spans = [run.source for run in self._far], [run.spans for run in self._far]
        make, gpu = needed_part("links of readers", "weight_sync.transport"), self._far[0].gpu
        return make(sources, spans, sync=self._sync, reader=self._reader, siblings=siblings, gpu=gpu)

    def leave(self) -> None:
        """Let no fetch in progress wait for the other readers of this host: another landing takes over."""
        if self._link is not None:
            self._link.leave()

    @property
    def _everything(self) -> list[list[int]]:
        """Return all blocks, by run."""
        return [list(range(len(run.blocks))) for run in self._runs]

    @property
    def _received(self) -> int:
        return self._link.received if self._link else 0

    @property
    def _relayed(self) -> int:
        return self._link.relayed if self._link else 0

    async def fetch_weights(self, manifests: Sequence[Manifest], timeout: float, note: Any = None) -> ReaderCost:
        """Fetch every run. Fails within `timeout` seconds if a source is gone. With a note, the link has them sent."""
        began, before, relayed, self._announced = time.perf_counter(), self._received, self._relayed, None
        await failpoints.reached("read")
        if len(manifests) != len(self._runs):
            raise WeightsRefused(f"expected manifests of {len(self._runs)} runs, found {len(manifests)}")
        for run, manifest in zip(self._runs, manifests, strict=True):
            run.check(manifest, sums=self._sync.verify != "off" or self._sync.delta)
        self._wanted = self._changed(manifests)
        # A row is quantized whole: this host's memory must have all of it, of which only changed slices are fetched.
        needed = self._everything if self._writer is not None else self._wanted
        fell_back = await self._fetch(manifests, needed, timeout, note=note)
        verify = await self._verify_transfer(manifests, needed, timeout) if self._sync.verify == "transfer" else 0.0
        self._announced = list(manifests)
        return ReaderCost(
            read=time.perf_counter() - began - verify,
            verify=verify,
            bytes=sum(run.nbytes(wanted) for run, wanted in zip(self._runs, self._wanted, strict=True)),
            changed=sum(map(len, self._wanted)),
            blocks=sum(len(run.blocks) for run in self._runs),
            remote=self._received - before,
            relayed=self._relayed - relayed,
            fell_back=fell_back,
        )

    async def write_weights(self, timeout: float, version: int | None = None) -> ReaderCost:
        """Overwrite the live parameters with the fetched bytes. Until this returns they hold no version. `version`: the
        one that the caller will serve, which every manifest must name."""
        if self._announced is None:
            raise RuntimeError("expected a completed fetch_weights() before write_weights(), found none")
        if strange := {each.version for each in self._announced} - {version} if version is not None else set():
            raise WeightsRefused(f"expected manifests of version {version}, found {', '.join(map(str, strange))}")
        manifests, self._announced, self._held = self._announced, None, None
        began, before, fell_back = time.perf_counter(), self._received, ""
        self._put(manifests, self._wanted)
        written = time.perf_counter()
        if self._sync.verify == "live" and any(wrong := self._strange(manifests)):
            fell_back = await self._fetch(manifests, wrong, timeout, again=True)
            self._put(manifests, wrong)
            if self._writer is not None:
                self._refuse_quantized(manifests, self._writer)
            else:
                self._refuse(manifests, self._strange(manifests), "in the live parameters")
        self._held = [manifest.checksums for manifest in manifests]
        verify = time.perf_counter() - written
        remote = self._received - before
        return ReaderCost(write=written - began, verify=verify, remote=remote, fell_back=fell_back)

    def forget(self) -> None:
        """Mark the parameters as empty: the next fetch must be a whole one, and an earlier fetch is void."""
        self._held = self._announced = None

    async def _verify_transfer(
        self, manifests: Sequence[Manifest], needed: Sequence[list[int]], timeout: float
    ) -> float:
        """Return the seconds it took. Hashes on another thread: hashing releases the GIL, so sampling continues."""
        began = time.perf_counter()
        if any(wrong := await asyncio.to_thread(self._damaged, manifests, needed)):
            await self._fetch(manifests, wrong, timeout, again=True)
            self._refuse(manifests, await asyncio.to_thread(self._damaged, manifests, wrong), "as transferred")
        return time.perf_counter() - began

    def _changed(self, manifests: Sequence[Manifest]) -> list[list[int]]:
        """Return the blocks to fetch, by run: all of them if what the parameters hold is unknown, or if most changed.
        With adapters, only changed blocks."""
        everything = self._everything
        if not self._sync.delta or self._held is None:
            return everything
        changed = [
            [i for i, (old, new) in enumerate(zip(old_sums, manifest.checksums, strict=True)) if old != new]
            for old_sums, manifest in zip(self._held, manifests, strict=True)
        ]
        return changed if self._adapters or 2 * sum(map(len, changed)) <= sum(map(len, everything)) else everything

    async def _fetch(
        self,
        manifests: Sequence[Manifest],
        wanted: Sequence[list[int]],
        timeout: float,
        *,
        again: bool = False,
        note: Any = None,
    ) -> str:
        """Fetch blocks that are not mapped and that no other reader of this host has fetched; with `again`, also those
        that one has. Return why they were not sent despite the note, or ""."""
        each = zip(self._runs, manifests, wanted, strict=True)
        far = [(manifest, indices) for run, manifest, indices in each if run in self._far]
        fell_back = await self._link.fetch(far, timeout, again=again, note=note) if self._link else ""
        self._check_stamps(manifests, wanted)
        return fell_back

    @torch.no_grad()
    def _put(self, manifests: Sequence[Manifest], wanted: Sequence[list[int]]) -> None:
        try:
            if self._writer is not None:
                blocks = (run.blocks[i] for run, indices in zip(self._runs, wanted, strict=True) for i in indices)
                groups = self._writer.of(copy for block in blocks for copy in block.copies)
                self._writer.write(groups, [manifest.slot for manifest in manifests])
            else:
                for run, manifest, indices in zip(self._runs, manifests, wanted, strict=True):
                    run.put(manifest.slot, indices)
        finally:  # even a failed write leaves no copy reading a slot, which may be packed again from here on
            for gpu in {run.gpu for run in self._runs if run.gpu is not None}:
                torch.cuda.synchronize(gpu)
        self._check_stamps(manifests, wanted)  # mapped memory was read just now, by the write: check its stamp again

    def _check_stamps(self, manifests: Sequence[Manifest], wanted: Sequence[list[int]]) -> None:
        for run, manifest, indices in zip(self._runs, manifests, wanted, strict=True):
            if indices and (stamp := run.transport.stamp(manifest.slot)) != manifest.serial:
                raise WeightsRefused(
                    f"trainer rank {run.source.trainer_rank} -> {self._reader}, version {manifest.version}: expected "
                    f"publication {manifest.serial} in slot {manifest.slot}, found {stamp or 'it being packed'}"
                )

    def _damaged(self, manifests: Sequence[Manifest], wanted: Sequence[list[int]]) -> list[list[int]]:
        """Return, by run, which of the wanted blocks differ from the packed bytes."""
        return [
            [
                i
                for i, checksum in zip(indices, run.transferred(manifest.slot, indices), strict=True)
                if checksum != manifest.checksums[i]
            ]
            for run, manifest, indices in zip(self._runs, manifests, wanted, strict=True)
        ]

    def _strange(self, manifests: Sequence[Manifest]) -> list[list[int]]:
        """Return, by run, the blocks whose live bytes differ from the manifest, whether or not this sync wrote them."""
        if self._writer is not None:
            return self._unlike_fetched(manifests, self._writer)
        return [
            [
                i
                for i, (checksum, sent) in enumerate(zip(run.live(), manifest.checksums, strict=True))
                if checksum != sent
            ]
            for run, manifest in zip(self._runs, manifests, strict=True)
        ]

    def _unlike_fetched(self, manifests: Sequence[Manifest], writer: RowWriter) -> list[list[int]]:
        """Return, by run, the blocks whose fetched bytes differ from the manifest, or whose rows in the parameters are
        not the quantization of the fetched bytes."""
        damaged = self._damaged(manifests, self._everything)
        different = {group.place for group in writer.different([manifest.slot for manifest in manifests])}
        return [
            [
                i
                for i, block in enumerate(run.blocks)
                if i in wrong or (different and any(group.place in different for group in writer.of(block.copies)))
            ]
            for run, wrong in zip(self._runs, map(set, damaged), strict=True)
        ]

    def _refuse_quantized(self, manifests: Sequence[Manifest], writer: RowWriter) -> None:
        self._refuse(manifests, self._damaged(manifests, self._everything), "as transferred")
        if different := writer.different([manifest.slot for manifest in manifests]):
            raise WeightsRefused(
                f"{self._reader}, version {manifests[0].version}: expected the {writer.quantization} quantization of "
                f"the fetched bytes in {different[0].place}, found other bytes twice; {len(different)} groups of rows "
                "are wrong"
            )

    def _refuse(self, manifests: Sequence[Manifest], wrong: Sequence[list[int]], where: str) -> None:
        for run, manifest, indices in zip(self._runs, manifests, wrong, strict=True):
            for i in indices:
                raise WeightsRefused(
                    f"trainer rank {run.source.trainer_rank} -> {self._reader}, version {manifest.version}: expected "
                    f"checksum {manifest.checksums[i]:016x} of block {i} ({run.place(i)}) {where}, found another one "
                    f"twice; {sum(map(len, wrong))} blocks are wrong"
                )


class _Run:
    """One source's run, its transport, and the places in the live parameters that it fills."""

    transport: Transport  # once connected

    def __init__(self, params: Mapping[str, Tensor], source: Source, writer: RowWriter | None) -> None:
        _check_fit(params, source, writer)
        self.source = source
        self._quantized = writer is not None
        self.gpu = gpu_of(params.values())
        dtype, kind = getattr(torch, source.dtype), kind_on(self.gpu)
        if source.offer.kind != kind:
            raise ValueError(
                f"trainer rank {source.trainer_rank}: expected {kind} checksums, as this reader computes them, found "
                f"{source.offer.kind}; trainers and generators must both be on GPUs, or neither ([hosts] device)"
            )
        self.blocks = blocks(source.copies, source.block_bytes // dtype.itemsize)
        self._layout = layout(source.copies, source.dtype, source.block_bytes, kind)
        if source.offer.layout != self._layout:
            raise ValueError(
                f"trainer rank {source.trainer_rank}: expected layout {self._layout:016x}, as planned for this reader, "
                f"found {source.offer.layout:016x}"
            )
        self._dtype, self._itemsize = dtype, dtype.itemsize

    def connect(self, params: Mapping[str, Tensor], transport: Transport, sync: WeightSyncSection) -> None:
        """Prepare to read."""
        offer, copies, self.transport = self.source.offer, self.source.copies, transport
        self.by_slot = runs = [self.transport.run(slot).view(self._dtype) for slot in range(len(offer.starts))]
        # Views, made once, of each block's copies, and of the same copies in pieces as large as they are written.
        self._parts = [[parts_of(run, block) for block in self.blocks] for run in runs]  # by slot
        self._places = [_windows(params, block.copies) for block in self.blocks]
        pieces = blocks(copies, WRITE_BYTES // self._itemsize)
        places = [place for piece in pieces for place in _windows(params, piece.copies)]
        self._whole = [
            list(zip(places, (part for piece in pieces for part in parts_of(run, piece)), strict=True)) for run in runs
        ]
        # Quantized parameters are compared with the fetched bytes, and those with the manifest (row_writer.py).
        live = self._parts if self._quantized else [self._places]
        hashed = {"live": live, "transfer": self._parts, "off": []}[sync.verify]
        self._checksums = [checksums_of(parts, self.gpu) for parts in hashed]

    def check(self, manifest: Manifest, *, sums: bool) -> None:
        where = f"trainer rank {self.source.trainer_rank}, version {manifest.version}"
        if not manifest.intact:
            raise WeightsRefused(f"{where}: expected a manifest with digest {manifest.digest:016x}, found another one")
        if manifest.layout != self._layout:
            raise WeightsRefused(f"{where}: expected layout {self._layout:016x}, found {manifest.layout:016x}")
        if sums and len(manifest.checksums) != len(self.blocks):
            raise WeightsRefused(
                f"{where}: expected checksums of {len(self.blocks)} blocks, found {len(manifest.checksums)}"
            )

    def put(self, slot: int, wanted: Sequence[int]) -> None:
        """Write blocks into the parameters. A GPU may not have read them yet when this returns."""
        for place, part in self._copies(slot, wanted):
            place.copy_(part, non_blocking=self.gpu is not None)
            if failpoints.hit("put"):
                place.neg_()

    def _copies(self, slot: int, wanted: Sequence[int]) -> Iterable[tuple[Tensor, Tensor]]:
        if len(wanted) == len(self.blocks):
            return self._whole[slot]
        return (pair for i in wanted for pair in zip(self._places[i], self._parts[slot][i], strict=True))

    def transferred(self, slot: int, wanted: Sequence[int]) -> list[int]:
        """Return checksums of the bytes that arrived. For verify = "transfer"."""
        return self._checksums[slot](wanted)

    def live(self) -> list[int]:
        """Return the checksums of the parameters. For verify = "live"."""
        return self._checksums[0](range(len(self.blocks)))

    def nbytes(self, wanted: Sequence[int]) -> int:
        return sum(self.blocks[i].elements for i in wanted) * self._itemsize

    def place(self, block: int) -> str:
        start, end = self._span(block)
        return f"bytes {start} to {end - 1} of its run: {self.blocks[block].params}"

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [self._span(i) for i in range(len(self.blocks))]

    def _span(self, block: int) -> tuple[int, int]:
        """Return the block's bytes in the run, [start, end)."""
        start = self.blocks[block].start * self._itemsize
        return start, start + self.nbytes([block])


def _windows(params: Mapping[str, Tensor], copies: Iterable[Copy]) -> list[Tensor]:
    return [window(params[copy.param], copy, copy.dst_row0, copy.dst_col0) for copy in copies]


def _check_fit(params: Mapping[str, Tensor], source: Source, writer: RowWriter | None) -> None:
    dtype = getattr(torch, source.dtype)
    if source.offer.nbytes != source.nbytes:
        raise ValueError(
            f"trainer rank {source.trainer_rank}: expected {source.nbytes} bytes for its copies in {source.dtype}, "
            f"found {source.offer.nbytes}"
        )
    for copy in source.copies:
        if copy.param not in params:
            raise ValueError(f"{copy.param}: expected in the live model, which has no such parameter")
        param = params[copy.param]
        rows = copy.dst_row0 + copy.rows
        cols = copy.dst_col0 + copy.cols
        height, width = (param.shape[:-1].numel(), param.shape[-1]) if param.dim() > 1 else (*param.shape, 1)
        if rows > height or cols > width:
            raise ValueError(f"{copy.param}: expected at least {rows} x {cols}, found shape {tuple(param.shape)}")
        stored = writer.stored(copy.param) if writer else None
        if stored is not None and param.dtype != stored:
            raise ValueError(f"{copy.param}: expected {stored} for generator.quantization, found {param.dtype}")
        if stored is None and param.dtype != dtype:
            raise ValueError(f"{copy.param}: expected {source.dtype} as staged by the trainer, found {param.dtype}")
