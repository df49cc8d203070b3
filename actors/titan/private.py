"""Every private name of TorchTitan 0.3.0 and torch 2.13 that this project uses. Only this file imports such names.

compile_counters
    How many graphs were compiled, which torch tells nowhere else.
CHECKPOINT_PREFIX
    What activation checkpointing adds to the names of parameters, though not in a state dict.
StridedShard
    How FSDP2 marks a dimension that tensor parallelism had cut before; it has no public name.
drop_unsharded_gradients
    FSDP2 has no public way to drop the gradients of backwards that did not sync: zero_grad() sees shards only.
gathers_together, group_sizes
    FSDP2 has no public way to tell which parameters it gathers together, and how large they are then.
forget_shardings
    DTensor remembers how it sharded the results of operations, and with them the meshes of an earlier process group.
    docs/upstream/dtensor-dead-meshes has torch clear them when it destroys the group.
AsyncCollectiveTensor
    An unfinished gather, as DTensor holds it. The test whether local_map keeps its gradient (experts.py's Mixture)
    makes one, because a real one needs all ranks.
FlexAttention._compiled_flex_attn, _compiled_create_block_mask
    TorchTitan compiles them when it is imported. While a rank imports it, actors/imports.py puts that off to their
    first call.
MoEStateDictAdapter._caculate_indices_from_placements
    TorchTitan's does not know replicated experts; spec.py's OfReplicatedExperts extends it.
TokenChoiceTopKRouter._get_node_limited_routing_scores
    Which groups' experts a token may pass. TorchTitan's forward, which experts.py's Router replaces, asks it.
MuseGlimmerStateDictAdapter._permute, _reverse_permute
    TorchTitan's reorder rows of q and k for rotary embeddings of pairs; muse_glimmer.py's MuseGlimmerAdapter does not.
FileWriter
    DCP's writer of files. The public FileSystemWriter is also a stager, which async_save would then use for its copies.
_async_process_executor._CHECKPOINT_PROCESS
    The process that writes checkpoints of async_mode "async_with_pinned_mem". DCP has no call that ends it; if its rank
    ends first, it prints a traceback at the end of every run.
torchtitan.trainer
    Decoder.Config.update_from_config imports it only to ask whether it was given a Trainer.Config, which it never is
    here. It imports TensorBoard, datasets, pandas and pyarrow: 1,140 modules, 0.8 CPU seconds and 115 MB a rank.
"""

import sys
from collections import Counter
from types import ModuleType
from typing import Any, cast

import torch
from torch._dynamo.utils import counters as compile_counters
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import _FileSystemWriter as FileWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache, _get_fast_path_sharding_prop_cache_stats
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "CHECKPOINT_PREFIX",
    "FileWriter",
    "StridedShard",
    "compile_counters",
    "drop_unsharded_gradients",
    "end_checkpoint_process",
    "forget_shardings",
    "gathers_together",
    "group_sizes",
    "keeps_gradient_of_async_input",
    "update_from_config",
]


def update_from_config(model: Any, config: Any) -> None:
    """Fill sharding and limits of a model's config from `config`, without importing torchtitan.trainer.

    An empty module takes its place for that time. TorchTitan solved it after 0.3 (docs/upgrades.md)."""
    name = "torchtitan.trainer"
    if name in sys.modules:
        model.update_from_config(config=config)
        return
    empty = cast("Any", ModuleType(name))
    empty.Trainer = type("Trainer", (), {"Config": type("Config", (), {})})
    sys.modules[name] = empty
    try:
        model.update_from_config(config=config)
    finally:
        del sys.modules[name]


def forget_shardings() -> bool:
    """Clear DTensor's cached shardings after a process group was destroyed. Return False if torch had cleared them."""
    cached = any(_get_fast_path_sharding_prop_cache_stats())
    if cached:
        _clear_sharding_prop_cache()
    return cached


def end_checkpoint_process() -> None:
    """End the process that writes checkpoints, if there is one. The next checkpoint starts another."""
    _async_process_executor._CHECKPOINT_PROCESS = None  # its __del__ asks the process to end, and joins it


def drop_unsharded_gradients(model: torch.nn.Module) -> None:
    for module in model.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # it was gathered before
                    parameter._unsharded_param.grad = None


def gathers_together(module: FSDPModule) -> bool:
    """Return whether FSDP2 gathers all of a module's own parameters together: not where experts are dealt to ranks."""
    return len(module._get_fsdp_state()._fsdp_param_groups) == 1


def group_sizes(model: torch.nn.Module, *, trained: bool = False) -> dict[str, int]:
    """Return the number of parameters, or of `trained` ones, that a rank has after FSDP2 gathered a group, by the names
    of its modules."""
    names, sizes = dict[int, str](), dict[int, int]()
    for name, module in model.named_modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []:
            names[id(group)] = f"{names.get(id(group), '')} {name}".strip()
            counted = [p for p in group.fsdp_params if p.sharded_param.requires_grad or not trained]
            sizes[id(group)] = sum(parameter._orig_size.numel() for parameter in counted)
    summed = Counter[str]()
    for group, size in sizes.items():  # experts that are dealt to ranks are a separate group in their block
        summed[names[group]] += size
    return dict(summed)


def keeps_gradient_of_async_input(mesh: DeviceMesh) -> bool:
    """Return whether an input that is still being gathered requires a gradient inside of local_map. Communicates
    nothing. torch 2.13 does not keep it (docs/upstream/local-map-gradient)."""
    placements = [Replicate()] * mesh.ndim
    with torch.enable_grad():
        unfinished = AsyncCollectiveTensor(torch.zeros(1, device=mesh.device_type))
        x = DTensor.from_local(unfinished, mesh, placements, run_check=False).requires_grad_()
        asked: Any = local_map(lambda local: local.requires_grad, out_placements=None, in_placements=(placements,))
        return asked(x)
