"""The GPU's kernel in Triton's interpreter, in a separate process: it is chosen before triton is imported."""

import os
import re
import subprocess
import sys
from itertools import accumulate
from typing import Any

import pytest
import torch

from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.kernels.pack_weights import pack, reference_pack
from titan_rl.wire.weight_plan import Copy, plan

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titan_rl.kernels import pack_weights_triton  # noqa: E402

EIGHTS = {"q": (48, 16), "down": (7, 720), "norm": (40,), "embed": (136, 32)}
BY_EIGHTS = (
    Copy("q", 2, 8, 9, 8, "p", 0, 0),
    Copy("q", 1, 0, 24, 16, "p", 0, 0),
    Copy("down", 1, 360, 6, 360, "p", 0, 0),
    Copy("norm", 8, 0, 24, 1, "p", 0, 0),
    Copy("embed", 0, 0, 136, 32, "p", 0, 0),
)
SIZES = {"q": (24, 5), "wide": (7, 700), "norm": (9,), "one": (1, 1), "embed": (136, 33)}
COPIES = (
    Copy("q", 2, 1, 9, 4, "p", 0, 0),
    Copy("q", 1, 0, 12, 5, "p", 0, 0),
    Copy("wide", 1, 350, 6, 350, "p", 0, 0),  # two tiles, whose border falls inside a row
    Copy("norm", 2, 0, 5, 1, "p", 0, 0),
    Copy("one", 0, 0, 1, 1, "p", 0, 0),
    Copy("embed", 0, 0, 136, 33, "p", 0, 0),
    Copy("q", 0, 0, 24, 5, "p", 0, 0),
)


def compare(held: torch.dtype, sent: torch.dtype, device: str, pinned: bool = False) -> None:
    torch.manual_seed(0)
    params = {name: torch.randn(size, device=device).to(held) for name, size in SIZES.items()}
    params["wide"] = torch.randn(2 * 7, 700, device=device).to(held)[::2]  # strided rows
    sizes = [sum(c.elements for c in copies) for copies in (COPIES, COPIES[3:4])]
    for copies, size in zip((COPIES, COPIES[3:4]), sizes, strict=True):
        run = torch.zeros(size + 2, dtype=sent, device="cpu" if pinned else device, pin_memory=pinned)
        expected = torch.zeros_like(run)
        function: Any = pack if device == "cuda" else pack_weights_triton.pack
        function(params, copies, run[1:-1])
        reference_pack(params, copies, expected[1:-1])
        assert torch.equal(run, expected)


def compare_groups(held: torch.dtype, sent: torch.dtype, device: str, pinned: bool = False) -> None:
    """Copies that move by groups of 8, and the same where something allows only 4, 2 or 1."""
    torch.manual_seed(0)
    groups: list[int] = []
    group_of = pack_weights_triton._group
    pack_weights_triton._group = lambda *of: groups.append(group_of(*of)) or groups[-1]
    params = {name: torch.randn(size, device=device).to(held) for name, size in EIGHTS.items()}
    size = sum(c.elements for c in BY_EIGHTS)
    run = torch.zeros(size + 8, dtype=sent, device="cpu" if pinned else device, pin_memory=pinned)
    moved = {"q": torch.randn(48 * 16 + 8, device=device).to(held)[4:-4].view(48, 16)}
    for held_by, copies in (
        (params, BY_EIGHTS),
        (params | moved, BY_EIGHTS),
        (params, (*BY_EIGHTS, Copy("norm", 1, 0, 2, 1, "p", 0, 0))),
        (params | {"norm": torch.randn(80, device=device).to(held)[::2]}, BY_EIGHTS),
    ):
        expected = torch.zeros_like(run)
        elements = sum(c.elements for c in copies)
        pack_weights_triton.pack(held_by, copies, run.zero_()[:elements])
        reference_pack(held_by, copies, expected[:elements])
        assert torch.equal(run, expected)
    pack_weights_triton._group = group_of
    assert groups == [8, 4, 1, 1]


def interpret() -> None:
    torch.cuda.synchronize = lambda device=None: None  # pyright: ignore[reportAttributeAccessIssue]
    for block in (64, 4096):
        pack_weights_triton.BLOCK = block
        for held, sent in ((torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16,) * 2):
            compare(held, sent, "cpu")
            compare_groups(held, sent, "cpu")
    pack_weights_triton.pack({"w": torch.zeros(0, 3)}, [Copy("w", 0, 0, 0, 3, "p", 0, 0)], torch.zeros(0))


def test_the_interpreted_kernel_agrees_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def compiled(held: str, sent: str, capability: int, group: int) -> str:
    """Return the kernel's PTX, compiled as a launch with aligned tensors compiles it."""
    kernel = pack_weights_triton.pack_kernel
    types = {"table_ptr": "*i64", "owner_ptr": "*i32", "run_ptr": f"*{sent}", "like_ptr": f"*{held}"}
    constants = {"block": pack_weights_triton.BLOCK, "group": group}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
    assert built["cubin"]
    return built["ptx"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("held", "sent"), [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_the_kernel_stores_16_bytes_at_a_time_on_a_gpu_that_is_not_there(held: str, sent: str, capability: int) -> None:
    assert "st.global" in compiled(held, sent, capability, 1)
    ptx = compiled(held, sent, capability, 8)
    assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in ptx
    assert "st.local" not in ptx


def test_an_8b_model_is_packed_by_groups_of_8() -> None:
    """What each of 4 FSDP ranks packs in bf16, out of fp32 shards on the meta device, which say they are at 0."""
    from support.shapes import LLAMA_8B
    from support.weight_layouts import layout

    ranks = layout(LLAMA_8B, fsdp=4)
    for rank, copies in plan(ranks, [pieces(LLAMA_8B, tp=1, rank=0)]).incoming(0).items():
        params = {shard.name: torch.empty(shard.rows, shard.cols, device="meta") for shard in ranks[rank]}
        params = {name: w[:, 0] if w.shape[1] == 1 else w for name, w in params.items()}
        sources = [pack_weights_triton._source(params[c.name], c) for c in copies]
        targets = accumulate((c.elements for c in copies), initial=0)
        rows = [(*source, c.elements, at, 0) for source, c, at in zip(sources, copies, targets, strict=False)]
        assert pack_weights_triton._group(rows, 4, 4096) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_agrees_with_the_reference(held: torch.dtype, sent: torch.dtype, pinned: bool) -> None:
    compare(held, sent, "cuda", pinned)
    compare_groups(held, sent, "cuda", pinned)


if __name__ == "__main__":
    interpret()
