"""What gloo_ranks.on_ranks runs to count the bytes that the ranks of a mesh really allocate."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from support.rank_programs import MESHES
from support.trainer_cases import samples
from titan_rl.config.auto import on_device
from titan_rl.config.choices import Family
from titan_rl.config.sections import Config, JobSection, ModelSection

READERS = 2  # tensor-parallel ranks of the generators


def config_of(layout: str, *, tied: bool, moments: Literal["master", "bfloat16"] = "master") -> Config:
    family: Family = "qwen3_moe" if "ep" in layout else "qwen3"
    base = Config(parallelism=MESHES[layout], model=ModelSection(name=family, enable_weight_tying=tied))
    config = replace(
        base,
        training=replace(base.training, seq_len=64, local_batch_size=1, gradient_sync="microbatch"),
        generator=replace(base.generator, tensor_parallel_degree=READERS),
        algorithm=replace(base.algorithm, name="sft"),
        optimizer=replace(base.optimizer, moments=moments),
    )
    return on_device(config, "cpu")


def allocated(folder: Path, layout: str, tied: bool, moments: Literal["master", "bfloat16"]) -> dict[str, int]:
    """Return the bytes of the fullest rank, by purpose."""
    import torch
    import torch.distributed as dist

    from titan_rl.actors.sync.held_shards import shards_of
    from titan_rl.actors.sync.staging import Staging
    from titan_rl.actors.titan.model import local
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.actors.vllm.vllm_params import pieces
    from titan_rl.batch.packing import pack
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.weight_plan import plan

    config = replace(config_of(layout, tied=tied, moments=moments), job=JobSection(dump_folder=str(folder)))
    shape = shape_of(config.model)
    model: Any = RoleModel("trainer", config, shape, config.parallelism)
    model.begin_phase("rl", 0)
    row = dist.get_rank() // config.parallelism.tensor_parallel_degree
    batch = pack(samples(0), shards=config.parallelism.dp, seq_len=64, rows_per_microbatch=1, pad_id=0)[row]
    found = {"weights": total(model.model.parameters())}

    syncs = model.sync_gradients
    model.sync_gradients = lambda on: syncs(False)
    model.accumulate(batch)
    found["unsharded gradients"] = total(
        p._unsharded_param.grad if p.unsharded_accumulated_grad is None else p.unsharded_accumulated_grad
        for p in fsdp_parameters(model.model)
    )
    model.discard_gradients()
    model.sync_gradients = syncs
    model.phase._statistics.clear()

    model.accumulate(batch)
    model.reshard()
    found["gradients"] = total(p.grad for p in model.model.parameters())
    model.phase.update(batch, 1.0)
    states = [state for optimizer in model.phase._optimizers for state in optimizer.state.values()]
    found["optimizer"] = total(value for state in states for value in state.values())

    params = list(model.model.named_parameters())
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, shards_of(params, model.names))
    made = plan(layouts, [pieces(shape, tp=READERS, rank=rank) for rank in range(READERS)])
    copies = made.outgoing(dist.get_rank())
    named = {model.names[name]: p for name, p in params}
    staging = Staging(named, copies, torch.float32, slice_bytes=1 << 20, block_bytes=1 << 20)
    found["staging"] = staging._memory.bytes.nbytes
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    model.close()
    assert local(params[0][1]).dtype is torch.float32
    return {name: max(one[name] for one in every) for name in found}


def total(tensors: Iterable[Any]) -> int:
    """Return the bytes of this rank's parts."""
    from titan_rl.actors.titan.model import local

    return sum(local(tensor).nbytes for tensor in tensors)


def fsdp_parameters(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
    return [p for state in states.values() for group in state._fsdp_param_groups for p in group.fsdp_params]
