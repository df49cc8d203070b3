"""TorchTitan's DeepSeek V3 from the config.json of a Hugging Face folder: latent attention, and experts of which each
token passes some of a few groups.

Its parts are TorchTitan's, in its order of rows, which is the folder's. Routers multiply in float32, as transformers'
do. Layers that predict further tokens are not computed; an export keeps their tensors.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torchtitan.config import derive
from torchtitan.models.common import ComplexRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, make_mla_attention_config
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan.experts import Float32Gate
from titan_rl.actors.titan.spec import spec_of_blocks
from titan_rl.wire.hf_config import refused, unsupported_routes

INIT: dict[str, Any] = {"weight": partial(nn.init.normal_, std=0.02)}
ONES: dict[str, Any] = {"weight": nn.init.ones_}
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEFAULTS: dict[str, Any] = {  # transformers'
    **{"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": 1536},
}
ONLY: dict[str, Any] = {  # keys of parts that are not computed here, with the one value that they may have
    **{"hidden_act": "silu", "attention_bias": False, "rope_interleave": True, "moe_layer_freq": 1},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
NORM_EPS = 1e-6  # transformers has no other in latent attention, where vLLM has rms_norm_eps


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model that config.json describes. A ValueError names each key that it cannot compute."""
    c = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}}
    if problems := "; ".join(unsupported(c)):
        raise ValueError(problems)
    dim, eps = c["hidden_size"], c["rms_norm_eps"]
    linear = partial(Linear.Config, param_init=INIT)
    model = DeepSeekV3Model.Config(
        dim=dim,
        vocab_size=c["vocab_size"],
        tok_embeddings=Embedding.Config(num_embeddings=c["vocab_size"], embedding_dim=dim, param_init=INIT),
        norm=norm(dim, eps),
        lm_head=linear(in_features=dim, out_features=c["vocab_size"]),
        layers=[block(c, layer) for layer in range(c["num_hidden_layers"])],
    )
    return spec_of_blocks("deepseek_v3", model, DeepSeekV3StateDictAdapter)


def unsupported(c: Mapping[str, Any]) -> Iterator[str]:
    for key, only in ONLY.items():
        if c.get(key, only) != only:
            yield refused(key, str(only), c[key])
    if c["rms_norm_eps"] != NORM_EPS:
        yield refused("rms_norm_eps", f"{NORM_EPS:g}, which transformers has in latent attention", c["rms_norm_eps"])
    if c.get("tie_word_embeddings"):
        yield refused("tie_word_embeddings", "false, as vLLM ignores it for DeepseekV3ForCausalLM", True)
    if c.get("quantization_config"):
        yield refused("quantization_config", "weights that are not quantized", c["quantization_config"])
    yield from unsupported_routes(c)
    scaling = rope_of(c)
    kind, wide = scaling["rope_type"], scaling.get("mscale_all_dim")
    if kind not in ("default", "yarn"):
        yield refused("rope_scaling", "rope_type default or yarn", kind)
    elif kind == "yarn" and (not wide or scaling.get("mscale") != wide or "attention_factor" in scaling):
        yield refused("rope_scaling", "equal mscale and mscale_all_dim, and no attention_factor", scaling)


def block(c: Mapping[str, Any], layer: int) -> DeepSeekV3TransformerBlock.Config:
    dim, eps, scaling = c["hidden_size"], c["rms_norm_eps"], rope_of(c)
    attention = make_mla_attention_config(
        layer_id=layer,
        dim=dim,
        n_heads=c["num_attention_heads"],
        q_lora_rank=c["q_lora_rank"] or 0,
        **{key: c[key] for key in LATENT_SIZES},
        mscale=scaling.get("mscale_all_dim") or 1.0,
        attn_backend="varlen",
        linear_init=INIT,
        norm_init=ONES,
        depth_init=lambda _: INIT,
        rope=rope(scaling, c["qk_rope_head_dim"], c["max_position_embeddings"]),
    )
    attention.q_norm.eps = attention.kv_norm.eps = eps
    dense = layer < c["first_k_dense_replace"]
    return DeepSeekV3TransformerBlock.Config(
        attention=attention,
        feed_forward=feed_forward(dim, c["intermediate_size"]) if dense else None,
        moe=None if dense else experts(c),
        attention_norm=norm(dim, eps),
        ffn_norm=norm(dim, eps),
    )


def experts(c: Mapping[str, Any]) -> MoE.Config:
    """Return experts with a correction bias, which TorchTitan's coefficient makes, and nothing moves."""
    dim, rows, count, each = (
        c["hidden_size"],
        c["moe_intermediate_size"],
        c["n_routed_experts"],
        c["num_experts_per_tok"],
    )
    router = make_router_config(
        dim=dim,
        num_experts=count,
        gate_param_init=INIT,
        top_k=each,
        score_func="sigmoid",
        route_norm=c["norm_topk_prob"],
        route_scale=float(c["routed_scaling_factor"]),
        num_expert_groups=c["n_group"],
        num_limited_groups=c["topk_group"],
    )
    router.gate = derive(router.gate, Float32Gate.Config)
    init = INIT["weight"]
    return make_moe_config(
        num_experts=count,
        load_balance_coeff=1.0,
        router=router,
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=rows,
            num_experts=count,
            top_k=each,
            param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
            comm_backend="standard",
        ),
        shared_experts=feed_forward(dim, rows * c["n_shared_experts"]),
    )


def feed_forward(dim: int, rows: int) -> Any:
    return make_ffn_config(dim=dim, hidden_dim=rows, w1_param_init=INIT, w2w3_param_init=INIT)


def rope_of(c: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers 5's `rope_parameters`, or build them from 4's `rope_theta` and `rope_scaling`."""
    given = c.get("rope_scaling") or c.get("rope_parameters") or {}
    return {"rope_theta": c.get("rope_theta", 1e4), "rope_type": given.get("type", "default"), **given}


def rope(scaling: Mapping[str, Any], dim: int, length: int) -> ComplexRoPE.Config:
    keys: dict[str, Any] = {"dim": dim, "max_seq_len": length, "theta": float(scaling["rope_theta"])}
    if scaling["rope_type"] != "yarn":
        return ComplexRoPE.Config(**keys)
    factor, before = float(scaling["factor"]), scaling["original_max_position_embeddings"]
    keys["max_seq_len"] = min(length, int(before * factor))  # vLLM has no table beyond
    keys |= {key: float(scaling[key]) for key in ("beta_fast", "beta_slow") if key in scaling}
    return ComplexRoPE.Config(**keys, scaling="yarn", rope_factor=factor, original_seq_len=before)


def norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=ONES)
