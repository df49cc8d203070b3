"""The log-prob kernels as production launches them, compiled for GPUs that are not here."""

from functools import cache
from typing import Any

import pytest

from titan_rl.config.sections import Config, GeneratorSection
from titan_rl.train.rank_places import cuda_environment

pytest.importorskip("triton")

from bench.ahead_of_time import Launch, compile_for
from bench.kernel_launches import launches
from titan_rl.kernels import token_logprob_triton as fused

LLAMA, QWEN = (128256, 4096), (151936, 1024)  # vocabulary and width of Llama 3 8B and Qwen3 0.6B
SHARD = (128256 // 8, 4096)  # under tensor parallelism 8


@cache
def distinct(entropy: bool, float32_logits: bool, truncated: bool = False, cap: float = 0.0) -> tuple[Launch, Launch]:
    """Return the two launches, which depend neither on the model nor on the number of tokens: none is compiled again in
    the middle of a run."""
    shapes = [(4096, LLAMA), (4096, QWEN), (4096, SHARD), (4095, LLAMA), (770, LLAMA), (20000, QWEN)]
    keys: dict[str, Any] = {"float32_logits": float32_logits, "entropy": entropy, "truncated": truncated, "cap": cap}
    every = [launches(n, *shape, **keys) for n, shape in shapes]
    assert all(found == every[0] for found in every[1:])
    sums, descent = every[0]
    return sums, descent


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_the_sums_take_one_pass_at_the_memorys_rate(float32_logits: bool, capability: int) -> None:
    launch = distinct(False, float32_logits)[0]
    assert launch.kernel is fused.softmax_sums_kernel
    found = compile_for(launch, capability)
    assert found.resident_warps >= 48  # 64 at most
    assert found.spilled == found.count("LDL", "STL") == 0
    assert found.shared <= 64  # for reductions over the warps
    elements = fused.SUMS_BLOCK // (32 * found.warps)  # per thread and round of the loop
    assert found.instructions["LDG.E.128"] == elements * (4 if float32_logits else 2) // 16
    assert found.instructions["LDG.E.U16"] <= 1  # the target's
    assert found.count("MUFU") == elements + 1


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("float32_logits", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_descent_reads_and_writes_sixteen_bytes_at_once(
    entropy: bool, float32_logits: bool, capability: int
) -> None:
    launch = distinct(entropy, float32_logits)[1]
    assert launch.kernel is fused.descent_kernel
    found = compile_for(launch, capability)
    assert found.resident_warps == 64
    assert found.spilled == found.count("LDL", "STL") == found.shared == 0
    elements = fused.DESCENT_BLOCK // (32 * found.warps)
    assert found.instructions["LDG.E.128"] == elements * (4 if float32_logits else 2) // 16
    assert found.instructions["STG.E.128"] == elements * 2 // 16
    assert found.instructions["LDG.E.U16"] == found.instructions["STG.E.U16"] == 0


@pytest.mark.parametrize("capability", [80, 100])
def test_kept_sets_are_read_in_the_same_pass(capability: int) -> None:
    sums, descent = distinct(True, False, truncated=True)
    plain = compile_for(distinct(True, False)[0], capability)
    for launch in (sums, descent):
        found = compile_for(launch, capability)
        assert found.spilled == found.count("LDL", "STL") == 0
        assert found.resident_warps >= 40  # 64 at most
    assert compile_for(sums, capability).instructions["LDG.E.128"] == plain.instructions["LDG.E.128"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_logits_are_capped_in_the_same_pass(capability: int) -> None:
    for capped, plain in zip(distinct(True, False, cap=30.0), distinct(True, False), strict=True):
        found = compile_for(capped, capability)
        assert found.spilled == found.count("LDL", "STL") == 0
        assert found.instructions["LDG.E.128"] == compile_for(plain, capability).instructions["LDG.E.128"]
        assert found.instructions["STG.E.128"] == compile_for(plain, capability).instructions["STG.E.128"]


triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


@triton.jit
def multiply(left, right, product) -> None:  # noqa: ANN001
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(product + at, tl.dot(tl.load(left + at), tl.load(right + at)))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "tf32"), [("float32", False), ("bfloat16", True)])
def test_generators_of_float32_multiply_in_float32(
    capability: int, dtype: str, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's cache keeps both kernels of one source."""
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for name, value in cuda_environment(Config(generator=GeneratorSection(dtype=dtype))).items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    source = ASTSource(multiply, dict.fromkeys(("left", "right", "product"), "*fp32"))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert ("tf32" in compiled.asm["ptx"]) == tf32
