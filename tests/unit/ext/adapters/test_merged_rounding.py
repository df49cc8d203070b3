"""In bfloat16 one step's change survives in adapters, and hardly in weights that they are merged into."""

import math

import pytest
import torch

from titan_rl.ext.adapters.ranks.merged import Merged
from titan_rl.wire.weight_plan import LORA_A, LORA_B

RANK, SCALE, RATE = 16, 2.0, 3e-5


@pytest.mark.parametrize("seed", range(3))
def test_a_merge_rounds_a_first_step_away_and_adapters_keep_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width, name = 256, "model.layers.0.self_attn.q_proj"
    weight = (torch.randn(width, width, generator=generator) * 0.03).bfloat16()
    a = (2 * torch.rand(RANK, width, generator=generator) - 1) / math.sqrt(width)
    b = RATE * torch.randn(width, RANK, generator=generator).sign()  # Adam's first step from zero
    change = SCALE * b @ a

    def share(found: torch.Tensor) -> float:
        return float((found * change).sum() / (change * change).sum())

    merged = Merged({f"{name}.weight": weight, name + LORA_A: a, name + LORA_B: b}, SCALE)[f"{name}.weight"]
    apart = (SCALE * b).bfloat16().float() @ a.bfloat16().float()
    assert share(merged.bfloat16().float() - weight.float()) < 0.25
    assert share(apart) == pytest.approx(1, abs=0.01)
