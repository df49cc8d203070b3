"""Reads a rank's shards of a model from the safetensors of a Hugging Face folder, and nothing else of the files."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from titan_rl.actors.sync.held_shards import local_tensors, shards_of


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
                name, row0 = folder_rows.get(shard.name, (shard.name, 0))
                rows = slice(row0 + shard.row0, row0 + shard.row0 + shard.rows)
                columns = [slice(shard.col0, shard.col0 + shard.cols)] if target.dim() > 1 else []
                target.copy_(tensors[name][(rows, *columns)])
