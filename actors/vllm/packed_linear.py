"""Linear layers on a CPU that read a copy of their weight which is packed for oneDNN, once that pays.

    written ── CALLS calls with the weight ──> packed ── calls with the copy ──> written: forgotten

oneDNN packs a plain weight at every call, which at 16 rows takes as long as the product itself. So a layer keeps a
packed copy once its weight has been used some times since it was written; at once, if it was used as often the last
time. The copy changes no bit: products of two rows or more are the same, and one row, which oneDNN computes otherwise,
is computed with the weight.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from titan_rl.wire.cores import host_memory

CALLS = 8  # packing takes as long as it saves in five calls of 16 rows, on a core of an AMD EPYC
SHARE = 16  # copies take at most this part of the host's memory, of each engine

_layers: "list[PackedLinear]" = []  # of this process


class PackedLinear:
    """What vLLM calls in place of torch's linear, for one layer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._calls = 0  # with more than one row, since the weight was written
        self._plain_calls = CALLS  # of those, before it is packed
        self._packed: Tensor | None = None
        self._refused = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or len(x) < 2 or self._refused:
            return linear(x, weight, bias)
        self._calls += 1
        if self._packed is not None:
            return _product(x, self._packed, bias)
        product = linear(x, weight, bias)
        if self._calls > self._plain_calls:
            self._pack(x, weight, bias, product)
        return product

    def forget(self) -> None:
        """Use the weight again: it has been written."""
        self._plain_calls = 0 if self._calls > CALLS else CALLS
        self._calls, self._packed = 0, None

    def _pack(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Tensor) -> None:
        """Keep a packed copy, unless it takes too much memory or multiplies to other bits on this CPU."""
        if not _fit():
            self._refused = True
            return
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        if torch.equal(_product(x, packed, bias), product):
            self._packed = packed
        else:
            self._refused = True
            warnings.warn(f"weights of {tuple(weight.shape)} are not packed: it would change products", stacklevel=2)


def packed_linear(weight: Tensor) -> Any:
    """Return what a layer with this weight calls. Its products must be oneDNN's (kernels/cpu_matmul.py)."""
    if weight.dtype is not torch.float32 or weight.dim() != 2:
        return linear
    _layers.append(PackedLinear(weight.nbytes))
    return _layers[-1]


def forget_packed() -> None:
    """Let every layer of this process use its weight again, which has been written."""
    for layer in _layers:
        layer.forget()


@cache
def _fit() -> bool:
    """Return whether there is memory for copies of all layers, which are built before the first is packed."""
    return SHARE * sum(layer.nbytes for layer in _layers) <= host_memory()


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
