"""The trained part of Idefics 3's vision tower, of TorchTitan's parts and with the names of Hugging Face.

embedded patches -> encoder -> squares of neighbours -> projection -> features

Every rank of tensor parallelism computes it as a whole. Embeddings of patches are not trained: they are kept by image.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_rl.wire.hf_config import refused

TANH = "gelu_pytorch_tanh"
DEFAULTS: dict[str, Any] = {  # transformers has them for idefics3 and smolvlm
    **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    **{"hidden_act": TANH, "layer_norm_eps": 1e-6},
}
NAMES = {  # in the folder and in the model
    "model.connector.modality_projection.proj": "tok_embeddings.reader.projection",
    "model.vision_model.post_layernorm": "tok_embeddings.reader.encoder.post_layernorm",
    **{
        f"model.vision_model.encoder.layers.{{}}.{part}": f"tok_embeddings.reader.encoder.layers.{{}}.{part}"
        for part in (
            *(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")),
            *("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"),
        )
    },
}
WHOLE = ShardingConfig(
    state_shardings={name: dense_param_placement(tp=spmd.R) for name in ("weight", "bias")},
)


def own(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's copy of a parameter that every rank has as a whole. Its gradient reaches the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class WholeLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = own(self.weight)
        return F.linear(input, weight, own(self.bias))


class WholeNorm(LayerNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(LayerNorm.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, own(self.weight), own(self.bias), self.eps)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> WholeLinear.Config:
    return WholeLinear.Config(in_features=inputs, out_features=outputs, bias=bias, sharding_config=WHOLE)


class PatchAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        heads: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.q_proj = linear(config.dim, config.dim).build()
        self.k_proj = linear(config.dim, config.dim).build()
        self.v_proj = linear(config.dim, config.dim).build()
        self.out_proj = linear(config.dim, config.dim).build()
        self._heads = config.heads

    def forward(self, x_NPD: Tensor, reads: Tensor | None) -> Tensor:
        projected = (project(x_NPD) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in projected)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=reads)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class PatchFeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc1 = linear(config.dim, config.hidden_dim).build()
        self.fc2 = linear(config.hidden_dim, config.dim).build()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class EncoderLayer(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        self_attn: PatchAttention.Config
        mlp: PatchFeedForward.Config
        norm: WholeNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer_norm1 = config.norm.build()
        self.self_attn = config.self_attn.build()
        self.layer_norm2 = config.norm.build()
        self.mlp = config.mlp.build()

    def forward(self, x: Tensor, reads: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), reads)
        return x + self.mlp(self.layer_norm2(x))


class Encoder(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: EncoderLayer.Config
        layers: int
        scale: int  # patches on each side of a square

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(config.layer.build() for _ in range(config.layers))
        self.post_layernorm = config.layer.norm.build()
        self._scale = config.scale

    def forward(self, patches_NPD: Tensor, mask_NP: Tensor) -> Tensor:
        """Return the encoded squares, [N, P / scale^2, D * scale^2]. The mask is true where a tile has a pixel."""
        reads, x = mask_NP[:, None, None], patches_NPD
        for layer in self.layers:  # a tile may have a thousand patches, whose states would fill the memory
            x = checkpoint(layer, x, reads, use_reentrant=False)
        return squares(self.post_layernorm(x), self._scale)


def squares(x_NPD: Tensor, scale: int) -> Tensor:
    """Return each square of neighbours as one vector, row by row."""
    side = round(x_NPD.shape[1] ** 0.5) // scale
    tiles = x_NPD.unflatten(1, (side, scale, side, scale))
    return tiles.transpose(2, 3).flatten(3).flatten(1, 2)


class Reader(Module):
    """Returns features of images for the text model: a trained projection of what the tower returns, or of patches."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        projection: WholeLinear.Config
        encoder: Encoder.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.projection = config.projection.build()
        self.encoder = config.encoder and config.encoder.build()

    def forward(self, values: Tensor, mask_NP: Tensor) -> Tensor:
        """Return features, [N, F, D]."""
        encoded = values if self.encoder is None else self.encoder(values, mask_NP)
        return self.projection(encoded)


def reader(config: Mapping[str, Any], *, encoder: bool) -> Reader.Config:
    """Return the reader of a config.json, with the tower's encoder or without."""
    vision, scale = DEFAULTS | config["vision_config"], config.get("scale_factor", 2)
    dim = vision["hidden_size"]
    projection = linear(dim * scale**2, config["text_config"]["hidden_size"], bias=False)
    if not encoder:
        return Reader.Config(projection=projection)
    if (found := vision["hidden_act"]) != TANH:
        raise ValueError(refused("vision_config.hidden_act", TANH, found))
    layer = EncoderLayer.Config(
        self_attn=PatchAttention.Config(dim=dim, heads=vision["num_attention_heads"]),
        mlp=PatchFeedForward.Config(dim=dim, hidden_dim=vision["intermediate_size"]),
        norm=WholeNorm.Config(normalized_shape=dim, eps=vision["layer_norm_eps"], sharding_config=WHOLE),
    )
    layers = Encoder.Config(layer=layer, layers=vision["num_hidden_layers"], scale=scale)
    return Reader.Config(projection=projection, encoder=layers)
