"""TorchTitan's Muse Glimmer, text only, from the config.json of a Hugging Face folder.

Its parts are TorchTitan's, but for rotary embeddings: halves of a head are rotated, as Hugging Face's rows expect, so
that a shard of the model is a rectangle of the folder's tensors. TorchTitan rotates pairs, and reorders q and k.
TorchTitan's parallelize function takes its newest backend only; Qwen3's cuts the same modules by the same layouts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import QKVLinear, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.muse_glimmer.model import (
    Attention,
    EmbeddingWithNorm,
    MuseGlimmerModel,
    MuseGlimmerTransformerBlock,
    RMSGainCenterNorm,
    SoftCappedLinear,
)
from torchtitan.models.muse_glimmer.state_dict_adapter import MuseGlimmerStateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan.rope import ScaledRoPE
from titan_rl.actors.titan.spec import spec_of_blocks
from titan_rl.wire.hf_config import FULL, WINDOW, refused

FULL_EVERY = 4  # layers, counted backward from the last, whose defaults are no window and no rotary embeddings
NORM_EPS, POST_NORM_EPS = 1e-5, 1e-8
INIT: dict[str, Any] = {"weight": partial(nn.init.normal_, std=0.02)}


class MuseGlimmerAdapter(MuseGlimmerStateDictAdapter):
    """TorchTitan's names, without its order of the rows of q and k."""

    def _permute(self, w: Any, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None) -> Any:
        return w

    _reverse_permute = _permute


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model that config.json describes. A ValueError names a key that it cannot compute."""
    text: Mapping[str, Any] = config.get("text_config") or config
    fixed = {"hidden_activation": "silu", "attention_bias": False, "tie_word_embeddings": False}
    for key, only in fixed.items():
        if text.get(key, only) != only:
            raise ValueError(refused(key, str(only), text[key]))
    for key in ("quantization_config", "rope_scaling"):
        if config.get(key) or text.get(key):
            raise ValueError(refused(key, "none", config.get(key) or text.get(key)))
    dim, layers = text["hidden_size"], range(text["num_hidden_layers"])
    eps = text.get("rms_norm_eps", NORM_EPS)
    model = MuseGlimmerModel.Config(
        dim=dim,
        vocab_size=text["vocab_size"],
        tok_embeddings=EmbeddingWithNorm.Config(
            embedding=Embedding.Config(num_embeddings=text["vocab_size"], embedding_dim=dim, param_init=INIT),
            norm=plain_norm(dim, eps),
        ),
        norm=gain_norm(dim, eps, center=0.0),
        lm_head=SoftCappedLinear.Config(
            in_features=dim,
            out_features=text["vocab_size"],
            param_init=INIT,
            output_multiplier=text["output_multiplier"],
            output_soft_cap_temp=text.get("final_logit_softcapping"),
        ),
        layers=[block(text, layer, last=layers[-1], eps=eps) for layer in layers],
    )
    return spec_of_blocks("muse_glimmer", model, MuseGlimmerAdapter)


def block(text: Mapping[str, Any], layer: int, *, last: int, eps: float) -> MuseGlimmerTransformerBlock.Config:
    dim, heads, head_dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    full = (last - layer) % FULL_EVERY == 0
    kinds = text.get("layer_types")
    kind = kinds[layer] if kinds else FULL if full else WINDOW
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(refused("rope_parameters", "rope_type default", rope))
    theta = rope.get("rope_theta") or text["rope_theta"]
    thetas = text.get("layer_rope_theta") or [0 if (last - i) % FULL_EVERY == 0 else theta for i in range(last + 1)]
    window = text["sliding_window"] if kind == WINDOW else None
    linear = partial(Linear.Config, param_init=INIT)
    post_eps = text.get("post_norm_eps", POST_NORM_EPS)
    return MuseGlimmerTransformerBlock.Config(
        attention=Attention.Config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=text["num_key_value_heads"],
            head_dim=head_dim,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim,
                wq=linear(in_features=dim, out_features=heads * head_dim),
                wkv=linear(in_features=dim, out_features=text["num_key_value_heads"] * head_dim),
            ),
            wo=linear(in_features=heads * head_dim, out_features=dim),
            o_gate=linear(in_features=dim, out_features=heads * head_dim),
            qk_norm=plain_norm(head_dim, eps),
            scale_query_by=text["qk_scale_factor"],
            use_rope=bool(thetas[layer]),
            rope=ScaledRoPE.Config(
                dim=head_dim, max_seq_len=text["max_position_embeddings"], theta=float(thetas[layer] or theta)
            ),
            window_size=window,
            inner_attention=VarlenAttention.Config(window_size=(window - 1, 0) if window else (-1, 0)),
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=text["intermediate_size"], w1_param_init=INIT, w2w3_param_init=INIT
        ),
        attention_norm=gain_norm(dim, eps),
        ffn_norm=gain_norm(dim, eps),
        post_attention_norm=gain_norm(dim, post_eps),
        post_ffn_norm=gain_norm(dim, post_eps),
    )


def gain_norm(size: int, eps: float, *, center: float = 1.0) -> RMSGainCenterNorm.Config:
    init = {"weight": nn.init.zeros_ if center else nn.init.ones_}
    return RMSGainCenterNorm.Config(normalized_shape=size, eps=eps, gain_center=center, param_init=init)


def plain_norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, elementwise_affine=False)
