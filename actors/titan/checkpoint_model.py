"""The model of a checkpoint of any mesh, built on the CPU of this process alone."""

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from titan_rl.actors.titan.model import TitanModel, local
from titan_rl.actors.titan.rotary_order import of_earlier_version, reorder
from titan_rl.actors.titan.summed_writer import load_checkpoint
from titan_rl.config.sections import (
    ActivationCheckpointSection,
    CompileSection,
    Config,
    LoraSection,
    ParallelismSection,
)
from titan_rl.wire.model_shape import ModelShape


class CheckpointModel(TitanModel):
    """The trainer's own model in float32, with the weights of the checkpoint in `folder`."""

    def __init__(self, config: Config, shape: ModelShape, folder: Path, scratch: Path) -> None:
        """`scratch` is for what TorchTitan would write to the dump folder."""
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{scratch}/ranks", rank=0, world_size=1)
        alone = replace(
            config,
            job=replace(config.job, dump_folder=str(scratch)),
            training=replace(config.training, dtype="float32", mixed_precision_param="float32"),
            lora=replace(config.lora if shape.head == "lm" else LoraSection(), base_dtype="float32"),
            activation_checkpoint=ActivationCheckpointSection(),
            compile=CompileSection(),
        )
        super().__init__(alone, shape, ParallelismSection())
        self.model.eval().requires_grad_(False)
        state = self.model.state_dict()
        if self.adaptation.freezes:  # the checkpoint has the added parameters alone
            self.begin()
            state = {name: value for name, value in state.items() if self.adaptation.adds(name)}
        load_checkpoint(state, folder)
        if of_earlier_version(folder):
            reorder(shape, self.model.named_parameters())

    def not_finite(self) -> str:
        """Return the name of a tensor with NaN or an infinity, which a few sequences may never reach; or ""."""
        return next((name for name, tensor in self.by_hf_name.items() if not local(tensor).isfinite().all()), "")

    @torch.no_grad()
    def round_weights(self, dtype: torch.dtype) -> None:
        """Give every weight the float32 value that it has after a cast to `dtype`."""
        for parameter in self.model.parameters():
            shard = local(parameter)
            shard.copy_(shard.to(dtype))
