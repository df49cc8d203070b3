"""LoRA's adapters by Hugging Face's names: which linear layers have one, and the sizes of its matrices.

y = W x + (alpha / rank) B A x          A [rank, in], B [out, rank]
"""

import math
import re
from dataclasses import replace

from titan_rl.config.sections import LoraSection
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.weight_plan import LORA_A, LORA_B

LAYERS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Linear layers of a block, by the names that lora.targets takes."""
TITAN_NAMES = {"q": "wq", "k": "wkv", "v": "wkv", "o": "wo", "gate": "w1", "up": "w3", "down": "w2"}
"""What TorchTitan's configs call them. One config builds k and v."""
WHOLE_MODEL_FACTOR = 10
"""LoRA's best learning rate, as a multiple of the whole model's ("LoRA Without Regret", Thinking Machines, 2025)."""
PEFT_FOLDER = "adapter"
"""Folder of the adapters in an exported one."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's sizes of a slot. A smaller adapter would leave rows that no sync writes or verifies."""
PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


def adaptable(shape: ModelShape) -> dict[str, str]:
    """Return the layers of blocks that can have an adapter: by name in lora.targets, the name in a block of the folder;
    both are the same for a layer without a short name. The matrices of experts are stacked, and cannot. A model that is
    not made of our blocks was asked (actors/titan/spec_sizes.py)."""
    if isinstance(shape, SpecShape):
        short = {layer: name for name, layer in LAYERS.items()}
        return {short.get(layer, layer): layer for layer in map(in_block, shape.adaptable)}
    return {name: layer for name, layer in LAYERS.items() if not (shape.experts and layer.startswith("mlp."))}


def in_block(weight: str) -> str:
    """Return a layer's name in its block.

    >>> in_block("model.layers.0.mlp.up_proj.weight")
    'mlp.up_proj'
    """
    return re.split(r"\.layers\.\d+\.", weight.removesuffix(".weight"))[-1]


def targets(lora: LoraSection, shape: ModelShape) -> list[str]:
    """Return the layers of a block that have an adapter."""
    return [name for name in adaptable(shape) if not lora.targets or name in lora.targets]


def adapted(shape: ModelShape, lora: LoraSection) -> list[str]:
    """Return the linear layers of a block that have an adapter, such as "q_proj"."""
    layers = adaptable(shape)
    return [layers[target].rpartition(".")[2] for target in targets(lora, shape)]


def builders(shape: ModelShape) -> dict[str, str]:
    """Return what TorchTitan's configs call the layers that can have an adapter."""
    if isinstance(shape, SpecShape):
        by_layer = {in_block(weight): linear.config for weight, linear in shape.adaptable.items()}
        return {name: by_layer[layer] for name, layer in adaptable(shape).items()}
    return {name: TITAN_NAMES[name] for name in adaptable(shape)}


def uncut(shape: ModelShape) -> set[str]:
    """Return the layers that can have an adapter without tensor parallelism alone."""
    if isinstance(shape, SpecShape):
        whole = {in_block(weight) for weight, linear in shape.adaptable.items() if not linear.cut}
        return {name for name, layer in adaptable(shape).items() if layer in whole}
    return {"o"} if shape.parts.sinks else set()


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the adapter's A and B beside a weight.

    >>> adapter_names("model.layers.0.mlp.up_proj.weight")[0]
    'model.layers.0.mlp.up_proj.lora_A.weight'
    """
    layer = weight.removesuffix(".weight")
    return layer + LORA_A, layer + LORA_B


def adapted_weights(lora: LoraSection, shape: ModelShape) -> list[str]:
    """Return the names of all weights beside which there is an adapter; none if all weights are trained."""
    layers = adaptable(shape)
    chosen = [layers[target] for target in targets(lora, shape)] if lora.on else []
    if isinstance(shape, SpecShape):
        return [weight for weight in shape.adaptable if in_block(weight) in chosen]
    return [f"model.layers.{layer}.{name}.weight" for layer in range(shape.n_layers) for name in chosen]


def adapter_sizes(lora: LoraSection, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the sizes of all adapters' matrices by name; none if all weights are trained."""
    names, sizes = adapted_weights(lora, shape), dict[str, tuple[int, int]]()
    whole = shape.hf_tensors(head=False) if names else {}
    for name in names:
        out, into = whole[name]
        a, b = adapter_names(name)
        sizes |= {a: (lora.rank, into), b: (out, lora.rank)}
    return sizes


def cut_of(weight: str, shape: ModelShape) -> str:
    """Return how tensor parallelism cuts a layer: by "rows" or "columns"."""
    if isinstance(shape, SpecShape):
        return shape.adaptable[weight].cut
    return "columns" if in_block(weight) in (LAYERS["o"], LAYERS["down"]) else "rows"


def adapter_parameters(lora: LoraSection, shape: ModelShape, tp: int = 1) -> int:
    """Return the parameters of all adapters on each of `tp` tensor-parallel ranks. It cuts the matrix on the side where
    it cuts the layer."""
    alike = 1 if isinstance(shape, SpecShape) else shape.n_layers
    one = shape if isinstance(shape, SpecShape) else replace(shape, n_layers=1)
    sizes, number = adapter_sizes(lora, one), 0
    for weight in adapted_weights(lora, one):
        a, b = (math.prod(sizes[name]) for name in adapter_names(weight))
        cut = cut_of(weight, shape)
        number += a // (tp if cut == "columns" else 1) + b // (tp if cut == "rows" else 1)
    return alike * number


def slot_rank(rank: int) -> int:
    """Return the size of vLLM's slots with room for this rank."""
    return min((size for size in SLOT_RANKS if size >= rank), default=rank)  # checks refuse a rank above all
