"""Activations in host memory: an activation checkpointing policy of the kind that TorchTitan has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import FullAC

from titan_rl.actors.titan import private


class OffloadAC(FullAC):
    """Recompute each block in the backward from its input, which waits in pinned host memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return OffloadedBlock(super()._wrap_block(module, base_fqn=base_fqn))


class OffloadedBlock(ActivationWrapper):
    """A checkpointed block whose input is in host memory between its forward and its backward."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        with on_host(x):
            return self._checkpoint_wrapped_module(x, *args)

    def compile(self, *args: Any, **keywords: Any) -> None:
        """Compile what runs within the hooks: they see what its graph saves."""
        self._checkpoint_wrapped_module.compile(*args, **keywords)


def on_host(x: torch.Tensor) -> saved_tensors_hooks:
    """Return hooks that move `x` to pinned memory when it is saved. Weights and masks stay where they are.

    torch's save_on_cpu would move them too, and refuses DTensors, of which the shards move here."""
    own, host = storage(x), save_on_cpu(pin_memory=True)

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        tensor = tensor.detach()
        if storage(tensor) != own:
            return lambda: tensor
        if not isinstance(tensor, DTensor):
            return partial(host.unpack_hook, host.pack_hook(tensor))
        shard, mesh, placements = host.pack_hook(tensor.to_local()), tensor.device_mesh, tensor.placements
        like = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        return lambda: DTensor.from_local(host.unpack_hook(shard), mesh, placements, **like)

    return saved_tensors_hooks(pack, lambda unpack: unpack())


def storage(tensor: torch.Tensor) -> int:
    """Return which memory has the data of a tensor, or of its shard."""
    shard = tensor.detach()
    shard = shard.to_local() if isinstance(shard, DTensor) else shard
    shard = shard.elem if isinstance(shard, private.AsyncCollectiveTensor) else shard
    return shard.untyped_storage()._cdata
