"""The adapters of an engine that applies LoRA itself (lora.sync = "adapter"): one slot for each policy.

    layer, e.g. qkv_proj:  base_layer.weight
                           lora_a_stacked of q, k, v    [slots, 1, rank, in] each
                           lora_b_stacked of q, k, v    [slots, 1, out, rank] each, times alpha / rank

They are in their slots from the start, as zeros, and are never loaded: a weight sync writes a slot in place and
verifies it, as any parameter. Every request names its slot, so that requests of several policies share a step.

Opponents' adapters are in folders, which requests name. vLLM reads one into a further slot when it is first used, and
keeps the last used ones. A folder whose name ends with a digest is read only if its file has it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.actors.vllm.engine_adapters import EngineAdapters
from titan_rl.actors.vllm.vllm_params import in_slot
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import PEFT_WEIGHTS, adapted, adapted_weights, in_block
from titan_rl.ext.adapters.ranks.cpu_adapters import apply_adapters
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.types import Request

if TYPE_CHECKING:
    from torch import Tensor

MOST_READ = 32
"""Opponents' adapters that stay in host memory. Requests for others read again."""


@dataclass(frozen=True, slots=True)
class SlotAdapters(EngineAdapters):
    lora: LoraSection
    shape: ModelShape
    opponents: int = 0  # the most whose requests are open at the same time
    _numbers: dict[str, int] = field(default_factory=dict, compare=False)  # vLLM's, by folder

    def engine_args(self, args: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
        if on_cpu:
            apply_adapters()
        layers = modules(self.lora, self.shape, args)
        most = self.slots + self.opponents
        sizes = {"max_loras": most, "max_cpu_loras": most + MOST_READ * bool(self.opponents)}
        sizes["max_lora_rank"] = self.lora.rank
        return {"enable_lora": True, "lora_target_modules": layers, **sizes}

    def request(self, request: Request) -> Any:
        """Return what makes a request use the adapter in its slot. vLLM's prefix cache keeps requests of different
        names apart; it wants a path, which is never opened."""
        from vllm.lora.request import LoRARequest

        if folder := request.adapter:
            if folder not in self._numbers:
                check_digest(Path(folder))
                self._numbers[folder] = self.slots + len(self._numbers) + 1
            number = self._numbers[folder]
            return LoRARequest(f"opponent {number}", number, folder)
        return LoRARequest(f"slot {request.slot}", request.slot + 1, "in memory")

    def begin(self, llm: Any) -> None:
        llm.apply_model(partial(put_zeros, slots=self.slots))

    def check(self, llm: Any) -> None:
        llm.apply_model(partial(check_slots, slots=self.slots))

    def tensors(self, model: Any, slot: int) -> "dict[str, Tensor]":
        tensors = dict[str, "Tensor"]()
        for name, layer in model.lora_manager.modules.items():
            for kind, stacked in {"lora_a": layer.lora_a_stacked, "lora_b": layer.lora_b_stacked}.items():
                tensors |= {in_slot(slot, f"{name}.{kind}.{i}"): part[slot, 0] for i, part in enumerate(stacked)}
        return tensors


def modules(lora: LoraSection, shape: ModelShape, args: Mapping[str, Any]) -> list[str]:
    """Return what an engine of EngineArgs calls the adapted layers: the folder's names but for other models, whose
    class in vLLM names them."""
    if not isinstance(shape, SpecShape):
        return adapted(shape, lora)
    from vllm import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_cls

    model: Any = get_model_cls(EngineArgs(**args).create_model_config())
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    weights = adapted_weights(lora, shape)
    names = [mapper.get_rename_mapper().map_name(weight) for weight in weights] if mapper else weights
    return sorted({in_block(name).rpartition(".")[2] for name in names})


def check_digest(folder: Path) -> None:
    """Raise ValueError unless the folder's adapter has the digest that ends its name, if it has one."""
    weights, digest = folder / PEFT_WEIGHTS, folder.name.partition(".")[2]
    try:
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
    except OSError as error:  # vLLM would fail in a step, and with it all requests
        raise ValueError(f"expected an adapter in {folder}, found none: {error.strerror}") from error
    if not found.startswith(digest):
        raise ValueError(f"{weights}: expected the SHA-256 {digest}..., found {found[: len(digest)]}")


def put_zeros(model: Any, slots: int) -> None:
    """Put adapters of zeros into the policies' slots, and make vLLM set up its tables of requests again. For a new
    engine, and for one whose memory was freed."""
    manager = model.lora_manager
    manager.remove_all_adapters()
    for id in range(1, slots + 1):
        manager.add_adapter(manager.create_dummy_lora(id, manager.lora_config.max_lora_rank, {}))
        manager.pin_adapter(id)  # activates it, and an opponent's never takes its slot


def check_slots(model: Any, slots: int) -> None:
    """Raise unless requests compute with the slots that syncs of their policies write."""
    ids = [*model.lora_manager.lora_index_to_id][:slots]
    if ids != [*range(1, slots + 1)]:
        raise RuntimeError(f"expected adapters 1 to {slots} in vLLM's slots, in order, found {ids}")
