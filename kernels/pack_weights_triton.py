"""`pack_weights.py` for a GPU: all copies of a run in one launch.

    table [copies, 7], owner [tiles] -> run [elements]

A program writes one tile of the run: BLOCK elements of one copy. It reads from the table which copy, and where its
source is. Addresses are looked up at every pack, because FSDP may have moved the shards.

Elements are moved in groups, of which none crosses the end of a row: the largest groups, up to GROUP, that fit all of
the run's copies. A group of 8 is loaded and stored 16 bytes at a time. Single stores of 2 bytes would leave a third of
PCIe unused when the run is in pinned memory.
"""

# A kernel's arguments and values have Triton's types.
# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_rl.wire.weight_plan import Copy

BLOCK = 4096  # elements: 8 KB of bf16, a few writes per thread
GROUP = 8  # elements: 16 bytes of bf16
COLUMNS = tl.constexpr(7)


@triton.jit
def pack_kernel(
    table_ptr,  # [copies, COLUMNS], int64
    owner_ptr,  # [tiles], the copy that each tile belongs to
    run_ptr,
    like_ptr,  # any parameter, for the sources' dtype
    block: tl.constexpr,
    group: tl.constexpr,  # divides all numbers of columns, and all addresses and strides in elements
):
    tile = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + tile).to(tl.int64) * COLUMNS
    source = tl.multiple_of(tl.load(row).to(like_ptr.dtype), 2 * group)  # bytes, for elements of 2 or more
    row_stride = tl.load(row + 1)  # in elements, like the other stride
    col_stride = tl.load(row + 2)
    cols = tl.load(row + 3).to(tl.int32)
    elements = tl.multiple_of(tl.load(row + 4), group)
    target = tl.multiple_of(tl.load(row + 5), group)
    first = (tile - tl.load(row + 6)) * block  # the tile's first element in the copy; in 64 bits
    # Vectors are divided in 32 bits: they count from the row in which the tile begins.
    begins = tl.arange(0, block // group) * group  # [groups]
    place = (first % cols).to(tl.int32) + begins
    row_of = (first // cols).to(tl.int32) + place // cols
    offset = row_of.to(tl.int64) * row_stride + (place % cols).to(tl.int64) * col_stride
    within = tl.arange(0, group)[None, :]
    element = first + begins[:, None] + within  # [groups, group]
    inside = element < elements
    values = tl.load(source + tl.multiple_of(offset[:, None], (group, group)) + within, mask=inside, other=0.0)
    tl.store(run_ptr + target + element, values.to(run_ptr.dtype.element_ty), mask=inside)


def pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Fill `run` in one launch. Parameters are on one GPU, in one dtype; `run` is there or in pinned memory."""
    like = params[copies[0].name]
    rows, tiles, target, first_tile = [], [], 0, 0
    for c in copies:
        source, *strides = _source(params[c.name], c)
        rows.append((source, *strides, c.elements, target, first_tile))
        tiles.append(triton.cdiv(c.elements, BLOCK))
        target += c.elements
        first_tile += tiles[-1]
    if not first_tile:
        return
    table = torch.tensor(rows, dtype=torch.int64).to(like.device, non_blocking=True)
    counts = torch.tensor(tiles, dtype=torch.int64).to(like.device, non_blocking=True)
    owner = torch.arange(len(rows), dtype=torch.int32, device=like.device).repeat_interleave(
        counts, output_size=first_tile
    )
    pack_kernel[(first_tile,)](table, owner, run, like, BLOCK, _group(rows, like.element_size(), run.data_ptr()))
    if not run.is_cuda:
        torch.cuda.synchronize(like.device)  # else the host could read pinned memory before the kernel has written it


def _source(param: Tensor, c: Copy) -> tuple[int, int, int, int]:
    """Return (address, row stride, column stride, columns), with contiguous rows taken as one."""
    row, col = param.stride() if param.dim() == 2 else (param.stride(0), 1)
    address = param.data_ptr() + (c.src_row0 * row + c.src_col0 * col) * param.element_size()
    if row == c.cols and (c.cols == 1 or col == 1) and c.elements < 2**30:
        return address, 0, 1, c.elements
    return address, row, col, c.cols


def _group(rows: Sequence[tuple[int, ...]], size: int, run: int) -> int:
    """Return how many elements, at most GROUP, can be moved together in all copies."""
    if run % 16 or any(address % size or (col != 1 and cols > 1) for address, _, col, cols, *_ in rows):
        return 1
    return math.gcd(
        GROUP,
        *(number for address, row, _, cols, _, target, _ in rows for number in (address // size, row, cols, target)),
    )
