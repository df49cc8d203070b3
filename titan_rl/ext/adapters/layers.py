"""LoRA's adapters by Hugging Face's names: which linear layers have one, and the sizes of its matrices.

y = W x + (alpha / rank) B A x          A [rank, in], B [out, rank]
"""

import math
from collections.abc import Iterator
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


def adaptable(shape: ModelShape) -> list[str]:
    """Return the layers of a block that can have an adapter. The matrices of experts are stacked, and cannot; nor can
    blocks that are not ours."""
    if isinstance(shape, SpecShape):
        return []
    return [name for name, layer in LAYERS.items() if not (shape.experts and layer.startswith("mlp."))]


def targets(lora: LoraSection, shape: ModelShape) -> list[str]:
    """Return the layers of a block that have an adapter."""
    return [name for name in adaptable(shape) if not lora.targets or name in lora.targets]


def adapted(shape: ModelShape, lora: LoraSection) -> list[str]:
    """Return the linear layers of a block that have an adapter, such as "q_proj"."""
    return [LAYERS[target].rpartition(".")[2] for target in targets(lora, shape)]


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the adapter's A and B beside a weight.

    >>> adapter_names("model.layers.0.mlp.up_proj.weight")[0]
    'model.layers.0.mlp.up_proj.lora_A.weight'
    """
    layer = weight.removesuffix(".weight")
    return layer + LORA_A, layer + LORA_B


def adapter_sizes(lora: LoraSection, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the sizes of all adapters' matrices by name; none if all weights are trained."""
    return dict(_sizes(lora, shape)) if lora.on else {}


def _sizes(lora: LoraSection, shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    chosen = targets(lora, shape)
    whole = shape.hf_tensors(head=False) if chosen else {}
    for layer in range(shape.n_layers):
        for target in chosen:
            name = f"model.layers.{layer}.{LAYERS[target]}.weight"
            out, into = whole[name]
            a, b = adapter_names(name)
            yield a, (lora.rank, into)
            yield b, (out, lora.rank)


def cut_by_tensor_parallelism(name: str) -> bool:
    """Return whether tensor parallelism cuts this matrix of an adapter: the one on the side where it cuts the layer."""
    by_columns = any(LAYERS[target] in name for target in ("o", "down"))
    return name.endswith(LORA_A) == by_columns


def adapter_parameters(lora: LoraSection, shape: ModelShape, tp: int = 1) -> int:
    """Return the parameters of all adapters on each of `tp` tensor-parallel ranks: of all blocks, which are alike."""
    sizes = adapter_sizes(lora, replace(shape, n_layers=1))
    return shape.n_layers * sum(
        math.prod(sizes[name]) // (tp if cut_by_tensor_parallelism(name) else 1) for name in sizes
    )


def slot_rank(rank: int) -> int:
    """Return the size of vLLM's slots with room for this rank."""
    return min((size for size in SLOT_RANKS if size >= rank), default=rank)  # checks refuse a rank above all
