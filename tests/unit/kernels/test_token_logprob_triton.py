"""The GPU's kernels in Triton's interpreter, in a process of their own: it is chosen before triton is imported."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels.token_logprob import reference_token_logprob, token_logprob

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from titan_rl.kernels.token_logprob_triton import descent_kernel, softmax_sums_kernel  # noqa: E402

SHAPES = [(0, 5, 3), (1, 1, 1), (1, 130, 65), (3, 128, 64), (65, 129, 5), (17, 300, 70), (64, 257, 16)]


def compare(shape: tuple[int, int, int], dtype: torch.dtype, temperature: float, entropy: bool, device: str) -> None:
    tokens, vocabulary, size = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device=device).to(dtype)
    weight = (torch.randn(vocabulary, size, device=device) * size**-0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    by_token = torch.randn(tokens, device=device)
    found = []
    fused: Any = partial(token_logprob, with_entropy_grad=entropy)
    for function in (fused, reference_token_logprob):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprob, entropies = function(*inputs, targets, temperature)
        loss = (logprob * by_token).sum() + ((entropies * by_token.flip(0)).sum() if entropy else 0)
        found.append((logprob, entropies, *torch.autograd.grad(loss, inputs)))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def interpret() -> None:
    from titan_rl.kernels import token_logprob_triton

    kernel._triton = lambda hidden_TD: token_logprob_triton  # the interpreter runs it on CPU tensors
    kernel.TILES["cpu"] = (16, 100)
    token_logprob_triton.PROGRAMS = 8
    # float16 for bf16, which the interpreter's dot takes for integers
    for dtype, entropy in ((torch.float32, False), (torch.float16, True)):
        for shape in SHAPES:
            compare(shape, dtype, 0.7 if entropy else 1.0, entropy, "cpu")
    token_logprob_triton.PROGRAMS = 1  # the vocabulary in one split
    compare((17, 300, 70), torch.float32, 0.7, True, "cpu")


def test_interpreted_kernels_agree_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(dtype: str, capability: int) -> None:
    kernels: dict[Any, dict[str, Any]] = {
        softmax_sums_kernel: {"width": 256, "size": 70, "precision": "ieee", "block_tokens": 64}
        | {"block_vocabulary": 128, "block_hidden": 64},
        descent_kernel: {"with_entropy": True, "block": 1024},
    }
    for function, constants in kernels.items():
        types = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr") | {"scale": "fp32"}
        types |= {name: "*fp32" for name in types if name.endswith("_ptr")} | {"targets_ptr": "*i64"}
        types |= {name: f"*{dtype}" for name in types if name in ("hidden_ptr", "weight_ptr", "logits_ptr")}
        compiled = triton.compile(ASTSource(function, types, constants), target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (4097, 33000, 512)])
def test_compiled_kernels_agree_with_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, entropy: bool
) -> None:
    compare(shape, dtype, 0.7, entropy, "cuda")


if __name__ == "__main__":
    interpret()
