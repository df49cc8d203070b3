"""Rotary embeddings with the scalings that transformers and vLLM know, in their arithmetic, to the last bit."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE


class ScaledRoPE(CosSinRoPE):
    """CosSinRoPE, which rotates halves of a head as Hugging Face's weights expect, under a `rope_scaling`.

    TorchTitan's own lacks Llama's scaling, and the factor by which yarn scales cosines and sines."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        rope_scaling: dict[str, Any] | None = None  # as in config.json; None: no scaling

    def _precompute_cache(self) -> torch.Tensor:
        config: ScaledRoPE.Config = self.config  # pyright: ignore[reportAssignmentType]
        scaling, factor = config.rope_scaling, 1.0
        per_token = 1.0 / _powers(config.dim, config.theta)
        if scaling and scaling["rope_type"] == "llama3":
            per_token = llama3_frequencies(per_token, **_numbers(scaling))
        elif scaling and scaling["rope_type"] == "yarn":
            per_token = yarn_frequencies(config.dim, config.theta, scaling)
            factor = attention_factor(scaling)
        angles_LH = torch.outer(torch.arange(config.max_seq_len, dtype=per_token.dtype), per_token).repeat(1, 2)
        return torch.cat([angles_LH.cos(), angles_LH.sin()], dim=-1) * factor


def llama3_frequencies(
    per_token: torch.Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between."""
    waves = 2 * math.pi / per_token
    smooth = (original_max_position_embeddings / waves - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * per_token / factor + smooth * per_token
    scaled = torch.where(waves > original_max_position_embeddings / low_freq_factor, per_token / factor, blended)
    return torch.where(waves < original_max_position_embeddings / high_freq_factor, per_token, scaled)


def yarn_frequencies(dim: int, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Keep frequencies that turn more than beta_fast times within the original length, divide frequencies that turn
    less than beta_slow times by the factor, and blend linearly between."""
    powers, length = _powers(dim, theta), scaling["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast", 32)), dim_of(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    unscaled = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * powers) * (1 - unscaled) + 1.0 / powers * unscaled


def attention_factor(scaling: dict[str, Any]) -> float:
    """Return yarn's factor on cosines and sines: a query times a key grows by its square."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1)


def _powers(dim: int, theta: float) -> torch.Tensor:
    return theta ** (torch.arange(0, dim, 2).float() / dim)  # [dim / 2]


def _numbers(scaling: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in scaling.items() if key != "rope_type"}
