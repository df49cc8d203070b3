"""Gemma 4's dense text models from the config.json of a Hugging Face folder, of TorchTitan's parts.

Layers of two kinds take turns: a sliding window, or full attention with other heads, whose keys may also be the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import AttentionMasksType, QKVLinear, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.muse_glimmer.model import SoftCappedLinear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig

from titan_rl.actors.titan import family_parts
from titan_rl.actors.titan.rope import ScaledRoPE
from titan_rl.actors.titan.spec import Adapter, spec_of_blocks
from titan_rl.wire.hf_config import FULL, WINDOW, refused
from titan_rl.wire.model_families import four_norms

FULL_EVERY, FULL_HEAD_DIM = 6, 512  # transformers' defaults of layer_types and global_head_dim
INIT: dict[str, Any] = {"weight": partial(nn.init.normal_, std=0.02)}
ROPES: dict[str, dict[str, Any]] = {  # transformers' defaults
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
FIXED: dict[str, Any] = {  # keys of parts that are not computed here, with their only value and the default
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "attention_bias": (False, False),
    "use_bidirectional_attention": (None, None),
    "hidden_size_per_layer_input": (0, 256),
    "num_kv_shared_layers": (0, 0),
    "enable_moe_block": (False, False),
}


class Gemma4Adapter(Adapter):
    """Our names, and each layer's scalar."""

    norms = four_norms(
        *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    )

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map["model.layers.{}.layer_scalar"] = "layers.{}.layer_scalar"


class ScaledBlock(family_parts.Block):
    """A block whose output is multiplied by a number, which is not trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Block.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        out, scalar = super().forward(x, attention_masks, positions), self.layer_scalar
        if isinstance(scalar, DTensor) and not isinstance(out, DTensor):
            scalar = scalar.to_local()
        return out * scalar


class KeyLinear(QKVLinear):
    """Projections of queries and keys. Keys are the values too."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.wv

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk))
        return q, k, k


class NormedValueAttention(family_parts.Attention):
    """Attention without a scale of scores, and with normed values."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Attention.Config):
        value_eps: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.value_eps = config.value_eps

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)
        q_BLNH, k_BLNH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLNH), positions)
        v_BLNH = F.rms_norm(v_BLNH, v_BLNH.shape[-1:], eps=self.value_eps)
        keys: dict[str, Any] = {"scale": self.scaling, "enable_gqa": self.enable_gqa}
        out_BLNH = self.inner_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, **keys)
        return self.wo(out_BLNH.contiguous().flatten(2))


class ProportionalRoPE(ScaledRoPE):
    """Rotates the share `rotated` of a head's halves, at the frequencies of the whole head."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledRoPE.Config):
        rotated: float

    def _precompute_cache(self) -> torch.Tensor:
        config: ProportionalRoPE.Config = self.config  # pyright: ignore[reportAssignmentType]
        turning = int(config.rotated * config.dim // 2)
        per_token = torch.zeros(config.dim // 2)
        per_token[:turning] = 1.0 / config.theta ** (torch.arange(0, 2 * turning, 2).float() / config.dim)
        angles_LH = torch.outer(torch.arange(config.max_seq_len, dtype=per_token.dtype), per_token).repeat(1, 2)
        return torch.cat([angles_LH.cos(), angles_LH.sin()], dim=-1)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model that config.json describes. A ValueError names a key that it cannot compute."""
    for key, (only, default) in FIXED.items():
        if (found := config.get(key, default)) != only:
            raise ValueError(refused(key, str(only), found))
    dim, layers, eps = config["hidden_size"], config["num_hidden_layers"], config["rms_norm_eps"]
    sizes: dict[str, Any] = {"in_features": dim, "out_features": config["vocab_size"], "param_init": INIT}
    cap, tied = config.get("final_logit_softcapping"), config.get("tie_word_embeddings", True)
    model = family_parts.Model.Config(
        dim=dim,
        vocab_size=config["vocab_size"],
        enable_weight_tying=tied,
        tok_embeddings=family_parts.ScaledEmbedding.Config(
            num_embeddings=config["vocab_size"],
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else INIT,
        ),
        norm=norm(dim, eps),
        lm_head=SoftCappedLinear.Config(**sizes, output_soft_cap_temp=cap) if cap else Linear.Config(**sizes),
        layers=[block(config, layer, kind) for layer, kind in enumerate(kinds(config, layers))],
    )
    return spec_of_blocks("gemma4", model, Gemma4Adapter)


def kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's kind. transformers makes the last one attend to all."""
    given = config.get("layer_types") or [FULL if (i + 1) % FULL_EVERY == 0 else WINDOW for i in range(layers)]
    return [*given[:-1], FULL]


def block(config: Mapping[str, Any], layer: int, kind: str) -> ScaledBlock.Config:
    dim, eps, full = config["hidden_size"], config["rms_norm_eps"], kind == FULL
    own = {int(number): keys for number, keys in (config.get("per_layer_config") or {}).items()}.get(layer, {})
    if full and "per_layer_config" not in config:
        own = {"head_dim": config.get("global_head_dim", FULL_HEAD_DIM)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    head_dim = own.get("head_dim") or config["head_dim"]
    window = config["sliding_window"]
    usual = make_gqa_config(
        dim=dim,
        n_heads=config["num_attention_heads"],
        n_kv_heads=own.get("num_key_value_heads") or config["num_key_value_heads"],
        head_dim=head_dim,
        wqkv_param_init=INIT,
        wo_param_init=INIT,
        inner_attention=VarlenAttention.Config(window_size=(-1, 0) if full else (window - 1, 0)),
        rope=rope((config.get("rope_parameters") or ROPES)[kind], head_dim, config["max_position_embeddings"]),
        qk_norm=norm(head_dim, eps),
    )
    attention = NormedValueAttention.Config(**family_parts.values_of(usual), scale=1.0, value_eps=eps)
    if full and config.get("attention_k_eq_v"):
        attention.qkv_linear = KeyLinear.Config(**family_parts.values_of(attention.qkv_linear))
    ffn = make_ffn_config(dim=dim, hidden_dim=config["intermediate_size"], w1_param_init=INIT, w2w3_param_init=INIT)
    norms: dict[str, Any] = {place: norm(dim, eps) for place in Gemma4Adapter.norms.values()}
    return ScaledBlock.Config(
        attention=attention,
        feed_forward=family_parts.GeluFeedForward.Config(w1=ffn.w1, w2=ffn.w2, w3=ffn.w3),
        **norms,
        param_init={"layer_scalar": nn.init.ones_},
        sharding_config=ShardingConfig(state_shardings={"layer_scalar": dense_param_placement(tp=spmd.R)}),
    )


def rope(given: Mapping[str, Any], head_dim: int, length: int) -> ScaledRoPE.Config:
    keys: dict[str, Any] = {"dim": head_dim, "max_seq_len": length, "theta": given["rope_theta"]}
    if given["rope_type"] == "proportional" and given.get("factor", 1.0) == 1.0:
        return ProportionalRoPE.Config(**keys, rotated=given.get("partial_rotary_factor", 1.0))
    if given["rope_type"] == "default":
        return ScaledRoPE.Config(**keys)
    raise ValueError(refused("rope_parameters", "rope_type default or proportional, with factor 1", given))


def norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})
