"""Everything that TorchTitan 0.3.0 needs to train on a CPU, in one place.

On a machine with CUDA it changes nothing. Without CUDA:
- TorchTitan takes "cuda" for the device type at import, because torch reports no accelerator (docs/upstream/rl-on-cpu
  makes it "cpu");
- TorchTitan has FSDP2 divide gradients by 1.0, which uses ReduceOp.PREMUL_SUM, which gloo lacks (with the same change
  it asks for sums; docs/upstream/fsdp-gloo-divide has FSDP2 use sums on a CPU);
- no attention backend of TorchTitan's has a CPU backward for packed documents (see document_attention.py);
- DTensor has no random-number tracker on CPU, so every rank would draw the same values for its shard
  (docs/upstream/dtensor-cpu-draws adds one).
"""

import sys

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils as titan_utils

from titan_rl.actors.titan.rotary_order import had_pairs, halves_of
from titan_rl.wire.model_shape import ModelShape

ON_CPU = not torch.cuda.is_available()


def use_cpu() -> None:
    """Replace the device type that TorchTitan's modules took at import, and from each other, by "cpu", unless it is.
    docs/upstream/rl-on-cpu makes TorchTitan take "cpu"."""
    if ON_CPU and titan_utils.device_type != "cpu":
        for module in [m for name, m in sys.modules.items() if name.startswith("torchtitan.")]:
            for name, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
                if name in vars(module):
                    setattr(module, name, value)


def adapt_fsdp(model: torch.nn.Module) -> None:
    """Reduce gradients by sums.

    With docs/upstream/rl-on-cpu TorchTitan asks for sums itself. No public name tells whether it did, and to ask again
    changes nothing, so this does not look."""
    if ON_CPU:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def initialize(
    model: torch.nn.Module, spec: ModelSpec, shape: ModelShape, *, seed: int, std: float, dtype: torch.dtype
) -> None:
    """Draw the same random weights on any mesh: draw an unsharded copy in `dtype` from the seed, then keep this rank's
    part. Matrices are normal with `std`; if `std` is 0, TorchTitan's initializers apply.

    This needs one unsharded copy in host memory, so it is for models small enough to train from random weights.
    """
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        whole = spec.model.build()
    whole.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole.init_weights(buffer_device=None)
        for matrix in (p for p in whole.parameters() if std and p.dim() > 1):
            matrix.normal_(0, std)
        for name, parameter in whole.named_parameters():
            if had_pairs(shape, name):
                parameter.copy_(halves_of(parameter, shape.head_dim))
        state = whole.state_dict()
        if shape.head == "value":  # it begins at 0, and DTensor cannot cut its one row
            state.pop("lm_head.weight")
        load_whole(model, state)


def load_whole(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load unsharded tensors that every rank holds into a sharded model. Parameters not in `state` stay as they are."""
    sharded = model.state_dict()
    wrapped = {}
    for name, value in state.items():
        like = sharded[name]
        value = value.to(like.device, like.dtype)
        wrapped[name] = (
            DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
            if isinstance(like, DTensor)
            else value
        )
    model.load_state_dict(wrapped, strict=False)
