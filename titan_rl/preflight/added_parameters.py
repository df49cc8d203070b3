"""Sizes of parameters that are added to the policy and trained in place of its weights, and how engines get them."""

from dataclasses import replace

from titan_rl.config.sections import Config, LoraSection
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import part


class AddedParameters:
    """Nothing is added: all weights are trained. Adapters override this (titan_rl/ext/adapters/sizes.py)."""

    def number(self, tp: int = 1) -> int:
        """Return how many parameters each of `tp` tensor-parallel ranks has, before they are sharded."""
        return 0

    def slot(self, tp: int) -> tuple[int, int]:
        """Return the rank of a slot of an engine, and its parameters on each of `tp` ranks."""
        return 0, 0

    def kept_per_token(self, tp: int, *, recomputes: bool) -> int:
        """Return how many more numbers a block keeps per token for its backward. `recomputes`: it computes every second
        product again."""
        return 0

    def described(self, config: Config) -> str:
        """Describe them in the plan."""
        return ""


def added_parameters(lora: LoraSection, shape: ModelShape) -> AddedParameters:
    sizes = part("sizes of adapters") if lora.on else None  # the checks refuse a key without its part
    return sizes(lora, shape) if sizes else AddedParameters()


def trained_parameters(lora: LoraSection, shape: ModelShape) -> int:
    """Return how many of the policy's parameters are trained: all, or those added to it."""
    return added_parameters(lora, shape).number() or shape.parameters


def with_adapter_sync(config: Config, shape: ModelShape, device: str) -> Config:
    """Return the config without "auto" in lora.sync. It resolves to itself."""
    if config.lora.sync != "auto":
        return config
    fits = part("sync of adapters") if config.lora.on else None
    sync = "adapter" if fits and fits(config, shape, device) else "merge"
    return replace(config, lora=replace(config.lora, sync=sync))
