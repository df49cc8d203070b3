"""LoRA by TorchTitan's converter: adapters beside frozen linear layers, which begin alike on any mesh."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.lora import LoRAConverter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan.titan_cpu import load_whole
from titan_rl.config.sections import LoraSection
from titan_rl.wire.adapters import LAYERS, PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, TITAN_NAMES, targets
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.seeds import derive


def add_adapters(spec: ModelSpec, lora: LoraSection, shape: ModelShape) -> None:
    """Give the linear layers of lora.targets their adapters, which are sharded like the layers."""
    names = sorted({TITAN_NAMES[target] for target in targets(lora, shape)})
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=names)
    spec.model = converter.build().convert(spec.model)


def is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


def freeze_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Train the adapters alone, and keep all other weights in `dtype`."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def begin_adapters(model: nn.Module, seed: int, rank: int = 0, layers: Collection[str] | None = None) -> None:
    """Draw A as PEFT does, from the seed and the parameter's name, and set B to zero: the model computes what its
    frozen weights do. Rows of A beyond `rank` are zero, as is A where a layer's parameter is not in `layers`. Training
    keeps both at zero, and gives what adapters of that rank on those layers give. Defaults: all."""
    state = dict[str, torch.Tensor]()
    for name, like in model.state_dict().items():
        if ".lora_a." in name:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name) % 2**63)
            bound = 1 / math.sqrt(like.shape[1])
            drawn = torch.empty(rank or like.shape[0], like.shape[1]).uniform_(-bound, bound, generator=generator)
            state[name] = nn.functional.pad(drawn, (0, 0, 0, like.shape[0] - len(drawn)))
            if layers is not None and name not in layers:
                state[name].zero_()
        elif ".lora_b." in name:
            state[name] = torch.zeros(like.shape)
    load_whole(model, state)


class TrainedState(ModelWrapper):
    """The trained parameters alone, as the model of a checkpoint: frozen ones come from the folder or the seed."""

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super()._get_state_dict().items() if is_adapter(name)}


def write_peft(folder: Path, tensors: dict[str, torch.Tensor], lora: LoraSection, shape: ModelShape, base: str) -> None:
    """Write whole adapters, by Hugging Face's names, in PEFT's layout. `base`: the folder of the frozen weights."""
    folder.mkdir()
    named = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    (folder / PEFT_WEIGHTS).write_bytes(save(named, {"format": "pt"}))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [LAYERS[target].rpartition(".")[2] for target in targets(lora, shape)],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_peft(folder: Path) -> dict[str, torch.Tensor]:
    """Return whole adapters by Hugging Face's names."""
    tensors = load_file(folder / PEFT_WEIGHTS)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
