"""The GPU's tile in Triton's interpreter, in a separate process: it is chosen before triton is imported."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels.kept_bits import kept_bits
from titan_rl.kernels.token_logprob import reference_token_logprob, token_logprob

pytest.importorskip("triton")

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SHAPES = [(0, 5, 3), (1, 1, 1), (1, 130, 65), (3, 128, 64), (16, 129, 5), (17, 300, 70), (65, 257, 16)]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


def compare(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    temperature: float,
    entropy: bool,
    device: str,
    wide: bool = False,
    truncated: bool = False,
    cap: float = 0.0,
) -> None:
    """Compare values and gradients with the reference's; with `wide` the reference computes in float32 throughout."""
    tokens, vocabulary, size = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, size, device=device).to(dtype)
    weight = (torch.randn(vocabulary, size, device=device) * size**-0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    by_token = torch.randn(tokens, device=device)
    kept = torch.rand(tokens, vocabulary, device=device) < torch.rand(tokens, 1, device=device) if truncated else None
    bits = None
    if kept is not None:
        kept[torch.arange(tokens, device=device), targets] = True
        bits = kept_bits(kept.sum(1), kept.nonzero()[:, 1], vocabulary)
    found = []
    fused: Any = partial(token_logprob, with_entropy_grad=entropy, float32_logits=wide, kept=bits, cap=cap)
    plain: Any = partial(reference_token_logprob, kept_TV=kept, cap=cap)
    for function in (fused, plain):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        h, w = (x.float() for x in leaves) if wide and function is not fused else leaves
        logprob, entropies = function(h, w, targets, temperature)
        loss = (logprob * by_token).sum() + ((entropies * by_token.flip(0)).sum() if entropy else 0)
        found.append((logprob, entropies, *torch.autograd.grad(loss, leaves)))
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        tolerance = 1e-4 if wide and i < 2 else TOLERANCES[dtype]
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def drawn(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width).to(dtype), (torch.randn(vocabulary, width) * width**-0.5).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocabulary, (tokens,))


def results(x: Case, **keys: Any) -> list[torch.Tensor]:
    logprob, entropy = token_logprob(*x, 0.7, with_entropy_grad=True, **keys)
    by_token = torch.linspace(-1, 2, len(logprob))
    return [logprob, entropy, *torch.autograd.grad((logprob * by_token + entropy).sum(), x[:2])]


def caps_bend_all_logits() -> None:
    """Compare with a Tile's numbers: caps far below, near and far above the logits, whose largest is about 3."""
    compare((17, 300, 70), torch.bfloat16, 1.3, False, "cpu", wide=True, cap=3.0)
    compare((3, 128, 64), torch.float32, 0.7, True, "cpu", truncated=True, cap=3.0)
    for cap in (0.5, 3.0, 1e4):
        x = drawn(5, 130, 16, torch.float32)
        found, shipped = results(x, cap=cap), kernel._triton
        kernel._triton = lambda hidden_TD: None
        for a, b in zip(found, results(x, cap=cap), strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)
        kernel._triton = shipped


def kept_logits_change_nothing() -> None:
    for shape in SHAPES[-2:]:
        for dtype, wide in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            x = drawn(*shape, dtype)
            found, want = (results(x, float32_logits=wide, keep_logits=keep) for keep in (True, False))
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def windows_change_float32_sums_alone(in_windows: list[list[torch.Tensor]]) -> None:
    """Windows of another size round each logit equally, and add up the same float32 numbers in another order."""
    for dtype, bound in ((torch.float32, 2**-20), (torch.bfloat16, 2**-8)):  # gradients are cast to 16 bits at the end
        found, want = in_windows.pop(0), results(drawn(65, 257, 16, dtype))
        for a, b, limit in zip(found, want, (2**-21, 2**-21, bound, bound), strict=True):
            assert a.dtype == b.dtype
            assert (a - b).abs().max() <= limit * b.abs().max()


def lend_wide_products() -> Any:
    """Give this CPU the two operations that only a GPU has: sums of 16-bit products in float32."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor) -> torch.Tensor:
        assert a.dtype == b.dtype != dtype == out.dtype == torch.float32
        return torch.mm(a.float(), b.float(), out=out)

    def addmm(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        assert total is out or total.data_ptr() == out.data_ptr()
        return out.add_(mm(a, b, dtype, out=torch.empty_like(out)))

    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    return library


def interpret() -> None:
    from titan_rl.kernels import token_logprob_triton

    kernel._triton = lambda hidden_TD: token_logprob_triton  # the interpreter runs it on CPU tensors
    kept = lend_wide_products()
    token_logprob_triton.SUMS_BLOCK, token_logprob_triton.DESCENT_BLOCK = 64, 64
    # Tiles of at most 16 tokens: a batch of one window and of several, a vocabulary of one window and of several.
    shipped = token_logprob_triton.window
    token_logprob_triton.window = lambda tokens, *_: (max(1, min(tokens, 16)), 104)
    for shape in SHAPES:
        compare(shape, torch.float32, 1.0, False, "cpu")
        compare(shape, torch.bfloat16, 0.7, True, "cpu")
        compare(shape, torch.bfloat16, 1.3, False, "cpu", wide=True)
        compare(shape, torch.float32, 0.7, True, "cpu", truncated=True)
        compare(shape, torch.bfloat16, 1.0, False, "cpu", truncated=True)
    compare((17, 300, 70), torch.float16, 0.7, True, "cpu", wide=True)
    kept_logits_change_nothing()
    caps_bend_all_logits()
    in_windows = [results(drawn(65, 257, 16, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    token_logprob_triton.window = shipped  # one window
    windows_change_float32_sums_alone(in_windows)
    compare((17, 300, 70), torch.float32, 0.7, True, "cpu")
    del kept


def test_interpreted_kernels_agree_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
)
@pytest.mark.parametrize("shape", [*SHAPES, (4097, 33000, 512), (8200, 9001, 64)])
def test_compiled_kernels_agree_with_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, wide: bool, entropy: bool
) -> None:
    compare(shape, dtype, 0.7, entropy, "cuda", wide)
    compare(shape, dtype, 0.7, entropy, "cuda", wide, truncated=True)
    compare(shape, dtype, 0.7, entropy, "cuda", wide, cap=3.0)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_twice() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(513, 256, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(33000, 256, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, 33000, (513,), device="cuda")

    def results() -> list[torch.Tensor]:
        logprob, entropy = token_logprob(hidden, weight, targets, with_entropy_grad=True)
        return [logprob, entropy, *torch.autograd.grad((logprob + entropy).sum(), (hidden, weight))]

    first, again = results(), results()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


if __name__ == "__main__":
    interpret()
