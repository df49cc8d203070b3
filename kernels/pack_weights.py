"""A trainer rank's shards into one reader's run: cast, rotary order undone, laid end to end in the plan's order.

    params {name: [rows, cols]}, copies -> run [elements]

A copy takes rows src_row0 + b * block_stride + i * src_step of a shard: with a step of two rows, one strided copy
undoes the rotary order of all heads. On a CPU each of the plan's copies is one strided `copy_`, which casts, and which
torch spreads over its threads. A GPU would launch hundreds of such kernels for a few megabytes each, so there
`pack_weights_triton.py` makes all of a run's copies in one launch, straight into pinned memory if the run lies there.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from titan_rl.weight_plan import Copy


def reference_pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """The same by indices, row by row."""
    packed = [run.new_empty(0)]
    for c in copies:
        blocks, rows = torch.arange(c.blocks)[:, None], torch.arange(c.rows)
        index = (c.src_row0 + blocks * c.block_stride + rows * c.src_step).flatten().to(params[c.name].device)
        table = params[c.name].reshape(len(params[c.name]), -1)
        packed.append(table[index, c.src_col0 : c.src_col0 + c.cols].flatten().to(run.device, run.dtype))
    run.copy_(torch.cat(packed))


@torch.no_grad()
def pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Fill `run` with the copies' elements in its dtype. Parameters are local tensors, vectors or matrices."""
    elements = sum(copy.elements for copy in copies)
    if run.dim() != 1 or not run.is_contiguous() or run.numel() != elements:
        raise ValueError(f"expected a contiguous run of {elements} elements, found shape {tuple(run.shape)}")
    if (fused := _triton(params, copies)) is not None and (run.is_cuda or run.is_pinned()):
        fused.pack(params, copies, run)
        return
    start = 0
    for copy in copies:
        source = window(params[copy.name], copy, copy.src_row0, copy.src_col0, copy.src_step)
        part = run[start : start + copy.elements].view(source.shape)
        part.copy_(source)
        start += copy.elements


def window(tensor: Tensor, copy: Copy, row0: int, col0: int, step: int) -> Tensor:
    """A copy's elements in a shard or in a live parameter, in the order of the run.  # [blocks, rows, cols]"""
    table = tensor if tensor.dim() == 2 else tensor[:, None]
    row, col = table.stride()
    return table.as_strided(
        (copy.blocks, copy.rows, copy.cols),
        (copy.block_stride * row, step * row, col),
        table.storage_offset() + row0 * row + col0 * col,
    )


def _triton(params: Mapping[str, Tensor], copies: Sequence[Copy]) -> Any:
    """The module of the Triton kernel where the copies' parameters lie on one GPU, in one dtype."""
    if copies and params[copies[0].name].is_cuda:
        kinds = {(param.device, param.dtype) for param in (params[copy.name] for copy in copies)}
        return _triton_module() if len(kinds) == 1 else None
    return None


@cache
def _triton_module() -> Any:
    if find_spec("triton"):
        from titan_rl.kernels import pack_weights_triton

        return pack_weights_triton
    warnings.warn("triton is not installed: weights are packed by one torch operation a copy", stacklevel=2)
    return None
