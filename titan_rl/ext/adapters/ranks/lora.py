"""LoRA by TorchTitan's converter: adapters beside frozen linear layers, which begin alike on any mesh."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.lora import LoRAConverter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.sync.held_shards import whole
from titan_rl.actors.titan.adaptation import Adaptation
from titan_rl.actors.titan.model import TitanModel, local
from titan_rl.actors.titan.spec import plain
from titan_rl.actors.titan.titan_cpu import load_whole
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import (
    PEFT_CONFIG,
    PEFT_FOLDER,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    adapted,
    adapted_weights,
    adapter_names,
    builders,
    targets,
)
from titan_rl.ext.adapters.ranks.merged import Merged, applied
from titan_rl.wire import weight_plan
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.seeds import derive

MATRIX = re.compile(r"\.lora_([ab])(?=\.weight$)")


class Adapters(Adaptation):
    """Trains adapters alone. Weight syncs move them, or the weights with adapters added (lora.sync)."""

    freezes = True

    def __init__(self, lora: LoraSection) -> None:
        self._lora = lora

    def convert(self, spec: ModelSpec, shape: ModelShape) -> None:
        """Give the linear layers of lora.targets their adapters, which are sharded like the layers."""
        built = builders(shape)
        names = sorted({built[target] for target in targets(self._lora, shape)})
        converter = LoRAConverter.Config(rank=self._lora.rank, alpha=self._lora.alpha, target_modules=names)
        spec.model = converter.build().convert(spec.model)

    def freeze(self, model: nn.Module) -> None:
        """Keep all other weights in lora.base_dtype."""
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(getattr(torch, self._lora.base_dtype))

    def begin(self, model: nn.Module, seed: int) -> None:
        begin_adapters(model, seed)

    def adds(self, name: str) -> bool:
        return is_adapter(name)

    def syncs(self, name: str) -> bool:
        return self._lora.sync == "adapter" or not is_adapter(name)

    def hf_name(self, name: str, of_weight: Callable[[str], str]) -> str:
        matrix = MATRIX.search(name)
        if matrix is None:
            return of_weight(name)
        return adapter_names(of_weight(MATRIX.sub("", name)))["ab".index(matrix[1])]

    def state(self, model: nn.Module) -> ModelWrapper:
        return TrainedState([model])

    def packed(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return applied(params, self._lora.scale) if self._lora.in_vllm else Merged(params, self._lora.scale)

    def merged(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        merged = Merged(params, self._lora.scale)
        for name, value in state.items():
            if name not in merged.adapters:
                yield name, value
            elif isinstance(value, DTensor):
                size = {"shape": value.shape, "stride": value.stride()}
                yield name, DTensor.from_local(merged[name], value.device_mesh, value.placements, **size)
            else:
                yield name, merged[name]

    def write(self, folder: Path, params: Mapping[str, Tensor], shape: ModelShape, base: str) -> None:
        adapters = {name: p for name, p in params.items() if weight_plan.is_adapter(name)}
        tensors = {name: whole(parameter).to("cpu", copy=True) for name, parameter in adapters.items()}
        if dist.get_rank() == 0:
            write_peft(folder / PEFT_FOLDER, tensors, self._lora, shape, base)

    def read(self, model: nn.Module, names: Mapping[str, str], folder: str | Path) -> None:
        """Load the adapters of an exported folder; without one, set B to zero, which turns the adapters off."""
        if folder:
            back = {hf: plain(name) for name, hf in names.items()}
            tensors = read_peft(Path(folder) / PEFT_FOLDER)
            load_whole(model, {back[name]: tensor for name, tensor in tensors.items()})
            return
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name) and ".lora_b." in name:
                    local(parameter).zero_()


def is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


@torch.no_grad()
def merge(model: TitanModel) -> None:
    """Add a model's adapters to its weights, and turn them off."""
    parameters = model.by_hf_name
    merged = Merged(parameters, model.config.lora.scale)
    for name in merged.adapters:
        local(parameters[name]).copy_(merged[name])
    model.adaptation.read(model.model, model.names, "")


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
    layers = adapted(shape, lora)
    if isinstance(shape, SpecShape):  # whose folder may have more layers of these names, such as a vision tower's
        layers = [weight.removesuffix(".weight") for weight in adapted_weights(lora, shape)]
    (folder / PEFT_WEIGHTS).write_bytes(save(named, {"format": "pt"}))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_peft(folder: Path) -> dict[str, torch.Tensor]:
    """Return whole adapters by Hugging Face's names."""
    tensors = load_file(folder / PEFT_WEIGHTS)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
