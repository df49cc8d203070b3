"""Checks of adapters that vLLM applies (lora.sync = "adapter")."""

from collections.abc import Iterator

from titan_rl.actors.vllm.vllm_adapter import RANKS
from titan_rl.config.sections import Config
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ModelShape

MERGED = 'lora.sync = "merge" allows any'


def check_adapter_sync(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    if config.lora.in_vllm is None or not config.samples_rollouts:
        return
    if shape.experts:
        yield problem(
            config, "lora.sync", f'"merge" for {shape.family}: with adapters vLLM computes experts in another way'
        )
    if config.generator.quantization != "none":
        why = "because adapters land beside weights that are not quantized"
        yield problem(config, "generator.quantization", f'"none", {why} ({MERGED})')
    if config.lora.rank not in RANKS:
        ranks = f"{', '.join(map(str, RANKS[:-1]))} or {RANKS[-1]}"
        yield problem(config, "lora.rank", f"{ranks}, the ranks of vLLM's adapters ({MERGED})")
    if device == "cuda" and config.generator.dtype == "float32":
        yield problem(config, "generator.dtype", f'"bfloat16", as vLLM\'s kernels for adapters have it ({MERGED})')
