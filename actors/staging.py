"""The trainer's side of a weight sync: what this rank holds, and its bytes packed for one-sided reads.

    parameters -> shards_of -> (plan) -> Staging.register, once: RDMA buffers for the readers
    every version:                       Staging.pack: cast, undo the rotary order, lay out each reader's run

A reader finds its whole run in one place, so its reads are as large as `slice_bytes` allows. The buffer is rewritten
in place: nobody may read while pack() runs.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from monarch.rdma import RDMABuffer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from titan_rl.weight_plan import Copy, Shard


def shards_of(
    named_parameters: Iterable[tuple[str, Tensor]], hf_names: Mapping[str, str], rope_head_dim: Mapping[str, int]
) -> list[Shard]:
    """The rectangle of each Hugging Face tensor that this rank holds. Both mappings are keyed by TorchTitan's names."""
    shards = []
    for name, param in named_parameters:
        if name not in hf_names:
            raise ValueError(f"{name}: expected a Hugging Face name for every parameter of the trainer, found none")
        if param.dim() not in (1, 2):
            raise ValueError(f"{name}: expected a vector or a matrix, found shape {tuple(param.shape)}")
        extents = [_extent(name, param, dim) for dim in range(param.dim())]
        (row0, rows), (col0, cols) = [*extents, (0, 1)][:2]
        shards.append(Shard(hf_names[name], row0, rows, col0, cols, rope_head_dim.get(name, 0)))
    return shards


def _extent(name: str, param: Tensor, dim: int) -> tuple[int, int]:
    """(first index, size) of the local part of a dimension, by torch.chunk's arithmetic.

    FSDP2 cuts what tensor parallelism has already cut, though its mesh dimension comes first: that is what
    _StridedShard says. DTensor's own offsets emulate it by striding, which is off where tensor parallelism is uneven
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
    late = {i: p.split_factor for i, p in enumerate(param.placements) if isinstance(p, _StridedShard) and p.dim == dim}
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
    """One host buffer with a contiguous run for every reader, rewritten by pack() for each version.

    Parameters are keyed by Hugging Face names; sharded ones are looked up anew at every pack, because FSDP may swap
    their storage.
    """

    def __init__(
        self, params: Mapping[str, Tensor], copies: Mapping[int, tuple[Copy, ...]], dtype: torch.dtype, slice_bytes: int
    ) -> None:
        if slice_bytes < dtype.itemsize:
            raise ValueError(f"slice_bytes: expected at least one element of {dtype}, found {slice_bytes} bytes")
        if absent := sorted({copy.name for run in copies.values() for copy in run} - set(params)):
            raise ValueError(f"expected parameters for every planned copy, found none for {', '.join(absent)}")
        self._params = params
        self._copies = copies
        self._slice = slice_bytes // dtype.itemsize
        sizes = [sum(copy.elements for copy in run) for run in copies.values()]
        pinned = any(param.is_cuda for param in params.values())
        self._buffer = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)  # [elements]
        self.runs = dict(zip(copies, self._buffer.split(sizes), strict=True))  # by reader, parts of the buffer
        self._registered: dict[int, list[RDMABuffer]] = {}

    @torch.no_grad()
    def pack(self) -> int:
        """Bring the parameters' present values into the buffer; returns its bytes."""
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in self._params.items()}
        for reader, run in self.runs.items():
            parts = run.split([copy.elements for copy in self._copies[reader]])
            for part, copy in zip(parts, self._copies[reader], strict=True):
                source = window(local[copy.name], copy, copy.src_row0, copy.src_col0, copy.src_step)
                part.view(copy.blocks, copy.rows, copy.cols).copy_(source)
        return self._buffer.nbytes

    def register(self) -> dict[int, list[RDMABuffer]]:
        """The runs as RDMA buffers of at most slice_bytes, in order. They outlive any number of packs."""
        if not self._registered:
            self._registered = {
                reader: [RDMABuffer(part) for part in run.split(self._slice) if part.numel()]
                for reader, run in self.runs.items()
            }
        return self._registered

    async def drop(self) -> None:
        """Make the buffers unreadable; a read under way fails within its timeout."""
        for buffers in self._registered.values():
            for buffer in buffers:
                await buffer.drop()
        self._registered = {}


def window(tensor: Tensor, copy: Copy, row0: int, col0: int, step: int) -> Tensor:
    """A copy's elements in a shard or in a live parameter, in the order of the run.  # [blocks, rows, cols]"""
    table = tensor if tensor.dim() == 2 else tensor[:, None]
    row, col = table.stride()
    return table.as_strided(
        (copy.blocks, copy.rows, copy.cols),
        (copy.block_stride * row, step * row, col),
        table.storage_offset() + row0 * row + col0 * col,
    )
