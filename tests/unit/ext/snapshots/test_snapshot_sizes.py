"""Snapshots keep two copies of what a checkpoint holds."""

import pytest

from support.shapes import LLAMA_8B
from titan_rl.config.toml import find, load
from titan_rl.ext.snapshots.sizes import MemoryOfSnapshots


@pytest.mark.parametrize(("moments", "each"), [("master", 24), ("bfloat16", 16)])
def test_bytes_of_each_parameter(moments: str, each: int) -> None:
    sizes = MemoryOfSnapshots(load(find("grpo_llama3_8b"), [("optimizer.moments", moments)]))
    assert sizes.of_mesh("trainer", LLAMA_8B) == each * LLAMA_8B.parameters
    assert f"2 x {each // 2} per parameter" in next(iter(sizes.formulas(0).values()))
