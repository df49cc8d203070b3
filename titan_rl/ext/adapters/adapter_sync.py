"""Chooses how adapters reach the engines (lora.sync = "auto"), and checks whether vLLM can apply them ("adapter")."""

from collections.abc import Iterator
from dataclasses import replace

from titan_rl.config.sections import Config
from titan_rl.ext.adapters.layers import SLOT_RANKS, adapted_weights
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ABSORBED, ModelShape

MERGED = 'lora.sync = "merge" allows any'


def check_adapter_sync(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    if config.lora.in_vllm is None or not config.samples_rollouts:
        return
    if shape.experts:
        yield problem(
            config, "lora.sync", f'"merge" for {shape.family}: with adapters vLLM computes experts in another way'
        )
    if any(name.endswith(ABSORBED) for name in adapted_weights(config.lora, shape)):
        why = f"in place of {ABSORBED.removesuffix('.weight')} vLLM computes with copies of its parts"
        yield problem(config, "lora.sync", f'"merge" for {shape.family}: {why}')
    if config.generator.quantization != "none":
        why = "because adapters land beside weights that are not quantized"
        yield problem(config, "generator.quantization", f'"none", {why} ({MERGED})')
    if config.lora.rank not in SLOT_RANKS:
        ranks = f"{', '.join(map(str, SLOT_RANKS[:-1]))} or {SLOT_RANKS[-1]}"
        yield problem(config, "lora.rank", f"{ranks}, the ranks of vLLM's adapters ({MERGED})")
    if device == "cuda" and config.generator.dtype == "float32":
        yield problem(config, "generator.dtype", f'"bfloat16", as vLLM\'s kernels for adapters have it ({MERGED})')


def fits(config: Config, shape: ModelShape, device: str) -> bool:
    """Return True if vLLM can apply the adapters."""
    apart = replace(config, lora=replace(config.lora, sync="adapter"))
    return config.samples_rollouts and not list(check_adapter_sync(apart, shape, device))


def merge_warning(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    """Warn if engines get adapters that are rounded away. The config has no "auto" in lora.sync."""
    lora = config.lora
    if not lora.on or not config.samples_rollouts or lora.sync != "merge" or config.generator.dtype == "float32":
        return
    apart = replace(config, lora=replace(lora, sync="adapter"))
    because = "; ".join(check_adapter_sync(apart, shape, device)) or 'lora.sync = "adapter" is exact'
    yield (
        f"adapters are merged into {config.generator.dtype} weights, which rounds small changes away: at a rate of "
        f"3e-5 the engines followed 8% of the first update, and 45% after 16 (docs/models.md). A higher optimizer.lr "
        f"loses less. {because}"
    )
