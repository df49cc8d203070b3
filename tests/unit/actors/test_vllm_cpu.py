"""What an engine on a CPU computes in place of vLLM."""

from typing import Any

import pytest
import torch

from titan_rl.actors.vllm import vllm_cpu


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (7, 100), (33, 384), (300, 2048)])
def test_norms_have_vllms_bits(rows: int, width: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    vllm_cpu.normalize_at_once()
    generator = torch.Generator().manual_seed(rows)
    x, residual, weight = (torch.randn(n, width, generator=generator) for n in (rows, rows, 1))
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        norm: Any = RMSNorm(width, eps=1e-6)
        norm.weight.copy_(weight[0])
        assert torch.equal(norm(x), norm.vllms_forward(x))
        for ours, vllms in zip(norm(x, residual), norm.vllms_forward(x, residual), strict=True):
            assert torch.equal(ours, vllms)
        assert norm(x.bfloat16()).equal(norm.vllms_forward(x.bfloat16()))  # vLLM's own
