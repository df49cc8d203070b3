"""The trainer's side of a weight sync: what this rank holds, and its bytes packed for its readers.

    parameters -> shards_of -> (plan) -> Staging.offer, once: where each reader finds its run
    every version:                       Staging.pack: cast, lay out and hash each run

There are two slots: a version is packed into one while readers may still use the other. No reader may use the slot that
pack() is given; titan_rl.train.weight_sync alone keeps track of the readers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from monarch.rdma import RDMABuffer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from titan_rl.actors.sync.checksums import checksums_of, gpu_of, kind_on, parts_of
from titan_rl.actors.sync.transport import PACKING, SLOTS, Memory, octets
from titan_rl.actors.titan.private import StridedShard
from titan_rl.kernels.pack_weights import Cast, broken, pack
from titan_rl.wire.manifest import Manifest, blocks, checksum, layout
from titan_rl.wire.weight_plan import Copy, Shard
from titan_rl.wire.weight_source import HashKind, Offer, Registered


def shards_of(named_parameters: Iterable[tuple[str, Tensor]], hf_names: Mapping[str, str]) -> list[Shard]:
    """Return the rectangle of each Hugging Face tensor that this rank holds. `hf_names` is keyed by TorchTitan's."""
    shards = []
    for name, param in named_parameters:
        if name not in hf_names:
            raise ValueError(f"{name}: expected a Hugging Face name for every parameter of the trainer, found none")
        if param.dim() not in (1, 2):
            raise ValueError(f"{name}: expected a vector or a matrix, found shape {tuple(param.shape)}")
        extents = [_extent(name, param, dim) for dim in range(param.dim())]
        (row0, rows), (col0, cols) = [*extents, (0, 1)][:2]
        shards.append(Shard(hf_names[name], row0, rows, col0, cols))
    return shards


