"""Round the rows of a matrix to 8 bits, each with a scale from its own largest element.

    fp8     scale = max|w| / 448     code = w / scale, to the nearest float8_e4m3fn, ties to even
    int8    scale = max|w| / 127     code = w / scale, to the nearest integer, ties to even

"fp8" is the arithmetic of vLLM's online quantization "fp8_per_channel", bit for bit; tests compare them.
A row's codes depend on the row alone, so equal rows have equal codes in every engine and every process.
"""

from typing import Literal

import torch
from torch import Tensor

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {"fp8": 448.0, "int8": 127.0}
LEAST_SCALE = {"fp8": 1 / (448 * 512), "int8": torch.finfo(torch.float32).tiny}
"""Lower bounds, so that no row of zeros divides by zero."""


def quantize_rows(weight: Tensor, quantization: Literal["fp8", "int8"]) -> tuple[Tensor, Tensor]:
    """Return codes and float32 scales of a matrix.  # [rows, cols] -> [rows, cols], [rows, 1]"""
    low, high = weight.aminmax(dim=-1, keepdim=True)
    # A tensor as the divisor: CUDA multiplies by the reciprocal of a Python number, which rounds otherwise.
    most = torch.tensor(LARGEST[quantization], device=weight.device)
    scale = (torch.maximum(low.abs(), high.abs()).float() / most).clamp_min(LEAST_SCALE[quantization])
    quotient = (weight / scale).clamp_(-most, most)
    return (quotient.to(FP8) if quantization == "fp8" else quotient.round_().to(INT8)), scale


def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix that the codes stand for.  # [rows, cols]"""
    return (codes.float() * scale).to(dtype)
