"""Rows in 8 bits: vLLM's own fp8 arithmetic, and integers that are as close as a scale per row allows."""

from typing import Literal

import pytest
import torch

from titan_rl.ext.quantization.ranks.quantize_rows import dequantize_rows, quantize_rows

QUANTIZATIONS = ("fp8", "int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_is_vllms_online_quantization_bit_for_bit(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(512, 384, generator=generator) * torch.logspace(-6, 6, 512)[:, None]).to(dtype)
    weight[7], weight[8, 1:], weight[9] = 0, 0, 1  # no range, one element, all on the largest code
    codes, scale = quantize_rows(weight, "fp8")
    expected = fp8._fp8_channel_scale(weight_amax(weight, dim=-1, keepdim=True))
    assert torch.equal(scale, expected)
    assert torch.equal(codes.view(torch.uint8), fp8._fp8_quant_per_channel(weight, expected).view(torch.uint8))


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 2**-4), ("int8", 0.5 / 127)])
def test_a_rounded_element_is_close_and_the_largest_of_a_row_is_exact(
    quantization: Literal["fp8", "int8"], most: float
) -> None:
    """fp8 has 3 bits behind the first, so an element moves by 1/16 of itself at most; int8 by half a step."""
    weight = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    codes, scale = quantize_rows(weight, quantization)
    rounded, largest = dequantize_rows(codes, scale, torch.float32), weight.abs().amax(1, keepdim=True)
    assert ((rounded - weight).abs() <= most * largest * (1 + 1e-6)).all()
    assert torch.allclose(rounded.abs().amax(1, keepdim=True), largest, rtol=1e-6)
    assert not rounded[3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_gpu_rounds_as_a_cpu_does(quantization: Literal["fp8", "int8"]) -> None:
    weight = torch.randn(512, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    on_cpu, on_gpu = quantize_rows(weight, quantization), quantize_rows(weight.cuda(), quantization)
    for mine, its in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(mine.view(torch.uint8), its.cpu().view(torch.uint8))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_is_rounded_alike_alone_and_among_others(quantization: Literal["fp8", "int8"]) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    codes, scale = quantize_rows(weight, quantization)
    for row in (0, 17, 39):
        alone, own_scale = quantize_rows(weight[row : row + 1].clone(), quantization)
        assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[row])
        assert torch.equal(own_scale[0], scale[row])


def test_integers_are_rounded_to_the_nearest_with_ties_to_even() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.6, 0.49]])
    codes, scale = quantize_rows(weight, "int8")
    assert (scale.item(), codes.tolist()) == (1.0, [[127, 0, 2, -2, -127, 0]])
