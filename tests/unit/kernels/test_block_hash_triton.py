"""The GPU's kernel in Triton's interpreter, in a separate process: it is chosen before triton is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_rl.kernels.block_hash import reference_block_hash

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titan_rl.kernels import block_hash_triton  # noqa: E402

CPU = torch.device("cpu")


def blocks_of(memory: Tensor, width: int, start: int) -> list[list[Tensor]]:
    """Blocks of every kind: whole rows, a window of columns, every second row, a vector, one element."""
    table = memory[start : start + 60 * width].view(60, width)
    row = table.stride(0)

    def window(rows: int, cols: int, at: int, row_stride: int) -> Tensor:
        return table.as_strided((rows, cols), (row_stride, 1), table.storage_offset() + at)

    return [
        [window(7, width, 0, row)],
        [window(5, width // 2, 8 * row + width // 2, row), window(6, width, 20 * row, row)],
        [window(8, width, 32 * row, row)],
        [window(4, width, 40 * row, 2 * row), window(9, 1, 50 * row, 1)],
        [window(1, 1, 51 * row + 3, row)],
    ]


def compare(dtype: torch.dtype, width: int, start: int, device: torch.device, pinned: bool = False) -> set[int]:
    """Return the sizes of the kernel's loads: of the whole memory, and of blocks that end anywhere."""
    torch.manual_seed(0)
    memory = torch.randn(61 * width + 16).to(dtype)
    memory = memory.pin_memory() if pinned else memory.to(device)
    table: Any = None
    for blocks in (blocks_of(memory, width, start), blocks_of(memory, width, start)[::2], [[memory.view(1, -1)]]):
        table = block_hash_triton.HashTable(blocks, device)
        expected = [reference_block_hash(block) for block in blocks]
        assert table.sums(range(len(blocks))) == expected
        assert table.sums([0, len(blocks) - 1]) == [expected[0], expected[-1]]
    sizes = {table.lane, block_hash_triton.HashTable(blocks_of(memory, width, start), device).lane}
    memory[start] = 7
    assert table.sums([0]) != expected
    assert table.sums([]) == []
    assert block_hash_triton.HashTable([], device).sums([]) == []
    return sizes


def interpret() -> None:
    for tile, steps in ((16, 2), (1024, 1)):
        block_hash_triton.TILE, block_hash_triton.STEPS = tile, steps
        for dtype in (torch.bfloat16, torch.float32):
            for width, start in ((7, 0), (7, 5), (16, 0), (16, 4), (16, 1), (34, 3))[:: 1 if tile == 16 else 3]:
                compare(dtype, width, start, CPU)
    whole = [[torch.randn(64, 16)], [torch.randn(4, 64)]]
    table = block_hash_triton.HashTable(whole, CPU)
    assert (table.lane, table.flat) == (8, True)
    assert table.sums([0, 1]) == [reference_block_hash(block) for block in whole]


def test_the_interpreted_kernel_agrees_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def test_elements_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="expected rows of contiguous elements, found a stride of 2"):
        block_hash_triton.HashTable([[torch.zeros(4, 6)[..., ::2]]], CPU)


def usage(cubin: bytes, path: Path) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(capability: int, tmp_path: Path) -> None:
    kernel = block_hash_triton.block_hash_kernel
    types = {"table_ptr": "*i64", "tasks_ptr": "*i32", "base_ptr": "*u8", "sums_ptr": "*i64"}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types}  # as a launch finds them
    for lane, flat, registers in ((8, True, 64), (8, False, 64), (4, False, 80), (2, False, 96)):
        constants = {"lane": lane, "flat": flat, "tile": block_hash_triton.TILE, "steps": block_hash_triton.STEPS}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
        assert f"ld.global.b{8 * lane}" in built["ptx"]
        used = usage(built["cubin"], tmp_path / "cubin")
        assert used["REG"] <= registers, used
        assert used["STACK"] == used["LOCAL"] == 0, used


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_kernel_agrees_with_the_reference(dtype: torch.dtype, pinned: bool) -> None:
    shapes = ((7, 0), (7, 5), (16, 0), (16, 4), (34, 3), (4096, 0), (4096, 1))
    sizes = [compare(dtype, width, start, torch.device("cuda"), pinned) for width, start in shapes]
    assert set().union(*sizes) >= {8, dtype.itemsize}


if __name__ == "__main__":
    interpret()
