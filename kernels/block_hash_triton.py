"""`block_hash.py` for a GPU: the blocks of a run in one launch.

    table [segments, 6], tasks [programs, 2] -> sums [blocks]

A segment is a copy's window. A program mixes up to STEPS tiles of its words, and adds their sum to its block's. Both
tables are built once: neither a reader's parameters nor the memory of a trainer ever move.
"""

# A kernel's arguments and values have Triton's types.
# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_rl.kernels.block_hash import FIRST, KEY, SECOND, WORD

TILE, STEPS = 1024, 8  # words: a program reads up to 64 KB
COLUMNS = tl.constexpr(6)
KEY_, FIRST_, SECOND_ = tl.constexpr(KEY), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def block_hash_kernel(
    table_ptr,  # [segments, COLUMNS], int64
    tasks_ptr,  # [programs, 2], int32: a segment, and which of its parts of STEPS tiles
    base_ptr,  # addresses count from here, in bytes
    sums_ptr,  # [blocks], int64
    lane: tl.constexpr,  # bytes of a load; divides every address, row and stride
    flat: tl.constexpr,  # every segment is contiguous
    tile: tl.constexpr,
    steps: tl.constexpr,
):
    task = tasks_ptr + 2 * tl.program_id(0)
    row = table_ptr + tl.load(task).to(tl.int64) * COLUMNS
    source = base_ptr + tl.load(row)
    lanes = tl.load(row + 1).to(tl.int32)
    cols = tl.load(row + 2).to(tl.int32)  # in lanes, like the stride
    row_stride = tl.load(row + 3)
    position = tl.load(row + 4)
    per_word: tl.constexpr = 8 // lane
    if lane == 8:
        places = source.to(tl.pointer_type(tl.uint64))
    elif lane == 4:
        places = source.to(tl.pointer_type(tl.uint32))
    elif lane == 2:
        places = source.to(tl.pointer_type(tl.uint16))
    else:
        places = source.to(tl.pointer_type(tl.uint8))
    total = tl.zeros([tile], tl.uint64)
    first = tl.load(task + 1) * (tile * steps)
    for step in range(steps):
        words = first + step * tile + tl.arange(0, tile)
        word = tl.zeros([tile], tl.uint64)
        for i in tl.static_range(per_word):
            at = words * per_word + i
            offset = at if flat else at // cols * row_stride + at % cols
            value = tl.load(places + offset, mask=at < lanes, other=0)
            word |= value.to(tl.uint64) << (8 * lane * i)
        x = word ^ ((position + words).to(tl.uint64) * KEY_)
        x = (x ^ (x >> 30)) * FIRST_
        x = (x ^ (x >> 27)) * SECOND_
        total += tl.where(words * per_word < lanes, x ^ (x >> 31), 0)
    tl.atomic_add(sums_ptr + tl.load(row + 5), tl.sum(total, 0).to(tl.int64), sem="relaxed")


class HashTable:
    """Where the blocks' segments are. Windows are all on `device`, or all in one piece of pinned memory."""

    def __init__(self, blocks: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        shapes, count = [], 0
        for count, windows in enumerate(blocks, start=1):
            position = 1
            for window in windows:
                shapes.append((window.data_ptr(), *_shape(window), position, count - 1))
                position += -(-window.nbytes // WORD)
        self._count, self._blocks = count, [shape[-1] for shape in shapes]
        self._base = _octets(blocks[0][0]) if count else torch.empty(0, dtype=torch.uint8)
        self.lane = math.gcd(WORD, *(size for s in shapes for size in (s[0], s[2], s[3])))
        self.flat = all(s[1] == s[2] for s in shapes)
        start, lane = self._base.data_ptr(), self.lane
        rows = [
            (address - start, size // lane, cols // lane, row // lane, position, number)
            for address, size, cols, row, position, number in shapes
        ]
        parts = [triton.cdiv(shape[1], WORD * TILE * STEPS) for shape in shapes]
        self._tasks = torch.tensor([(i, part) for i, n in enumerate(parts) for part in range(n)], dtype=torch.int32)
        self._block_of = torch.tensor(self._blocks)[self._tasks[:, 0].long()] if count else torch.empty(0)
        self._device = device
        # A separate stream: sampling, on another, need not wait for a hash of memory that it does not use.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(self._stream):
            self._table = torch.tensor(rows, dtype=torch.int64).to(device)
            self._every = self._tasks.to(device)

    def sums(self, wanted: Sequence[int]) -> list[int]:
        if not wanted:
            return []
        with torch.cuda.stream(self._stream):
            tasks = self._every
            if len(wanted) < self._count:
                tasks = self._tasks[torch.isin(self._block_of, torch.tensor(wanted))].to(self._device)
            sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
            block_hash_kernel[(len(tasks),)](self._table, tasks, self._base, sums, self.lane, self.flat, TILE, STEPS)
            totals = sums.tolist()
        return [totals[i] % 2**64 for i in wanted]


def _shape(window: Tensor) -> tuple[int, int, int]:
    """Return (size, cols, row stride), in bytes, with contiguous rows merged."""
    (rows, cols), (row_stride, col_stride) = window.shape, window.stride()
    if cols > 1 and col_stride != 1:
        raise ValueError(f"expected rows of contiguous elements, found a stride of {col_stride}")
    if rows == 1 or row_stride == cols:
        cols, row_stride = rows * cols, 0
    return window.nbytes, cols * window.element_size(), row_stride * window.element_size()


def _octets(window: Tensor) -> Tensor:
    return window.detach().as_strided((1,), (1,)).view(torch.uint8)
