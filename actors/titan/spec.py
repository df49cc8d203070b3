"""A TorchTitan ModelSpec for a ModelShape, and the names that Hugging Face gives to its parameters."""

import re
from dataclasses import replace
from typing import Any

from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan import private
from titan_rl.wire.model_shape import ModelShape


def build_spec(shape: ModelShape, *, seq_len: int) -> ModelSpec:
    """Resize TorchTitan's 8B flavor of the family, which has an initializer for every part, to `shape`.

    q, k and v stay separate linears: their shards are then rectangles of Hugging Face's tensors, which is what the
    weight plan moves; the generator fuses them on arrival."""
    registry = {"llama3": llama3.model_registry, "qwen3": qwen3.model_registry}[shape.family]
    spec = registry("8B", attn_backend="varlen")
    flavor: Any = spec.model
    embedding, head = flavor.tok_embeddings, flavor.lm_head
    if shape.tied:
        embedding = replace(embedding, param_init={"weight": skip_param_init})
    if shape.family == "llama3":
        head = replace(head, param_init=private.llama3_output_init(shape.dim))
    model = replace(
        flavor,
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.tied,
        tok_embeddings=replace(embedding, num_embeddings=shape.vocab_size, embedding_dim=shape.dim),
        norm=replace(flavor.norm, normalized_shape=shape.dim, eps=shape.norm_eps),
        lm_head=replace(head, in_features=shape.dim, out_features=shape.vocab_size),
        layers=_layers(shape, seq_len),
    )
    return replace(spec, flavor="titan_rl", model=model, pipelining_fn=None, post_optimizer_build_fn=None)


def _layers(shape: ModelShape, seq_len: int) -> list[Any]:
    rope = {"dim": shape.head_dim, "max_seq_len": seq_len, "theta": shape.rope_theta}
    arguments: dict[str, Any] = {
        "n_layers": shape.n_layers,
        "dim": shape.dim,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_kv_heads,
        "hidden_dim": shape.hidden_dim,
        "fuse_qkv": False,
        "attn_backend": "varlen",
    }
    layers: list[Any]
    if shape.family == "llama3":
        layers = private.build_llama3_layers(**arguments, rope=ComplexRoPE.Config(**rope, **_rope_scaling(shape)))
    else:
        layers = private.build_qwen3_layers(**arguments, head_dim=shape.head_dim, rope=CosSinRoPE.Config(**rope))
    for layer in layers:  # the builders take no epsilon
        for norm in (layer.attention_norm, layer.ffn_norm, layer.attention.qk_norm):
            if norm is not None:
                norm.eps = shape.norm_eps
    return layers


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


def adapter(spec: ModelSpec, assets: str | None) -> Any:
    """TorchTitan's translation to and from Hugging Face tensors. (Its type is a base class without the name map.)"""
    assert spec.state_dict_adapter is not None
    return spec.state_dict_adapter(spec.model, assets)


def plain(name: str) -> str:
    """The name that a parameter has in a state dict: without the marks of activation checkpointing."""
    return name.replace(private.CHECKPOINT_PREFIX, "")


def hf_names(spec: ModelSpec, names: list[str]) -> dict[str, str]:
    """TorchTitan's parameter names -> Hugging Face's."""
    back = {v: k for k, v in adapter(spec, None).from_hf_map.items() if v is not None}

    def hf(name: str) -> str:
        layer = re.search(r"\d+", name)
        generic = re.sub(r"\d+", "{}", plain(name), count=1)
        if generic not in back:
            raise ValueError(f"override.imports: expected overrides that keep the parameters' names, found {name}")
        return back[generic].format(layer[0]) if layer else back[name]

    return {name: hf(name) for name in names}


def rope_head_dims(shape: ModelShape, names: dict[str, str]) -> dict[str, int]:
    """Llama's q and k rows are stored in interleaved rotary order by TorchTitan; Qwen3's are as in Hugging Face."""
    if shape.family != "llama3":
        return {}
    return {name: shape.head_dim for name, hf in names.items() if hf.endswith(("q_proj.weight", "k_proj.weight"))}
