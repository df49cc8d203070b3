"""Gemma 4's dense text models from the config.json of a Hugging Face folder, of TorchTitan's parts. The folder may have
vision and audio towers, which stay as they are.

Layers of two kinds take turns: a sliding window, or full attention with other heads, whose keys may also be the values.
In small models (E2B, E4B) the last layers take keys and values from the last layer of their kind before them, and every
layer adds an embedding of the token for this layer.
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
from torchtitan.protocols.module import Module
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
    "enable_moe_block": (False, False),
    "num_experts": (None, None),  # by which vLLM makes a mixture of experts
}
LAYER_INPUT_SIZE, VOCABULARY = 256, 1 << 18  # defaults of hidden_size_ and vocab_size_per_layer_input
KeysValues = tuple[torch.Tensor, torch.Tensor]


class Gemma4Adapter(Adapter):
    """Our names, each layer's scalar, and inputs of layers."""

    norms = four_norms(
        *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    )
    text = "model."  # begin of the names of the text model's tensors, but for the head

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        layer = "layers.{}"
        self.from_hf_map[f"model.{layer}.layer_scalar"] = f"{layer}.layer_scalar"
        self.from_hf_map |= {
            "model.embed_tokens_per_layer.weight": "layer_inputs.embedding.weight",
            "model.per_layer_model_projection.weight": "layer_inputs.projection.weight",
            "model.per_layer_projection_norm.weight": "layer_inputs.norm.weight",
            f"model.{layer}.per_layer_input_gate.weight": f"{layer}.layer_input.gate.weight",
            f"model.{layer}.per_layer_projection.weight": f"{layer}.layer_input.projection.weight",
            f"model.{layer}.post_per_layer_input_norm.weight": f"{layer}.layer_input.norm.weight",
        }
        self.from_hf_map = {
            hf.replace("model.", self.text, 1) if hf.startswith("model.") else hf: name
            for hf, name in self.from_hf_map.items()
        }


class Gemma4TowerAdapter(Gemma4Adapter):
    """Names in a folder with towers."""

    text = "model.language_model."


class LayerInputs(Module):
    """Returns an input of every layer for each token: an embedding and a projection of the model's embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        embedding: family_parts.ScaledEmbedding.Config
        projection: Linear.Config
        norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = config.embedding.build()
        self.projection = config.projection.build()
        self.norm = config.norm.build()
        self._layers, self._scale = config.embedding.parts, config.projection.in_features**-0.5

    def forward(self, tokens: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projected = self.norm((self.projection(embedded) * self._scale).unflatten(-1, (self._layers, -1)))
        own = self.embedding(tokens).unflatten(-1, (self._layers, -1))
        return ((projected + own) * 2**-0.5).unbind(-2)


class LayerInput(Module):
    """Returns what a layer adds to its output for its input."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        gate: Linear.Config
        projection: Linear.Config
        norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = config.gate.build()
        self.projection = config.projection.build()
        self.norm = config.norm.build()

    def forward(self, x: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        return self.norm(self.projection(F.gelu(self.gate(x), approximate="tanh") * layer_input))


class Gemma4Model(family_parts.Model):
    """A model whose layers may have an input for each token, and keys and values of an earlier layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Model.Config):
        layer_inputs: LayerInputs.Config | None = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            family_parts.Model.Config.update_from_config(self, config=config, **kwargs)
            if self.layer_inputs is not None:
                self.layer_inputs.embedding.sharding_config = self.tok_embeddings.sharding_config
                whole: Any = self.layers[0].attention_norm.sharding_config  # on every rank, for its part of the rows
                self.layer_inputs.projection.sharding_config = self.layer_inputs.norm.sharding_config = whole
                for layer in self.layers:
                    part = layer.layer_input
                    part.gate.sharding_config = part.projection.sharding_config = part.norm.sharding_config = whole

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer_inputs = config.layer_inputs and config.layer_inputs.build()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
    ) -> Any:
        x, kept = self.tok_embeddings(tokens), dict[int, KeysValues]()
        inputs = self.layer_inputs(tokens, x) if self.layer_inputs else ()
        for i, (layer, config) in enumerate(zip(self.layers.values(), self.config.layers, strict=True)):
            given = None if config.attention.source is None else kept[config.attention.source]
            x = layer(x, attention_masks, positions, inputs[i] if inputs else None, given)
            if config.attention.kept:
                x, keys, values = x
                kept[i] = keys, values
        return self.lm_head(self.norm(x))


class ScaledBlock(family_parts.Block):
    """A block whose output is multiplied by a number, which is not trained."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Block.Config):
        layer_input: LayerInput.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer_input = config.layer_input and config.layer_input.build()
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
        layer_input: torch.Tensor | None = None,
        given: KeysValues | None = None,
    ) -> Any:
        """Return the output; if the attention's keys and values are kept, these as well."""
        attended, *kept = self.attention(
            self.attention_norm(x),
            attention_masks,
            positions,
            given,
        )
        x = x + self.attention_out_norm(attended)
        x = x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))
        if self.layer_input is not None:
            x = x + self.layer_input(x, layer_input)
        scalar = self.layer_scalar
        if isinstance(scalar, DTensor) and not isinstance(x, DTensor):
            scalar = scalar.to_local()
        return (x * scalar, *kept) if kept else x * scalar


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


