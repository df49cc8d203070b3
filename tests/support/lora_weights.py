"""Random adapters as trainers hold them, and a model that they are merged into."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_rl.config.sections import LoraSection
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import LORA_A, LORA_B, Shard

if TYPE_CHECKING:
    from torch import Tensor


def adapters(model: Any, shape: ModelShape, lora: LoraSection, seed: int) -> "dict[str, Tensor]":
    """Return A and B of every adapted layer of a Hugging Face model, by PEFT's names."""
    import torch

    from titan_rl.ext.adapters.layers import adapted

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer.endswith(tuple(adapted(shape, lora))):
            out, width = weight.shape
            tensors[layer + LORA_A] = 0.2 * torch.randn(lora.rank, width, generator=generator)
            tensors[layer + LORA_B] = 0.05 * torch.randn(out, lora.rank, generator=generator)
    return tensors


def merged(model: Any, tensors: "Mapping[str, Tensor]", lora: LoraSection) -> Any:
    """Return a copy of the model whose weights have the adapters added."""
    import torch

    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(LORA_A):
                layer = name.removesuffix(LORA_A)
                product = tensors[layer + LORA_B] @ a
                changed.get_submodule(layer).weight.add_(lora.scale * product)
    return changed


def shards(tensors: "Mapping[str, Tensor]") -> list[Shard]:
    """Return the shards of the only rank, which holds all."""
    return [Shard(name, 0, len(w), 0, w[0].numel()) for name, w in tensors.items()]
