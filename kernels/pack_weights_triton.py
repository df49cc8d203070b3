"""`pack_weights.py` for a GPU: all copies of a run in one launch.

    table [copies, 9], owner [tiles] -> run [elements]

A program writes one tile of the run: BLOCK elements of one copy. It reads from the table which copy, and where its
source is. Addresses are looked up at every pack, because FSDP may have moved the shards.
"""

# A kernel's arguments and values have Triton's types.
# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_rl.wire.weight_plan import Copy

BLOCK = 4096  # elements: 8 KB of bf16, a few writes per thread
COLUMNS = tl.constexpr(9)


@triton.jit
def pack_kernel(
    table_ptr,  # [copies, COLUMNS], int64
    owner_ptr,  # [tiles], the copy that each tile belongs to
    run_ptr,
    like_ptr,  # any parameter, for the sources' dtype
    block: tl.constexpr,
):
    tile = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + tile).to(tl.int64) * COLUMNS
    source = tl.load(row).to(like_ptr.dtype)
    row_stride = tl.load(row + 1)
    col_stride = tl.load(row + 2)
    block_stride = tl.load(row + 3)  # in elements, like the other strides
    rows = tl.load(row + 4).to(tl.int32)
    cols = tl.load(row + 5).to(tl.int32)
    elements = tl.load(row + 6)
    target = tl.load(row + 7)
    first = (tile - tl.load(row + 8)) * block  # of the copy's elements; in 64 bits
    # Vectors are divided in 32 bits: they count from the row in which the tile begins.
    place = (first % cols).to(tl.int32) + tl.arange(0, block)
    row_of = (first // cols).to(tl.int32) + place // cols
    offset = (
        (row_of // rows).to(tl.int64) * block_stride
        + (row_of % rows).to(tl.int64) * row_stride
        + (place % cols).to(tl.int64) * col_stride
    )
    element = first + tl.arange(0, block)
    inside = element < elements
    values = tl.load(source + offset, mask=inside, other=0.0)
    tl.store(run_ptr + target + element, values.to(run_ptr.dtype.element_ty), mask=inside)


def pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Fill `run` in one launch. Parameters are on one GPU, in one dtype; `run` is there or in pinned memory."""
    like = params[copies[0].name]
    rows, tiles, target, first_tile = [], [], 0, 0
    for c in copies:
        param = params[c.name]
        row, col = param.stride() if param.dim() == 2 else (param.stride(0), 1)
        source = param.data_ptr() + (c.src_row0 * row + c.src_col0 * col) * param.element_size()
        size = c.elements
        rows.append((source, c.src_step * row, col, c.block_stride * row, c.rows, c.cols, size, target, first_tile))
        tiles.append(triton.cdiv(size, BLOCK))
        target += size
        first_tile += tiles[-1]
    if not first_tile:
        return
    table = torch.tensor(rows, dtype=torch.int64).to(like.device, non_blocking=True)
    counts = torch.tensor(tiles, dtype=torch.int64).to(like.device, non_blocking=True)
    owner = torch.arange(len(rows), dtype=torch.int32, device=like.device).repeat_interleave(
        counts, output_size=first_tile
    )
    pack_kernel[(first_tile,)](table, owner, run, like, BLOCK)
    if not run.is_cuda:
        torch.cuda.synchronize(like.device)  # else the host could read pinned memory before the kernel has written it
