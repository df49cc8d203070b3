"""Parts of decoders that TorchTitan's Qwen3 lacks: what the families of model_families.py differ by."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from titan_rl.actors.titan.rope import ScaledRoPE


class Model(Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if isinstance(layer, Block.Config):
                    layer.attention_out_norm.sharding_config = layer.attention_norm.sharding_config
                    layer.ffn_out_norm.sharding_config = layer.ffn_norm.sharding_config


class Block(Qwen3TransformerBlock):
    """A block with norms of what attention and feed-forward return."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        attention_out_norm: RMSNorm.Config
        ffn_out_norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention_out_norm = config.attention_out_norm.build()
        self.ffn_out_norm = config.ffn_out_norm.build()

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x), attention_masks, positions)
        x = x + self.attention_out_norm(attended)
        return x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))


class NoNorm(Module):
    """Stands where a block has no norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OffsetNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + weight, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class WideNorm(RMSNorm):
    """An RMSNorm over all heads of a token at once."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(2)).view(x.shape)  # [B, L, N, H]


class Attention(GQAttention):
    """GQAttention with norms of different sizes for queries and keys, or with another scale of scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        k_norm: RMSNorm.Config | None = None
        scale: float | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.k_norm is not None:
            self.k_norm = config.k_norm.build()
        if config.scale is not None:
            self.scaling = config.scale


class GeluFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class ScaledEmbedding(Embedding):
    """An embedding that is multiplied by the root of its size, rounded to the dtype of the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input)
        return embedded * torch.tensor(self.embedding_dim**0.5, dtype=embedded.dtype, device=embedded.device)


class NoRoPE(ScaledRoPE):
    """Rotates nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledRoPE.Config):
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class PartialRoPE(ScaledRoPE):
    """Rotates the first `dim` elements of each head: their halves, or neighbouring elements if `interleaved`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledRoPE.Config):
        interleaved: bool = False

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config: PartialRoPE.Config = self.config  # pyright: ignore[reportAssignmentType]
        q, k = query[..., : config.dim], key[..., : config.dim]
        if config.interleaved:
            q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        q, k = self.apply_rotary_emb(q, k, self._reshape_cache(query, positions))
        if config.interleaved:
            q, k = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (q, k))
        return torch.cat([q, query[..., config.dim :]], dim=-1), torch.cat([k, key[..., config.dim :]], dim=-1)
