"""Float32 products of Triton kernels that name no precision, such as vLLM's attention, compiled for CUDA."""

import pytest

from titan_rl.config.sections import Config, GeneratorSection
from titan_rl.train.berths import cuda_environment

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
