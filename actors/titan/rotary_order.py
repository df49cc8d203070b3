"""The order of q's and k's rows within a head: Hugging Face's halves, or the pairs of earlier versions.

Llama used to rotate neighbouring rows, as TorchTitan's own does: of a head of D rows, Hugging Face's row j * D/2 + i
(j = 0, 1) was row 2 * i + j. A seed still gives the same weights, and checkpoints of earlier versions are reordered
when they are loaded. The train state of newer checkpoints has `rotary` = `halves`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from titan_rl.actors.titan.summed_writer import has_state
from titan_rl.wire.model_shape import ModelShape

HALVES = "halves"


def had_pairs(shape: ModelShape, name: str) -> bool:
    """Return True if an earlier version had this parameter of a model in pairs."""
    return shape.family == "llama3" and name.endswith(("wq.weight", "wk.weight"))


def halves_of(pairs: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows that are in pairs.  # [heads * head_dim, columns]"""
    return pairs.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(pairs.shape)


def of_earlier_version(checkpoint: Path) -> bool:
    """Return True if a checkpoint is without the key `rotary`: its rows are in pairs."""
    return not has_state(checkpoint, "train_state.rotary")


@torch.no_grad()
def reorder(shape: ModelShape, parameters: Iterable[tuple[str, torch.Tensor]], states: Iterable[Any] = ()) -> None:
    """Reorder loaded parameters that are in pairs, and their moments in the optimizers' `states`."""
    tensors_of = {parameter: [parameter] for name, parameter in parameters if had_pairs(shape, name)}
    for state in states:
        for parameter, moments in tensors_of.items():
            moments += [m for m in state.get(parameter, {}).values() if m.shape == parameter.shape]
    for tensor in (tensor for tensors in tensors_of.values() for tensor in tensors):
        whole = tensor
        if isinstance(tensor, DTensor):  # a shard may have a part of a head
            whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
        whole = halves_of(whole, shape.head_dim)
        if isinstance(tensor, DTensor):
            whole = DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
        tensor.copy_(whole)
