"""The adapters of an engine that applies LoRA itself (lora.sync = "adapter"): one slot for each policy.

    layer, e.g. qkv_proj:  base_layer.weight
                           lora_a_stacked of q, k, v    [slots, 1, rank, in] each
                           lora_b_stacked of q, k, v    [slots, 1, out, rank] each, times alpha / rank

They are in their slots from the start, as zeros, and are never loaded: a weight sync writes a slot in place and
verifies it, as any parameter. Every request names its slot, so that requests of several policies share a step.
"""

from typing import TYPE_CHECKING, Any

from titan_rl.actors.vllm.vllm_params import in_slot

if TYPE_CHECKING:
    from torch import Tensor


def engine_args(rank: int, layers: tuple[str, ...], slots: int) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for adapters of this rank on these layers of every block."""
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank, "lora_target_modules": [*layers]}


def request(slot: int) -> Any:
    """Return what makes a request use the adapter in a slot. vLLM's prefix cache keeps requests of different names
    apart; it wants a path, which is never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"slot {slot}", slot + 1, "in memory")


def put_zeros(model: Any) -> None:
    """Put adapters of zeros into the slots, and make vLLM set up its tables of requests again. For a new engine, and
    for one whose memory was freed."""
    manager = model.lora_manager
    manager.remove_all_adapters()
    for id in range(1, manager.lora_slots + 1):
        manager.add_adapter(manager.create_dummy_lora(id, manager.lora_config.max_lora_rank, {}))
        manager.activate_adapter(id)


def live_tensors(model: Any, slot: int) -> "dict[str, Tensor]":
    """Return the parameters and the adapter in a slot by the names of the weight plan (vllm_params.py)."""
    tensors = {name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters()}
    for name, layer in model.lora_manager.modules.items():
        for kind, stacked in {"lora_a": layer.lora_a_stacked, "lora_b": layer.lora_b_stacked}.items():
            tensors |= {in_slot(slot, f"{name}.{kind}.{i}"): part[slot, 0] for i, part in enumerate(stacked)}
    return tensors


def check_slots(model: Any) -> None:
    """Raise unless requests compute with the slots that syncs of their policies write."""
    manager = model.lora_manager
    if (ids := [*manager.lora_index_to_id]) != [*range(1, manager.lora_slots + 1)]:
        raise RuntimeError(f"expected adapters 1 to {manager.lora_slots} in vLLM's slots, in order, found {ids}")
