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


def test_modules_are_called_directly_and_stay_modules() -> None:
    class Part(torch.nn.Module):
        def __init__(self, add: int) -> None:
            super().__init__()
            self.add, self.linear = add, torch.nn.Linear(1, 1)

        def forward(self, x: int) -> int:
            return x + self.add

    class Other(Part):
        def forward(self, x: int) -> int:
            return x - self.add

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.last = torch.nn.ModuleList([Part(1), Part(2)]), Part(4)

        def forward(self, x: int) -> int:
            for part in self.parts:
                x = part(x)
            return self.last(x)

    for kind in (Part, Other, Model):
        kind.__module__ = "vllm.models"
    model, seen, whole = Model(), list[Any](), torch.nn.Module.__call__
    model.register_forward_hook(lambda *_: seen.append("model"))
    vllm_cpu.call_modules_directly(model)
    assert (model(0), seen) == (7, ["model"])
    assert Part.__call__ is not whole
    assert torch.nn.Linear.__call__ is torch.nn.ModuleList.__call__ is whole
    model.last = Other(3)
    assert (model(0), Other(1)(0)) == (0, -1), "what replaces a part, or is derived from its class, is called"
    assert [name for name, _ in model.named_modules()] == [
        *("", "parts", "parts.0", "parts.0.linear", "parts.1", "parts.1.linear", "last", "last.linear")
    ]
    del model.parts[0]
    assert model(0) == -1
