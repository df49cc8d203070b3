"""Numbers of 32 bits as two of 16, as which a weight sync moves routers that an engine of 16 bits has in float32."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from titan_rl.wire.model_shape import ROUTE_BIAS, ModelShape


def halves_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bits of float32 numbers as two numbers each.  # [..., N] -> [..., 2N], [N] -> [N, 2]"""
    return (tensor if tensor.dim() > 1 else tensor[:, None]).view(dtype)


class Halves(Mapping[str, Tensor]):
    """Tensors of a rank by Hugging Face's names, routers as halves. Weights are rounded to `dtype` first,
    as the trainer's forward rounds them; a bias is not."""

    def __init__(self, tensors: Mapping[str, Tensor], shape: ModelShape, dtype: str) -> None:
        self._tensors, self._ends, self._dtype = tensors, shape.halves(dtype), getattr(torch, dtype)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not name.endswith(self._ends):
            return tensor
        rounded = tensor if name.endswith(ROUTE_BIAS) else tensor.to(self._dtype)
        return halves_of(rounded.float().contiguous(), self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
