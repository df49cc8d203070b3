"""TorchTitan's own model flavors ("debugmodel", "8B", ...) as a ModelShape."""

from typing import Any

from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import qwen3_configs

from titan_rl.config.choices import Family
from titan_rl.config.toml import did_you_mean
from titan_rl.wire.model_families import FAMILIES
from titan_rl.wire.model_shape import ModelShape


def shape_of_flavor(family: Family, flavor: str) -> ModelShape:
    """Read the dimensions of a flavor from TorchTitan's own registry. ValueError names the key to change."""
    registries: dict[Family, dict[str, Any]] = {
        "llama3": llama3_configs,
        "qwen3": qwen3_configs,
        "qwen3_moe": qwen3_configs,
    }
    if family not in registries:
        raise ValueError(f"model.flavor: expected a family with flavors ({', '.join(registries)}), found {family}")
    flavors = registries[family]
    built = {name: build(attn_backend="varlen") for name, build in flavors.items()}
    routed = FAMILIES[family].experts
    of_family = {name: titan for name, titan in built.items() if (titan.layers[0].moe is not None) == routed}
    if flavor not in of_family:
        other = ", a dense model" if routed else ", a mixture of experts"
        wrong = f'"{flavor}"' + (other if flavor in built else "")
        kind = family if routed else f"dense {family}"
        hint = did_you_mean(flavor, of_family)
        raise ValueError(f"model.flavor: expected a {kind} ({', '.join(of_family)}), found {wrong}{hint}")
    titan = of_family[flavor]
    attention, moe = titan.layers[0].attention, titan.layers[0].moe
    rope = attention.rope
    scaling = {
        "rope_type": "llama3",
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    return ModelShape(
        family=family,
        vocab_size=titan.vocab_size,
        dim=titan.dim,
        n_layers=len(titan.layers),
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or titan.dim // attention.n_heads,
        hidden_dim=moe.routed_experts.inner_experts.hidden_dim if moe else titan.layers[0].feed_forward.w1.out_features,
        max_seq_len=rope.max_seq_len,
        rope_theta=float(rope.theta),
        rope_scaling=scaling if rope.scaling == "llama" else None,
        norm_eps=titan.norm.eps,
        tied=titan.enable_weight_tying,
        experts=moe.num_experts if moe else 0,
        experts_per_token=moe.router.top_k if moe else 0,
        norm_routes=moe is not None and moe.router.route_norm,
    )
