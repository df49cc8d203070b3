"""A model of one process in this process: the trainer's forward and objectives, without meshes."""

from contextlib import nullcontext

import torch
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils

from titan_rl.actors.titan import document_attention, experts, heads
from titan_rl.actors.titan.model import TitanModel
from titan_rl.actors.titan.spec import build_spec
from titan_rl.config.sections import Config, Dtype
from titan_rl.wire.model_shape import ModelShape


def whole_model(shape: ModelShape, config: Config, device: str = "cpu", compute: Dtype = "float32") -> TitanModel:
    """Return a TitanModel whose weights are random, and whose attention is the one for `device`, on the CPU."""
    spec = build_spec(shape, seq_len=config.training.seq_len)
    attention = document_attention.overrides(device, compute)
    routed = experts.OVERRIDES if shape.experts else []
    apply_overrides(OverrideConfig(imports=[heads.OVERRIDES[shape.head], *attention, *routed]), spec.model)
    dist_utils.set_spmd_backend("partial_dtensor")
    made = TitanModel.__new__(TitanModel)
    with titan_utils.set_default_dtype(getattr(torch, compute)):
        made.model = spec.model.build()
    made.shape, made.config, made.context, made.device = shape, config, nullcontext, torch.device("cpu")
    made.row_parts = None
    torch.manual_seed(0)
    with torch.no_grad():
        made.model.init_weights(buffer_device=made.device)
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return made
