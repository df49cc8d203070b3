"""Reads a rank's shards of a model from the safetensors of a Hugging Face folder, and nothing else of the files."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from titan_rl.actors.sync.held_shards import local_tensors, shards_of
from titan_rl.wire.model_shape import BLOCKS, SCALES

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by 3 bits; the fourth is the sign
EXPONENT_BIAS = 127


@torch.no_grad()
def read_shards(
    folder: Path,
    parameters: Mapping[str, Tensor],
    hf_names: Mapping[str, str],
    folder_rows: Mapping[str, tuple[str, int]],
) -> None:
    """Overwrite the local part of each parameter. `hf_names` is keyed by the parameters' names; `folder_rows` has the
    place of each tensor that is part of another in the folder (ModelShape.folder_rows)."""
    opened: Any = safe_open
    local = local_tensors({hf_names[name]: parameter for name, parameter in parameters.items()})
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(opened(str(path), framework="pt"))
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        for shard in shards_of(parameters.items(), hf_names):
            if shard.rows and shard.cols:
                target = local[shard.name]
                name, first = folder_rows.get(shard.name, (shard.name, 0))
                in_4_bits = name + BLOCKS in tensors
                sizes = () if in_4_bits else tensors[name].get_shape()
                stacked = in_4_bits or (len(sizes) == 3 and sizes[1] > 1)  # matrices of experts, transposed
                row0 = shard.row0 if stacked else first + shard.row0
                rows, columns = slice(row0, row0 + shard.rows), slice(shard.col0, shard.col0 + shard.cols)
                if in_4_bits:
                    packed = (tensors[name + end][first, rows] for end in (BLOCKS, SCALES))
                    target.copy_(of_mxfp4(*packed)[:, columns])
                elif stacked:
                    target.copy_(tensors[name][first, columns, rows].T)
                elif len(sizes) == 3:  # a convolution of each channel
                    target.copy_(tensors[name][rows, 0, columns])
                else:
                    target.copy_(tensors[name][(rows, columns) if target.dim() > 1 else rows])


def other_tensors(folder: Path, known: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of a folder that a model has no parameters for, such as a vision tower, from mapped files."""
    opened: Any = safe_open
    others = dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        with opened(str(path), framework="pt") as file:
            others |= {name: file.get_tensor(name) for name in file.keys() if name not in known}  # noqa: SIM118
    return others


def of_mxfp4(blocks_RG16: Tensor, scales_RG: Tensor) -> Tensor:
    """Return the numbers of 4 bits with common exponents. A byte has the lower number in its lower bits."""
    codes = torch.stack([blocks_RG16 & 15, blocks_RG16 >> 4], dim=-1).long()
    exponents = scales_RG.int()[..., None, None] - EXPONENT_BIAS
    return torch.ldexp(torch.cat([FP4, -FP4])[codes], exponents).flatten(1)
