"""The hash of a block: its definition, and the damage that it detects."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from titan_rl.kernels.block_hash import FIRST, KEY, SECOND, reference_block_hash

SIZES = [torch.bfloat16, torch.float32]


def windows_of(octets: bytes | bytearray, shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Cut bytes into the windows of one block."""
    whole = torch.tensor(list(octets), dtype=torch.uint8).view(dtype)
    sizes = [blocks * rows * cols for blocks, rows, cols in shapes]
    return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


@st.composite
def blocks_of_bytes(draw: st.DrawFn) -> tuple[bytearray, list[tuple[int, int, int]], torch.dtype]:
    dtype = draw(st.sampled_from(SIZES))
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3))
    size = dtype.itemsize * sum(blocks * rows * cols for blocks, rows, cols in shapes)
    return bytearray(draw(st.binary(min_size=size, max_size=size))), shapes, dtype


def swapped(octets: bytearray, one: int, other: int, size: int) -> bytearray:
    found = bytearray(octets)
    found[one : one + size], found[other : other + size] = octets[other : other + size], octets[one : one + size]
    return found


def test_words_are_mixed_with_their_positions_as_defined() -> None:
    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * FIRST % 2**64
        x = (x ^ (x >> 27)) * SECOND % 2**64
        return x ^ (x >> 31)

    octets = bytes(range(100, 128))
    first, second = windows_of(octets, [(1, 1, 6), (2, 2, 2)], torch.bfloat16)  # 12 bytes and 16
    words = [octets[:8], octets[8:12] + bytes(4), octets[12:20], octets[20:]]
    expected = sum(mix(int.from_bytes(w, "little") ^ (i * KEY % 2**64)) for i, w in enumerate(words, start=1))
    assert reference_block_hash([first, second]) == expected % 2**64
    assert mix(KEY) == 0xE220A8397B1DCDAF, "the first number of splitmix64 from seed 0"


@given(blocks_of_bytes(), st.data())
def test_any_changed_byte_is_seen(
    block: tuple[bytearray, list[tuple[int, int, int]], torch.dtype], data: st.DataObject
) -> None:
    octets, shapes, dtype = block
    before = reference_block_hash(windows_of(octets, shapes, dtype))
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= data.draw(st.integers(1, 255))
    assert reference_block_hash(windows_of(octets, shapes, dtype)) != before


@given(blocks_of_bytes(), st.data())
def test_exchanged_pieces_shifts_and_zeros_are_seen(
    block: tuple[bytearray, list[tuple[int, int, int]], torch.dtype], data: st.DataObject
) -> None:
    """Pieces of every size that matters: an element, a word, a row."""
    octets, shapes, dtype = block
    cols = data.draw(st.sampled_from([cols for _, _, cols in shapes]))
    size = data.draw(st.sampled_from([1, dtype.itemsize, 8, cols * dtype.itemsize]))
    pieces = len(octets) // size
    assume(pieces > 1)
    one = data.draw(st.integers(0, pieces - 2))
    other = data.draw(st.integers(one + 1, pieces - 1))
    before = reference_block_hash(windows_of(octets, shapes, dtype))
    for damaged in (swapped(octets, one * size, other * size, size), octets[size:] + octets[:size], bytes(len(octets))):
        if damaged != octets:
            assert reference_block_hash(windows_of(damaged, shapes, dtype)) != before


@pytest.mark.parametrize("dtype", SIZES)
def test_a_block_has_one_hash_wherever_its_rows_are(dtype: torch.dtype) -> None:
    run = torch.randn(3 * 4 * 5).to(dtype)
    live = torch.zeros(40, 9, dtype=dtype)
    spread = live.as_strided((3, 4, 5), (90, 9, 1), 11)
    spread.copy_(run.view(3, 4, 5))
    assert reference_block_hash([spread]) == reference_block_hash([run.view(3, 4, 5)])
    before = reference_block_hash([run[:20].view(1, 4, 5), spread])
    assert before != reference_block_hash([spread, run[:20].view(1, 4, 5)])
    spread.zero_()
    assert before != reference_block_hash([run[:20].view(1, 4, 5), spread]) != 0
    assert reference_block_hash([]) == 0
