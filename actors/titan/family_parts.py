"""Parts of decoders that TorchTitan's Qwen3 lacks: what the families of model_families.py differ by."""

from dataclasses import dataclass, fields, replace
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.gpt_oss.moe import ScaleBiasForward
from torchtitan.models.gpt_oss.sharding import scaled_bias_rowwise_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from titan_rl.actors.titan import experts
from titan_rl.actors.titan.rope import ScaledRoPE


def values_of(config: Any) -> dict[str, Any]:
    """Return the fields of a config, to build one of a subclass."""
    return {key.name: getattr(config, key.name) for key in fields(config) if key.init}


class Model(Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                if isinstance(layer, Block.Config):
                    layer.attention_out_norm.sharding_config = layer.attention_norm.sharding_config
                    layer.ffn_out_norm.sharding_config = layer.ffn_norm.sharding_config
                if isinstance(layer.attention, SinkAttention.Config):
                    assert layer.moe is not None
                    experts.shard_clamped(layer.moe, config.parallelism)
                    layer.attention.shard(config.parallelism)


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

    def attend(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        attention_masks: AttentionMasksType | None,
    ) -> torch.Tensor:
        """Return each head's mean of the values that its queries see, before the output projection."""
        keys: dict[str, Any] = {"scale": self.scaling, "enable_gqa": self.enable_gqa}
        return self.inner_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, **keys)


class BiasedRowwiseLinear(ScaledBiasRowwiseLinear):
    """A projection whose columns tensor parallelism cuts, with a bias that all ranks add once together. The gradient
    of the bias is whole on each of them; TorchTitan's divides it by the ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (self.weight, self.bias))
        share: Any = ScaleBiasForward.apply(bias, self.tp_degree, bias.dtype)
        return F.linear(input, weight, share)


class SinkAttention(GQAttention):
    """GQAttention with a sink for each head, and a bias of the output projection."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        def shard(self, parallelism: Any) -> None:
            """Cut sinks by heads, after TorchTitan has set how all else is cut."""
            assert self.sharding_config is not None
            sinks = {"sinks": dense_param_placement(tp=spmd.S(0))}
            self.sharding_config = replace(self.sharding_config, state_shardings=sinks)
            self.wo.sharding_config = scaled_bias_rowwise_config(output_sp=parallelism.enable_sequence_parallel)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sinks = nn.Parameter(torch.empty(config.n_heads))

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)
        q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, positions)
        sinks_N = self.sinks
        if isinstance(sinks_N, DTensor):
            sinks_N = sinks_N.to_local(grad_placements=sinks_N.placements)
        keys: dict[str, Any] = {"scale": self.scaling, "enable_gqa": self.enable_gqa, "sinks_N": sinks_N}
        out_BLNH = self.inner_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, **keys)
        return self.wo(out_BLNH.contiguous().flatten(2))


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
        parts: int = 1  # equal parts of it are embeddings, whose size counts

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.factor = (self.embedding_dim // config.parts) ** 0.5

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input)
        return embedded * torch.tensor(self.factor, dtype=embedded.dtype, device=embedded.device)


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