class QueryLinear(QKVLinear):
    """The projection of queries alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.wk, self.wv

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.wq(x).unflatten(-1, (-1, self.head_dim))


class NormedValueAttention(family_parts.Attention):
    """Attention without a scale of scores, and with normed values. Keys and values may be an earlier layer's."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Attention.Config):
        value_eps: float
        kept: bool = False  # keys and values are returned, for later layers
        source: int | None = None  # the layer that has the keys and values; None: this one

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.value_eps, self.kept = config.value_eps, config.kept
        if config.source is not None:
            self.k_norm = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_BLD: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
        given: KeysValues | None = None,
    ) -> tuple[torch.Tensor, ...]:
        assert self.q_norm is not None
        if given is not None:
            q_BLNH = self.q_norm(self.qkv_linear(x_BLD))
            q_BLNH, _ = self.rope(q_BLNH, q_BLNH, positions)
            k_BLNH, v_BLNH = given
        else:
            assert self.k_norm is not None
            q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)
            q_BLNH, k_BLNH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLNH), positions)
            v_BLNH = F.rms_norm(v_BLNH, v_BLNH.shape[-1:], eps=self.value_eps)
        out_BLNH = self.attend(q_BLNH, k_BLNH, v_BLNH, attention_masks)
        out_BLD = self.wo(out_BLNH.contiguous().flatten(2))
        return (out_BLD, k_BLNH, v_BLNH) if self.kept else (out_BLD,)


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
    """Return the spec of the text model that config.json describes. A ValueError names a key that it cannot compute."""
    text: Mapping[str, Any] = config.get("text_config") or config
    for key, (only, default) in FIXED.items():
        for keys in (text, config):
            if (found := keys.get(key, default)) != only:
                raise ValueError(refused(key, str(only), found))
    if found := config.get("quantization_config") or text.get("quantization_config"):
        raise ValueError(refused("quantization_config", "weights that are not quantized", found))
    if (found := text.get("use_bidirectional_attention")) not in (None, "vision"):
        raise ValueError(refused("use_bidirectional_attention", 'null, or "vision"', found))
    dim, layers, eps = text["hidden_size"], text["num_hidden_layers"], text["rms_norm_eps"]
    sizes: dict[str, Any] = {
        "in_features": dim,
        "out_features": text["vocab_size"],
        "param_init": INIT,
    }
    cap, tied = text.get("final_logit_softcapping"), config.get("tie_word_embeddings", True)
    if text.get("tie_word_embeddings", True) != tied:
        raise ValueError(refused("tie_word_embeddings", "one value", [tied, not tied]))
    model = Gemma4Model.Config(
        dim=dim,
        vocab_size=text["vocab_size"],
        enable_weight_tying=tied,
        tok_embeddings=family_parts.ScaledEmbedding.Config(
            num_embeddings=text["vocab_size"],
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else INIT,
        ),
        norm=norm(dim, eps),
        lm_head=SoftCappedLinear.Config(**sizes, output_soft_cap_temp=cap) if cap else Linear.Config(**sizes),
        layers=blocks(text),
        layer_inputs=layer_inputs(text, layers) if layer_input_size(text) else None,
    )
    return spec_of_blocks(
        "gemma4",
        model,
        Gemma4TowerAdapter if text is not config else Gemma4Adapter,
    )


