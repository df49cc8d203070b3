"""The GPU's kernel in Triton's interpreter, in a process of its own: it is chosen before triton is imported."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from titan_rl.kernels.pack_weights import pack, reference_pack
from titan_rl.wire.weight_plan import Copy

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titan_rl.kernels import pack_weights_triton  # noqa: E402

SIZES = {"q": (24, 5), "wide": (7, 700), "norm": (9,), "one": (1, 1), "embed": (640, 33)}
COPIES = (
    Copy("q", 2, 1, 3, 4, "p", 0, 0, src_step=2, blocks=3, block_stride=8),  # a cut head: rows 1..3 of its first half
    Copy("q", 1, 0, 4, 5, "p", 0, 0, src_step=2, blocks=3, block_stride=8),
    Copy("wide", 1, 350, 6, 350, "p", 0, 0),  # two tiles, whose border falls inside a row
    Copy("norm", 2, 0, 5, 1, "p", 0, 0),
    Copy("one", 0, 0, 1, 1, "p", 0, 0),
    Copy("embed", 0, 0, 640, 33, "p", 0, 0),
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


def interpret() -> None:
    torch.cuda.synchronize = lambda device=None: None  # pyright: ignore[reportAttributeAccessIssue]
    for block in (64, 4096):
        pack_weights_triton.BLOCK = block
        for held, sent in ((torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16,) * 2):
            compare(held, sent, "cpu")
    pack_weights_triton.pack({"w": torch.zeros(0, 3)}, [Copy("w", 0, 0, 0, 3, "p", 0, 0)], torch.zeros(0))


def test_the_interpreted_kernel_agrees_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("held", "sent"), [("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(held: str, sent: str, capability: int) -> None:
    types = {"table_ptr": "*i64", "owner_ptr": "*i32", "run_ptr": f"*{sent}", "like_ptr": f"*{held}"}
    source = ASTSource(pack_weights_triton.pack_kernel, types | {"block": "constexpr"}, {"block": 4096})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_agrees_with_the_reference(held: torch.dtype, sent: torch.dtype, pinned: bool) -> None:
    compare(held, sent, "cuda", pinned)


if __name__ == "__main__":
    interpret()
