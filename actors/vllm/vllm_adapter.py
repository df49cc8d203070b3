"""The one adapter of an engine that applies LoRA itself (lora.sync = "adapter").

    layer, e.g. qkv_proj:  base_layer.weight
                           lora_a_stacked of q, k, v    [slots, 1, rank, in] each
                           lora_b_stacked of q, k, v    [slots, 1, out, rank] each, times alpha / rank

It is in the only slot from the start, as zeros, and is never loaded: a weight sync writes the slot in place and
verifies it, as any parameter. Every request uses it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ID = 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's sizes of a slot. A smaller adapter would leave rows that no sync writes or verifies."""


def engine_args(rank: int, layers: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for an adapter of this rank on these layers of every block."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": [*layers]}


def request() -> Any:
    """Return what makes a request use the adapter. vLLM wants a path, which is never opened."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ID, "in memory")


def put_zeros(model: Any) -> None:
    """Put an adapter of zeros into the slot, and make vLLM set up its tables of requests again. For a new engine, and
    for one whose memory was freed."""
    manager = model.lora_manager
    manager.remove_all_adapters()
    manager.add_adapter(manager.create_dummy_lora(ID, manager.lora_config.max_lora_rank, {}))
    manager.activate_adapter(ID)


def live_tensors(model: Any) -> "dict[str, Tensor]":
    """Return the parameters and the adapter by the names of the weight plan (vllm_params.py)."""
    tensors = {name.replace(".base_layer.", "."): p.detach() for name, p in model.named_parameters()}
    for name, layer in model.lora_manager.modules.items():
        for kind, stacked in {"lora_a": layer.lora_a_stacked, "lora_b": layer.lora_b_stacked}.items():
            tensors |= {f"{name}.{kind}.{i}": part[0, 0] for i, part in enumerate(stacked)}
    return tensors


def check_slot(model: Any) -> None:
    """Raise unless requests with the adapter compute with the slot that syncs write."""
    if (ids := [*model.lora_manager.lora_index_to_id]) != [ID]:
        raise RuntimeError(f"expected adapter {ID} in vLLM's only slot, found {ids}")