def layer_input_size(config: Mapping[str, Any]) -> int:
    return config.get("hidden_size_per_layer_input", LAYER_INPUT_SIZE) or 0


def layer_inputs(config: Mapping[str, Any], layers: int) -> LayerInputs.Config:
    size, vocabulary = layer_input_size(config), config.get("vocab_size_per_layer_input", VOCABULARY)
    if vocabulary < config["vocab_size"]:
        expected = f"at least vocab_size = {config['vocab_size']}"
        raise ValueError(refused("vocab_size_per_layer_input", expected, vocabulary))
    return LayerInputs.Config(
        embedding=family_parts.ScaledEmbedding.Config(
            num_embeddings=vocabulary, embedding_dim=layers * size, parts=layers, param_init=INIT
        ),
        projection=Linear.Config(
            in_features=config["hidden_size"],
            out_features=layers * size,
            param_init=INIT,
        ),
        norm=norm(size, config["rms_norm_eps"]),
    )


def blocks(config: Mapping[str, Any]) -> list[ScaledBlock.Config]:
    """Return the layers. The last `num_kv_shared_layers` take keys and values from the last layer of their kind before
    all of them."""
    of_layers = kinds(config, config["num_hidden_layers"])
    shared = config.get("num_kv_shared_layers") or 0
    own = of_layers[: len(of_layers) - shared]
    if missing := set(of_layers[len(own) :]) - set(own):
        raise ValueError(
            refused(
                "num_kv_shared_layers",
                f"a {min(missing)} layer before the shared ones",
                shared,
            )
        )
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    layers = [block(config, i, kind, double=i >= len(own)) for i, kind in enumerate(of_layers)]
    for layer, kind in zip(layers[len(own) :], of_layers[len(own) :], strict=True):
        attention: Any = layer.attention
        source: Any = layers[last[kind]].attention
        if (attention.head_dim, attention.n_kv_heads) != (source.head_dim, source.n_kv_heads):
            raise ValueError(
                refused(
                    "per_layer_config",
                    f"equal keys in all {kind} layers",
                    config["per_layer_config"],
                )
            )
        attention.source, source.kept = last[kind], True
        attention.qkv_linear = QueryLinear.Config(**family_parts.values_of(attention.qkv_linear))
    return layers


def kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's kind. transformers makes the last one attend to all."""
    given = config.get("layer_types") or [FULL if (i + 1) % FULL_EVERY == 0 else WINDOW for i in range(layers)]
    return [*given[:-1], FULL]


def block(config: Mapping[str, Any], layer: int, kind: str, *, double: bool) -> ScaledBlock.Config:
    """Return a layer. `double`: its feed-forward may be wider than the others'."""
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
        rope=rope(
            (config.get("rope_parameters") or ROPES)[kind],
            head_dim,
            config["max_position_embeddings"],
        ),
        qk_norm=norm(head_dim, eps),
    )
    attention = NormedValueAttention.Config(
        **family_parts.values_of(usual),
        scale=1.0,
        value_eps=eps,
    )
    if full and config.get("attention_k_eq_v"):
        attention.qkv_linear = KeyLinear.Config(**family_parts.values_of(attention.qkv_linear))
    rows = config["intermediate_size"] * (2 if double and config.get("use_double_wide_mlp") else 1)
    ffn = make_ffn_config(dim=dim, hidden_dim=rows, w1_param_init=INIT, w2w3_param_init=INIT)
    norms: dict[str, Any] = {place: norm(dim, eps) for place in Gemma4Adapter.norms.values()}
    size = layer_input_size(config)
    return ScaledBlock.Config(
        attention=attention,
        feed_forward=family_parts.GeluFeedForward.Config(w1=ffn.w1, w2=ffn.w2, w3=ffn.w3),
        layer_input=LayerInput.Config(
            gate=Linear.Config(in_features=dim, out_features=size, param_init=INIT),
            projection=Linear.Config(in_features=size, out_features=dim, param_init=INIT),
            norm=norm(dim, eps),
        )
        if size
        else None,
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
    raise ValueError(
        refused(
            "rope_parameters",
            "rope_type default or proportional, with factor 1",
            given,
        )
    )


def norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})
