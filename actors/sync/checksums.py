"""Checksums of a run's blocks, computed where their bytes are: by XXH3 on a host, by a kernel on a GPU.

A trainer rank computes them over its packed bytes, in the memory that its readers map. A reader computes them over its
live parameters, or over the bytes that arrived. Both are on devices of one kind, so they compute the same kind.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import xxhash
from torch import Tensor

from titan_rl.kernels.block_hash import reference_block_hash
from titan_rl.kernels.triton_kernels import triton_kernels
from titan_rl.wire.manifest import Block
from titan_rl.wire.weight_source import HashKind

Checksums = Callable[[Sequence[int]], list[int]]
"""Returns the checksums of the current bytes of the blocks with these indices."""


def gpu_of(params: Iterable[Tensor]) -> torch.device | None:
    """Return the GPU that computes with these parameters, also if they are kept on the host meanwhile."""
    for param in params:
        if param.is_cuda:
            return param.device
        # Only DTensors have a mesh. Importing that class would take a generator 0.35 CPU seconds.
        mesh = getattr(param, "device_mesh", None)
        if mesh is not None and mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    return None


def kind_on(gpu: torch.device | None) -> HashKind:
    return "xxh3" if gpu is None else "splitmix"


def checksums_of(blocks: Sequence[Sequence[Tensor]], gpu: torch.device | None) -> Checksums:
    """Prepare to hash blocks, each given by its copies' windows in the order of the run.  # [blocks, rows, cols]

    A GPU reads memory of the host only if it is pinned; torch hashes other memory on the host."""
    if gpu is None:
        return partial(_xxh3, blocks)
    fused = (
        triton_kernels("block_hash", "weights are verified by torch operations, block by block")
        if gpu.type == "cuda" and all(window.is_cuda or window.is_pinned() for block in blocks[:1] for window in block)
        else None
    )
    return partial(_splitmix, blocks) if fused is None else fused.HashTable(blocks, gpu).sums


def parts_of(run: Tensor, block: Block) -> list[Tensor]:
    """Return a view of each of a block's copies in the run.  # [rows, cols] each"""
    parts = run[block.start : block.start + block.elements].split([copy.elements for copy in block.copies])
    return [part.view(copy.rows, copy.cols) for part, copy in zip(parts, block.copies, strict=True)]


def _xxh3(blocks: Sequence[Sequence[Tensor]], wanted: Sequence[int]) -> list[int]:
    checksums = []
    for i in wanted:
        hashed = xxhash.xxh3_64()
        for window in blocks[i]:  # in place where it is contiguous
            hashed.update(window.contiguous().view(torch.uint8).numpy().data)
        checksums.append(hashed.intdigest())
    return checksums


def _splitmix(blocks: Sequence[Sequence[Tensor]], wanted: Sequence[int]) -> list[int]:
    return [reference_block_hash(blocks[i]) for i in wanted]
