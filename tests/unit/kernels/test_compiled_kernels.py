"""The log-prob kernels as production launches them, compiled for GPUs that are not here."""

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.ahead_of_time import Launch, compile_for, recorded
from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels import token_logprob_triton as fused

LLAMA, QWEN = (128256, 4096), (151936, 1024)  # vocabulary and width of Llama 3 8B and Qwen3 0.6B
SHARD = (128256 // 8, 4096)  # under tensor parallelism 8


def launches(tokens: int, shape: tuple[int, int], wide: bool, entropy: bool) -> list[Launch]:
    """Record what a forward and a backward launch, in bf16."""
    vocabulary, size = shape
    hidden = torch.empty(tokens, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    keys: dict[str, Any] = {"with_entropy_grad": entropy, "float32_logits": wide}

    def forward_backward() -> None:
        logprob, entropies = kernel.token_logprob(hidden, weight, targets, 0.7, **keys)
        (logprob.sum() + (entropies.sum() if entropy else 0)).backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_triton", lambda hidden_TD: fused)
        return recorded(forward_backward)


@cache
def distinct(entropy: bool, wide: bool) -> tuple[Launch, Launch]:
    """Return the two launches, which do not depend on the model nor on the number of tokens: none is compiled again in
    the middle of a run."""
    shapes = [(4096, LLAMA), (4096, QWEN), (4096, SHARD), (4095, LLAMA), (770, LLAMA), (20000, QWEN)]
    every = [launches(tokens, shape, wide, entropy) for tokens, shape in shapes]
    assert all(found == every[0] for found in every[1:])
    sums, descent = every[0]
    return sums, descent


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("wide", [False, True])
def test_the_sums_take_one_pass_at_the_memorys_rate(wide: bool, capability: int) -> None:
    launch = distinct(entropy=False, wide=wide)[0]
    assert launch.kernel is fused.softmax_sums_kernel
    found = compile_for(launch, capability)
    assert found.registers <= 40  # 6 programs of 8 warps on a multiprocessor: 48 of 64 warps (of 2048 threads)
    assert found.spilled == found.count("LDL", "STL") == 0
    assert found.shared <= 64  # for reductions over the warps
    elements = fused.SUMS_BLOCK // (32 * found.warps)  # of a thread, in a round of the loop
    assert found.instructions["LDG.E.128"] == elements * (4 if wide else 2) // 16
    assert found.instructions["LDG.E.U16"] <= 1  # the target's
    assert found.count("MUFU") == elements + 1


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_descent_reads_and_writes_sixteen_bytes_at_once(entropy: bool, wide: bool, capability: int) -> None:
    launch = distinct(entropy, wide)[1]
    assert launch.kernel is fused.descent_kernel
    found = compile_for(launch, capability)
    assert found.registers <= 32  # all 64 warps of a multiprocessor
    assert found.spilled == found.count("LDL", "STL") == found.shared == 0
    elements = fused.DESCENT_BLOCK // (32 * found.warps)
    assert found.instructions["LDG.E.128"] == elements * (4 if wide else 2) // 16
    assert found.instructions["STG.E.128"] == elements * 2 // 16
    assert found.instructions["LDG.E.U16"] == found.instructions["STG.E.U16"] == 0
