"""Tiny random Hugging Face folders of every family, made by transformers itself. All parameters are random, norms
and biases too, so that a forgotten one shows."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
WIDE = {"head_dim": 32, "hidden_size": 96}  # heads wider than hidden_size / num_attention_heads
ODD = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192}  # three query heads a key head
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GLM_4_5 = {
    **{"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
}


def drawn_glm(seed: int) -> dict[str, Any]:
    """Return odd keys of a GLM-4.5, which no author of the code chose."""
    random = Random(f"GLM-4.5 {seed}")
    layers, keys, heads = random.randint(1, 4), random.choice([1, 2, 4]), random.choice([1, 2, 3])
    experts = random.choice([4, 8, 12])
    return {
        **{"num_hidden_layers": layers, "num_key_value_heads": keys, "num_attention_heads": keys * heads},
        **{"first_k_dense_replace": random.randrange(layers), "n_shared_experts": random.choice([1, 2])},
        **{"n_routed_experts": experts, "num_experts_per_tok": random.randint(1, experts - 1)},
        **{"head_dim": random.choice([32, 64, 96]), "hidden_size": random.choice([64, 96, 160])},
        **{"intermediate_size": random.choice([48, 136]), "moe_intermediate_size": random.choice([16, 48])},
        **{"vocab_size": random.choice([128, 130, 200]), "routed_scaling_factor": random.choice([1.0, 0.7, 2.5])},
        **{key: random.random() < 0.5 for key in ("attention_bias", "use_qk_norm", "norm_topk_prob")},
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (class of config, keys)
    "Llama 2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "Llama 3, wide heads": ("LlamaConfig", WIDE),
    "Llama 3.2, tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "Llama, yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "Qwen2.5, tied": (
        "Qwen2Config",
        {"tie_word_embeddings": True, "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
    ),
    "Qwen2.5, odd heads": ("Qwen2Config", ODD),
    "Qwen2.5, one key head": ("Qwen2Config", {"num_key_value_heads": 1}),
    "Qwen2.5, yarn": ("Qwen2Config", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7}}),
    "Qwen3, tied": ("Qwen3Config", {**WIDE, "tie_word_embeddings": True}),
    "Qwen3, odd vocabulary": ("Qwen3Config", {**WIDE, "vocab_size": 131}),
    "Qwen3, yarn": ("Qwen3Config", {**WIDE, "rope_parameters": YARN}),
    "Mistral, window 16": ("MistralConfig", {"head_dim": 32, "sliding_window": 16}),
    "Mistral, no window": ("MistralConfig", {**WIDE, "sliding_window": None}),
    "SmolLM3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "OLMo 2": ("Olmo2Config", {"num_key_value_heads": 4}),
    "OLMo 2, grouped, yarn": ("Olmo2Config", {"rope_parameters": YARN}),
    "OLMo 3, window 16": ("Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 16}),
    "OLMo 3, yarn": (
        "Olmo3Config",
        {
            **{"num_hidden_layers": 4, "sliding_window": 16},
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Phi-3": ("Phi3Config", {"num_key_value_heads": 4}),
    "Phi-4, partly rotated": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "GLM-4": ("Glm4Config", {"head_dim": 32}),
    "GLM-4, no biases": ("Glm4Config", {**WIDE, "attention_bias": False, "tie_word_embeddings": True}),
    "Gemma 3, window 16": (
        "Gemma3TextConfig",
        {
            **{"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 48},
            **{"hidden_size": 96},
        },
    ),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**WIDE, **EXPERTS}),
    "Qwen3-MoE, tied, weights not normed": (
        "Qwen3MoeConfig",
        {**WIDE, **EXPERTS, "tie_word_embeddings": True, "norm_topk_prob": False, "num_experts_per_tok": 3},
    ),
    "gpt-oss, window 16": ("GptOssConfig", GPT_OSS),
    "gpt-oss, wide heads, yarn within": (
        "GptOssConfig",
        {
            **GPT_OSS | WIDE | {"num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3},
            "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "GLM-4.5": ("Glm4MoeConfig", GLM_4_5),
    **{f"GLM-4.5, drawn {seed}": ("Glm4MoeConfig", drawn_glm(seed)) for seed in range(4)},
}


def make_folder(name: str, folder: Path) -> None:
    """Write the folder of a case."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    kind, keys = CASES[name]
    build: Callable[..., Any] = getattr(transformers, kind)
    torch.manual_seed(list(CASES).index(name))
    model = AutoModelForCausalLM.from_config(build(**SIZES | keys), dtype=torch.float32)
    with torch.no_grad():
        biases = [(key, bias) for key, bias in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for key, parameter in [*model.named_parameters(), *biases]:
            parameter.normal_(0, 1 if "sinks" in key else 0.1)
            if "norm" in key and not kind.startswith("Gemma"):
                parameter.add_(1)
    model.save_pretrained(folder)
