"""Pack a trainer rank's shards into one reader's run: cast, and concatenate in the plan's order.

    params {name: [rows, cols]}, copies -> run [elements]

On a CPU each of the plan's copies is one strided `copy_`, which casts, and which torch spreads over its threads. A GPU
would launch hundreds of such kernels for a few megabytes each, so there `pack_weights_triton.py` makes all of a run's
copies in one launch, directly into pinned memory if the run is there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_rl.kernels.triton_kernels import triton_kernels
from titan_rl.wire.weight_plan import Copy


def reference_pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Pack by indices, row by row: the reference that tests and benchmarks compare with."""
    packed = [run.new_empty(0)]
    for c in copies:
        index = (c.src_row0 + torch.arange(c.rows)).to(params[c.name].device)
        table = params[c.name].reshape(len(params[c.name]), -1)
        packed.append(table[index, c.src_col0 : c.src_col0 + c.cols].flatten().to(run.device, run.dtype))
    run.copy_(torch.cat(packed))


@torch.no_grad()
def pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Fill `run` with the copies' elements, cast to its dtype. Parameters are local tensors, vectors or matrices."""
    elements = sum(copy.elements for copy in copies)
    if run.dim() != 1 or not run.is_contiguous() or run.numel() != elements:
        raise ValueError(f"expected a contiguous run of {elements} elements, found shape {tuple(run.shape)}")
    if (fused := _triton(params, copies)) is not None and (run.is_cuda or run.is_pinned()):
        fused.pack(params, copies, run)
        return
    pack_one_by_one(params, copies, run)


@torch.no_grad()
def pack_one_by_one(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Fill `run` by one torch operation per copy, which reads one parameter at a time."""
    start = 0
    for copy in copies:
        source = window(params[copy.name], copy, copy.src_row0, copy.src_col0)
        part = run[start : start + copy.elements].view(source.shape)
        part.copy_(source)
        start += copy.elements


def window(tensor: Tensor, copy: Copy, row0: int, col0: int) -> Tensor:
    """View a copy's elements in a shard or in a live parameter, in the order of the run.  # [rows, cols]

    The rows of stacked matrices are counted through."""
    table = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor[:, None]
    return table[row0 : row0 + copy.rows, col0 : col0 + copy.cols]


def _triton(params: Mapping[str, Tensor], copies: Sequence[Copy]) -> Any:
    """Return the module of the Triton kernel if the copies' parameters are on one GPU, in one dtype; else None."""
    kinds = {(params[copy.name].device, params[copy.name].dtype) for copy in copies}
    if len(kinds) == 1 and params[copies[0].name].is_cuda:
        return triton_kernels("pack_weights", "weights are packed by one torch operation per copy")
    return None
