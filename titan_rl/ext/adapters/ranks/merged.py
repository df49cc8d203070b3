"""This rank's part of frozen weights with their adapters added: W + scale B A, cut as W is.

Only the adapters are gathered, which are small. W is not, and keeps its values.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from titan_rl.actors.sync.held_shards import local_tensors, part_of, whole
from titan_rl.ext.adapters.layers import adapter_names
from titan_rl.wire.weight_plan import LORA_B


class Merged(Mapping[str, Tensor]):
    """Tensors by Hugging Face's name, as local_tensors has them. Those with an adapter are computed when they are read,
    in float32; the last one is kept. All ranks of the mesh create it together."""

    def __init__(self, params: Mapping[str, Tensor], scale: float) -> None:
        self._params, self._scale = params, scale
        self._local = local_tensors(params)
        self.adapters = {
            name: tuple(whole(params[matrix]).float() for matrix in adapter_names(name))
            for name in params
            if adapter_names(name)[0] in params
        }
        self._last: tuple[str, Tensor] | None = None

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name not in self.adapters:
            return self._local[name]
        if self._last is None or self._last[0] != name:
            a, b = self.adapters[name]
            (row, rows), (column, columns) = part_of(name, self._params[name])
            change = self._scale * (b[row : row + rows] @ a[:, column : column + columns])
            self._last = name, change.add_(self._local[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)


def applied(params: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return this rank's tensors for an engine that applies adapters: B is multiplied by alpha / rank."""
    tensors = local_tensors(params)
    return tensors | {name: scale * b for name, b in tensors.items() if name.endswith(LORA_B)}
