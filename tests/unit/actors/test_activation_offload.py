"""Block inputs in host memory: the same gradients, and no input stays where it was computed."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC

from support.shapes import TINY
from support.whole_model import whole_model
from titan_rl.actors.titan.activation_offload import OffloadAC
from titan_rl.actors.titan.model import DeviceRows
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config, TrainingSection
from titan_rl.wire.types import Sample

SAMPLES = [
    Sample([5, 6, 7, 8, *answer], [0] * 4 + [1] * len(answer), {}, 4) for answer in ([9, 10], [11], [12, 13, 14])
]


def trained(policy: type[ActivationCheckpointing] | None, share: bool) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of one microbatch, and how many inputs of blocks are in memory before the backward."""
    (batch,) = pack(SAMPLES, shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0, share=share)
    model = whole_model(TINY, Config(training=TrainingSection(seq_len=32)))
    if policy:
        policy.Config().build(dump_folder="").apply(model.model)
    inputs = list[StorageWeakRef]()

    def note(block: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    hooks = [block.register_forward_pre_hook(note) for block in model.model.layers.values()]
    rows = DeviceRows.of(batch.microbatches[0], model.device)
    loss = model.logprobs(rows, temperature=1.0)[0].sum()
    live = sum(not each.expired() for each in inputs)
    assert len(inputs) == len(hooks) == TINY.n_layers
    loss.backward()
    return [parameter.grad for parameter in model.model.parameters()], live


@pytest.mark.parametrize("share", [False, True])
def test_only_offloaded_inputs_leave_the_device_and_no_gradient_changes_a_bit(share: bool) -> None:
    plain, _ = trained(None, share)
    full, kept = trained(FullAC, share)
    offloaded, left = trained(OffloadAC, share)
    assert (kept, left) == (TINY.n_layers, 0)
    for ours in (full, offloaded):
        assert all(map(torch.equal, ours, plain))
