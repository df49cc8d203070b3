"""Lets titan_rl's trainer run on torch 2.11, and its log-prob kernel in Triton's interpreter: for gpu_bare.py only.

A bare GPU machine may have an older torch than the one titan_rl is pinned to. What the trainer needs of a newer one, at
a single rank, are names and arguments with one possible value.
"""

import inspect
from typing import Any

import torch


def adapt() -> list[str]:
    """Add to torch the names of 2.13 that TorchTitan 0.3.0 and titan_rl use. Return the missing ones."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.nn.attention import varlen

    missing, shard, attend = list[str](), fsdp.fully_shard, varlen.varlen_attn
    state: Any = FSDPState
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
        missing.append("DataParallelMeshDims")
    if "dp_mesh_dims" not in inspect.signature(shard).parameters:

        def fully_shard(module: Any, *args: Any, dp_mesh_dims: None = None, **named: Any) -> Any:
            return shard(module, *args, **named)

        fsdp.fully_shard = fully_shard
        missing.append("fully_shard(dp_mesh_dims)")
    if not hasattr(state(), "_fsdp_param_groups"):
        state._fsdp_param_groups = property(lambda own: [own._fsdp_param_group] if own._fsdp_param_group else [])
        missing.append("FSDPState._fsdp_param_groups")
    if "num_splits" not in inspect.signature(attend).parameters:

        def varlen_attn(*args: Any, enable_gqa: bool = False, num_splits: int | None = None, **named: Any) -> Any:
            return attend(*args, **named)  # FlashAttention 2 takes grouped heads as they are, and does not split

        varlen.varlen_attn = varlen_attn
        missing.append("varlen_attn(enable_gqa, num_splits)")
    return missing


def interpret_products() -> None:
    """Let tensors on a CPU take the path of a GPU's: Triton's kernels, and products whose sums stay float32."""
    from titan_rl.kernels import token_logprob, token_logprob_triton

    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a: Any, b: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
        return mm(a, b, out=out) if out_dtype is None else out.copy_(mm(a.float(), b.float()))

    def wide_addmm(total: Any, a: Any, b: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
        return addmm(total, a, b, out=out) if out_dtype is None else out.copy_(addmm(total, a.float(), b.float()))

    torch.mm, torch.addmm = wide_mm, wide_addmm
    token_logprob._triton = lambda hidden: None if hidden.dtype == torch.float64 else token_logprob_triton
