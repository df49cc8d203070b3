"""Checks of generator.quantization."""

from collections.abc import Iterator
from functools import partial

from titan_rl.config.sections import Config
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ABSORBED, ModelShape, SpecShape

FP8_MULTIPLE = 16  # rows and columns of CUTLASS's fp8 products


def quantization_problems(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    """Check that vLLM's kernels take weights in 8 bits, and leave them in the order of the weight plan."""
    wrong, g = partial(problem, config), config.generator
    if shape.experts:
        yield wrong("generator.quantization", f'"none", because the experts of {shape.family} are not quantized')
    if g.quantization == "int8" and device == "cuda":
        yield wrong("generator.quantization", '"fp8" or "none", because vLLM has no int8 kernel that a sync can write')
    if g.quantization != "fp8":
        return
    if g.dtype != "bfloat16":
        yield wrong("generator.dtype", '"bfloat16" or "auto", because vLLM\'s fp8 kernels take no other')
    if isinstance(shape, SpecShape) and any(name.endswith(ABSORBED) for name in shape.tensors):
        why = "because vLLM's latent attention makes copies of fp8 weights that no sync writes"
        yield wrong("generator.quantization", f'"int8" or "none" for {shape.family}, {why}')
    for what, size in dict.fromkeys(_sizes(shape, g.tensor_parallel_degree)):
        if size % FP8_MULTIPLE:
            why = f"because vLLM pads fp8 weights, a rank of which has {size} {what}, to multiples of {FP8_MULTIPLE}"
            yield wrong("generator.quantization", f'"none", {why}')


def _sizes(shape: ModelShape, tp: int) -> Iterator[tuple[str, int]]:
    """Yield numbers of rows and columns of a rank's linear layers. A head stays whole."""
    if isinstance(shape, SpecShape):
        for weight, linear in shape.adaptable.items():
            rows, columns = shape.tensors[weight]
            yield "rows", max(rows // tp, min(rows, shape.head_dim)) if linear.cut == "rows" else rows
            yield "columns", columns // tp if linear.cut == "columns" else columns
        return
    queries, keys = shape.n_heads // tp * shape.head_dim, max(1, shape.n_kv_heads // tp) * shape.head_dim
    yield "dim", shape.dim
    yield "query rows", queries
    yield "q, k and v rows", queries + 2 * keys
    yield "hidden_dim", shape.hidden_dim // tp
