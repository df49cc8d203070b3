"""A TorchTitan ModelSpec for a ModelShape, and the names that Hugging Face gives to its parameters."""

import re
from typing import Any

from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.wire.model_shape import ModelShape


def build_spec(shape: ModelShape, *, seq_len: int) -> ModelSpec:
    """q, k and v stay separate linears: their shards are then rectangles of Hugging Face's tensors, which is what the
    weight plan moves; the generator fuses them on arrival."""
    return {"llama3": _llama3, "qwen3": _qwen3}[shape.family](shape, seq_len)


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"scaling": "none"}
    return {
        "scaling": "llama",
        "scaling_factor": float(scaling["factor"]),
        "low_freq_factor": float(scaling["low_freq_factor"]),
        "high_freq_factor": float(scaling["high_freq_factor"]),
        "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
    }


def _llama3(shape: ModelShape, seq_len: int) -> ModelSpec:
    model = llama3.Llama3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init=llama3._EMBEDDING_SKIP_INIT if shape.tied else llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=shape.dim, eps=shape.norm_eps, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=shape.dim, out_features=shape.vocab_size, param_init=llama3._output_linear_init(shape.dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=shape.n_layers,
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            hidden_dim=shape.hidden_dim,
            fuse_qkv=False,
            attn_backend="varlen",
            rope=ComplexRoPE.Config(
                dim=shape.head_dim, max_seq_len=seq_len, theta=shape.rope_theta, **_rope_scaling(shape)
            ),
        ),
    )
    for layer in model.layers:  # the builder leaves RMSNorm's default
        layer.attention_norm.eps = layer.ffn_norm.eps = shape.norm_eps
    return ModelSpec(
        name="llama3",
        flavor="titan_rl",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama3.Llama3StateDictAdapter,
    )


def _qwen3(shape: ModelShape, seq_len: int) -> ModelSpec:
    model = qwen3.Qwen3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init=qwen3._EMBEDDING_SKIP_INIT if shape.tied else qwen3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=shape.dim, eps=shape.norm_eps, param_init=qwen3._NORM_INIT),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_layers(
            n_layers=shape.n_layers,
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            hidden_dim=shape.hidden_dim,
            fuse_qkv=False,
            attn_backend="varlen",
            rope=CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=seq_len, theta=shape.rope_theta),
        ),
    )
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = layer.attention.qk_norm.eps = shape.norm_eps
    return ModelSpec(
        name="qwen3",
        flavor="titan_rl",
        model=model,
        parallelize_fn=qwen3.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=qwen3.Qwen3StateDictAdapter,
    )


def adapter(spec: ModelSpec, assets: str | None) -> Any:
    """TorchTitan's translation to and from Hugging Face tensors. (Its type is a base class without the name map.)"""
    assert spec.state_dict_adapter is not None
    return spec.state_dict_adapter(spec.model, assets)


def hf_names(spec: ModelSpec, names: list[str]) -> dict[str, str]:
    """TorchTitan's parameter names -> Hugging Face's."""
    back = {v: k for k, v in adapter(spec, None).from_hf_map.items() if v is not None}

    def hf(name: str) -> str:
        layer = re.search(r"\d+", name)
        generic = re.sub(r"\d+", "{}", name, count=1)
        return back[generic].format(layer[0]) if layer else back[name]

    return {name: hf(name) for name in names}


def rope_head_dims(shape: ModelShape, names: dict[str, str]) -> dict[str, int]:
    """Llama's q and k rows are stored in interleaved rotary order by TorchTitan; Qwen3's are as in Hugging Face."""
    if shape.family != "llama3":
        return {}
    return {name: shape.head_dim for name, hf in names.items() if hf.endswith(("q_proj.weight", "k_proj.weight"))}
