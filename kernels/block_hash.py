"""Hash the blocks of a run where their bytes are, so that a GPU's memory need not be copied to the host for it.

    block: its copies' bytes, each padded to whole words -> sum over words of mix(word ^ key(position))  mod 2^64

`mix` is splitmix64's finalizer, a bijection of 64 bits, and positions count through the block. So a change of one word
always changes the sum. Words or rows that changed places, shifted bytes, or zeros do so except once in 2^64. Addition
has no order: however the sum is split over programs, its bits are the same. It detects accidents, not adversaries.

`block_hash_triton.py` sums all blocks of a run in one launch. It reads device memory, and pinned memory of the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 8  # bytes
KEY, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's


def reference_block_hash(windows: Sequence[Tensor]) -> int:
    """Hash one block, of which each window holds one copy's elements.  # [rows, cols] each, of any strides"""
    total, position = 0, 1
    for window in windows:
        octets = window.contiguous().view(-1).view(torch.uint8)
        words = octets.new_zeros(-(-len(octets) // WORD), dtype=torch.int64)
        words.view(torch.uint8)[: len(octets)] = octets
        keys = torch.arange(position, position + len(words), device=words.device) * _signed(KEY)
        total += int(_mixed(words ^ keys).sum())
        position += len(words)
    return total % 2**64


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign: torch has no unsigned integers that it can shift."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(constant: int) -> int:
    return constant - 2**64