def _extent(name: str, param: Tensor, dim: int) -> tuple[int, int]:
    """Return (first index, size) of the local part of a dimension, by torch.chunk's arithmetic.

    FSDP2 cuts what tensor parallelism has already cut, though its mesh dimension comes first: that is what
    StridedShard says. DTensor's own offsets emulate it by striding, which is off where tensor parallelism is uneven
    (13 rows over dp 3 x tp 2), so the cuts are applied here in the order in which they were made.
    """
    start, size = 0, param.shape[dim]
    if not isinstance(param, DTensor):
        return start, size
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: expected this rank in the parameter's mesh {mesh}")
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{name}: expected sharded or replicated values, found placements {param.placements}")
    cuts = [i for i, p in enumerate(param.placements) if isinstance(p, ShardPlacement) and p.dim == dim]
    late = {i: p.split_factor for i, p in enumerate(param.placements) if isinstance(p, StridedShard) and p.dim == dim}
    for i, split in late.items():
        if len(late) > 1 or split != math.prod(mesh.size(j) for j in cuts) or min(cuts) < i:
            raise ValueError(f"{name}: expected FSDP2 over tensor parallelism, found placements {param.placements}")
    for i in [*cuts, *late]:
        chunk = -(-size // mesh.size(i))
        skip = min(coordinate[i] * chunk, size)
        start, size = start + skip, min(chunk, size - skip)
    if size != param.to_local().shape[dim]:
        raise ValueError(
            f"{name}: expected {size} local entries in dimension {dim} under placements {param.placements}, "
            f"found {param.to_local().shape[dim]}"
        )
    return start, size


class Staging:
    """Host memory with a contiguous run for every reader in each of two slots, rewritten by pack().

    Parameters are keyed by Hugging Face names. Sharded ones are looked up again at every pack, because FSDP may swap
    their storage.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        copies: Mapping[int, tuple[Copy, ...]],
        dtype: torch.dtype,
        *,
        slice_bytes: int,
        block_bytes: int,
        checksums: bool = True,
    ) -> None:
        for key, nbytes in {"slice_bytes": slice_bytes, "block_bytes": block_bytes}.items():
            if nbytes < dtype.itemsize:
                raise ValueError(f"{key}: expected at least one element of {dtype}, found {nbytes} bytes")
        if absent := sorted({copy.name for run in copies.values() for copy in run} - set(params)):
            raise ValueError(f"expected parameters for every planned copy, found none for {', '.join(absent)}")
        self._params = params
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
        local, every = self._local(), [copy for run in copies.values() for copy in run]
        self._broken = broken(local, every, dtype) if self._gpu is None else set()
        most = max((local[name].numel() for name in self._broken), default=0)
        self._casts = [torch.empty(most, dtype=dtype) for _ in range(2)]  # a block may begin in one and end in another
        order = {name: i for i, name in enumerate(dict.fromkeys(copy.name for copy in every))}
        self._order = sorted(  # blocks that read the same parameter are packed one after the other
            ((reader, i, block) for reader, found in self._blocks.items() for i, block in enumerate(found)),
            key=lambda each: order[each[2].copies[0].name],
        )
        self._hashes = [
            {
                reader: checksums_of([parts_of(run, block) for block in self._blocks[reader]], self._gpu)
                for reader, run in runs.items()
            }
            for runs in (self.runs if self._gpu is not None and checksums else [])
        ]
        self._registered: dict[int, Registered] = {}

    @torch.no_grad()
    def pack(self, version: int, slot: int, serial: int) -> dict[int, Manifest]:
        """Pack the parameters' current values into a slot. Return a manifest of each run."""
        self._memory.stamps[slot] = PACKING
        checksums = self._pack_blocks(slot) if self._gpu is None else self._pack_runs(slot)
        self._memory.stamps[slot] = serial
        return {
            reader: Manifest.of(version, serial, slot, self._layouts[reader], tuple(found))
            for reader, found in checksums.items()
        }

    def _pack_blocks(self, slot: int) -> dict[int, list[int]]:
        """Pack block by block. Return the checksums of each run."""
        local, runs = self._local(), self.runs[slot]
        checksums = {reader: [0] * len(found) * self._checksums for reader, found in self._blocks.items()}
        cast = Cast(local, self._broken, self._casts)
        for reader, i, block in self._order:
            pack(cast, block.copies, runs[reader][block.start : block.start + block.elements])
            if self._checksums:  # while the block is in the cache
                checksums[reader][i] = checksum(octets(runs[reader], block))
        return checksums

    def _pack_runs(self, slot: int) -> dict[int, list[int]]:
        """Pack each run in one launch, which is waited for, and hash it in another, which reads what readers will map.
        Return the checksums of each run."""
        local = self._local()
        for reader, run in self.runs[slot].items():
            pack(local, self._copies[reader], run)
        if not self._checksums:
            return {reader: [] for reader in self._blocks}
        return {reader: hashed(range(len(self._blocks[reader]))) for reader, hashed in self._hashes[slot].items()}

    def _local(self) -> dict[str, Tensor]:
        return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in self._params.items()}

    def offer(self, *, remote: bool) -> dict[int, Offer]:
        """Return where each reader finds its run. Runs are registered for one-sided reads, once, if any reader is
        `remote`."""
        if remote and not self._registered:
            stamps = RDMABuffer(self._memory.stamps.view(torch.uint8))
            self._registered = {
                reader: Registered(
                    stamps, tuple([RDMABuffer(part) for part in self._slices(runs[reader])] for runs in self.runs)
                )
                for reader in self._blocks
            }
        return {
            reader: self._memory.offer(i, run.nbytes, self._layouts[reader], self._registered.get(reader), self._kind)
            for i, (reader, run) in enumerate(self.runs[0].items())
        }

    async def drop(self) -> None:
        """Make the memory unreachable. Processes that have mapped it keep it; a remote read in progress fails within
        its timeout."""
        for registered in self._registered.values():
            for buffer in (buffer for slices in registered.slices for buffer in slices):
                await buffer.drop()
        for stamps in {id(r.stamps): r.stamps for r in self._registered.values()}.values():
            await stamps.drop()
        self._registered = {}
        self._memory.close()

    def _slices(self, run: Tensor) -> Iterator[Tensor]:
        return (part for part in run.view(torch.uint8).split(self._slice_bytes) if len(part))
