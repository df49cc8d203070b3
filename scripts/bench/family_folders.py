"""Tiny random Hugging Face folders of every family, made by transformers itself. All parameters are random, norms
and biases too, so that a forgotten one shows."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from bench import drawn_families
from titan_rl.wire.hf_config import FULL, WINDOW
from titan_rl.wire.model_families import BY_MODEL_TYPE, FAMILIES, SPECS, RopeType

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
ROPES: dict[RopeType, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": LLAMA3,
    "yarn": YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
EXPERT_COUNTS = ("num_experts", "num_local_experts")
SCALE = re.compile(r"norm[^.]*\.weight$|layer_scalar$")  # parameters that are 1 in a new model
CENTERED: dict[str, tuple[str, ...]] = {  # families whose norms multiply by 1 + weight, and their norms that do not
    "gemma3_text": (),
    "muse_glimmer": ("model.language_model.norm.weight",),
}
GLM_4_5 = {
    **{"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
}


DENSE_V3 = {  # DeepSeek V3 without experts. vLLM's CPU kernel has these two sizes only: kv_lora_rank, qk_rope_head_dim
    **{"num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
}
TOWER = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "patch_size": 2}
TOWER |= {"pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4, "output_dim": 64}


def muse(**keys: Any) -> dict[str, Any]:
    """Return keys of a Muse Glimmer with a vision tower. `keys` are the text model's. No sample has an image's token:
    transformers computes another in its place."""
    loud: dict[str, Any] = {"head_dim": 32, "sliding_window": 16, "output_multiplier": 4.0}  # near the cap
    return {
        **{"text_config": SIZES | loud | keys, "vision_config": TOWER, "image_token_id": 998, "video_token_id": 999},
        **{"out_hidden_size": 64, "projector_hidden_size": 16},
    }


def gemma_4(**keys: Any) -> dict[str, Any]:
    """Return keys of a Gemma 4 whose layers are as in the published ones."""
    vocabulary = keys.get("vocab_size", SIZES["vocab_size"])
    return {
        **{"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        **{"num_hidden_layers": 6, "sliding_window": 16, "final_logit_softcapping": 20.0},
        **{"vocab_size_per_layer_input": vocabulary, "hidden_size_per_layer_input": 0, **keys},
    }


def with_towers(text: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Return keys of a model with a vision tower. No sample has an image's token."""
    tokens = dict.fromkeys(("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id"), 998)
    return {"text_config": SIZES | text, "tie_word_embeddings": text["tie_word_embeddings"], **tokens, **keys}


def qwen_3_5_with_tower(text: dict[str, Any]) -> dict[str, Any]:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    vision |= {"num_position_embeddings": 16, "out_hidden_size": text["hidden_size"]}
    return with_towers(text, vision_config=vision)


def gemma_4_with_tower(text: dict[str, Any]) -> dict[str, Any]:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "patch_size": 2}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 4}
    return with_towers(text, vision_config=vision, audio_config=None, audio_token_id=998)


def idefics3(**text: Any) -> dict[str, Any]:
    """Return keys of a Llama with a vision tower. No sample has an image's token: tests/unit/ext/vision has images."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        **{"text_config": {"model_type": "llama"} | SIZES | text, "image_token_id": 998, "scale_factor": 2},
        **{"vision_config": vision | {"image_size": 8, "patch_size": 2}, "pad_token_id": 0},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


BUILT: dict[str, Callable[[int, int], dict[str, Any]]] = {  # keys by seed and ranks
    "deepseek_v3": lambda seed, ranks: drawn_families.deepseek_v3(seed),
    "gemma4": lambda seed, ranks: gemma_4_with_tower(drawn_families.small_gemma4(seed, ranks=ranks)),
    "idefics3": lambda seed, ranks: idefics3(**drawn("llama", seed, ranks=ranks)),
    "smolvlm": lambda seed, ranks: idefics3(**drawn("llama", seed + 1, ranks=ranks)),
    "qwen3_5": lambda seed, ranks: qwen_3_5_with_tower(drawn_families.qwen3_5(seed, ranks=ranks)),
    "qwen3_5_text": lambda seed, ranks: drawn_families.qwen3_5(seed, ranks=ranks),
}


def drawn(model_type: str, seed: int, *, ranks: int = 1) -> dict[str, Any]:
    """Return odd keys of a family, which no author of the code chose. Heads divide by a number of ranks."""
    if model_type in BUILT:
        return BUILT[model_type](seed, ranks)
    random = Random(f"{model_type} {seed}")
    keys, layers = random.choice([1, 2, 3]) * ranks, random.randint(2, 5)
    heads, head_dim = keys * random.choice([1, 2, 3]), random.choice([32, 64, 96])
    kinds = [random.choice([FULL, WINDOW]) for _ in range(layers)]
    sizes: dict[str, Any] = {
        **{"num_hidden_layers": layers, "num_key_value_heads": keys, "num_attention_heads": heads},
        **{"hidden_size": random.choice([64, 96, 160]), "intermediate_size": random.choice([48, 136])},
        **{"vocab_size": random.choice([128, 130, 200]), "tie_word_embeddings": random.random() < 0.5},
        **{"head_dim": head_dim, "sliding_window": random.choice([7, 16, 33])},
    }
    if model_type == "muse_glimmer":
        return muse(**sizes | {"tie_word_embeddings": False, "layer_types": kinds})
    if model_type == "gemma4_text":
        own = {"global_head_dim": random.choice([32, 64]), "num_global_key_value_heads": random.choice([1, 2]) * ranks}
        own |= {"attention_k_eq_v": random.random() < 0.5, "final_logit_softcapping": random.choice([None, 20.0])}
        return gemma_4(**sizes | own | {"layer_types": [*kinds[:-1], FULL]})
    parts = FAMILIES[BY_MODEL_TYPE[model_type]]
    sizes["tie_word_embeddings"] &= parts.ties
    if parts.scaled_embedding:
        sizes["hidden_size"] = heads * 40  # transformers refuses what heads do not divide
    if parts.heads_fill_dim:
        sizes["hidden_size"] = heads * sizes.pop("head_dim")
    if not parts.default_window:
        del sizes["sliding_window"]
    if parts.full_every:
        sizes["layer_types"] = kinds if not parts.sinks else [FULL if i % 2 else WINDOW for i in range(layers)]
    if parts.unrotated_layers:
        sizes["no_rope_layers"] = [int(kind == FULL) for kind in kinds]
    if not parts.full_every or parts.one_rope:
        rope = dict(ROPES[random.choice(parts.rope_types)])
        share = {"partial_rotary_factor": random.choice([0.25, 0.5, 0.75])} if parts.partly_rotated else {}
        sizes["rope_parameters"] = rope | share
    if parts.qkv_bias is None:
        sizes["attention_bias"] = random.random() < 0.5
    if parts.head_norms is None:
        sizes["use_qk_norm"] = random.random() < 0.5
    if parts.experts:
        experts = random.choice([4, 8, 12])
        count = "n_routed_experts" if parts.biased_routes else EXPERT_COUNTS[parts.clamped_experts]
        sizes |= {count: experts, "num_experts_per_tok": random.randint(1, experts - 1)}
        sizes |= {"moe_intermediate_size": random.choice([16, 48]), "norm_topk_prob": random.random() < 0.5}
    if parts.biased_routes:
        sizes |= {"first_k_dense_replace": random.randrange(layers), "n_shared_experts": random.choice([1, 2])}
        sizes["routed_scaling_factor"] = random.choice([1.0, 0.7, 2.5])
    return sizes


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (model_type, keys)
    "Llama 2": ("llama", {"num_key_value_heads": 4}),
    "Llama 3, wide heads": ("llama", WIDE),
    "Llama 3.2, tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "Llama, yarn": ("llama", {"rope_parameters": YARN}),
    "Qwen2.5, tied": (
        "qwen2",
        {"tie_word_embeddings": True, "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1},
    ),
    "Qwen2.5, odd heads": ("qwen2", ODD),
    "Qwen2.5, one key head": ("qwen2", {"num_key_value_heads": 1}),
    "Qwen2.5, yarn": ("qwen2", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7}}),
    "Qwen3, tied": ("qwen3", {**WIDE, "tie_word_embeddings": True}),
    "Qwen3, odd vocabulary": ("qwen3", {**WIDE, "vocab_size": 131}),
    "Qwen3, yarn": ("qwen3", {**WIDE, "rope_parameters": YARN}),
    "Mistral, window 16": ("mistral", {"head_dim": 32, "sliding_window": 16}),
    "Mistral, no window": ("mistral", {**WIDE, "sliding_window": None}),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4}),
    "OLMo 2": ("olmo2", {"num_key_value_heads": 4}),
    "OLMo 2, grouped, yarn": ("olmo2", {"rope_parameters": YARN}),
    "OLMo 3, window 16": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 16}),
    "OLMo 3, yarn": (
        "olmo3",
        {
            **{"num_hidden_layers": 4, "sliding_window": 16},
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Phi-3": ("phi3", {"num_key_value_heads": 4}),
    "Phi-4, partly rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "GLM-4": ("glm4", {"head_dim": 32}),
    "GLM-4, no biases": ("glm4", {**WIDE, "attention_bias": False, "tie_word_embeddings": True}),
    "Gemma 3, window 16": (
        "gemma3_text",
        {
            **{"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 48},
            **{"hidden_size": 96},
        },
    ),
    "Qwen3-MoE": ("qwen3_moe", {**WIDE, **EXPERTS}),
    "Qwen3-MoE, tied, weights not normed": (
        "qwen3_moe",
        {**WIDE, **EXPERTS, "tie_word_embeddings": True, "norm_topk_prob": False, "num_experts_per_tok": 3},
    ),
    "gpt-oss, window 16": ("gpt_oss", GPT_OSS),
    "gpt-oss, wide heads, yarn within": (
        "gpt_oss",
        {
            **GPT_OSS | WIDE | {"num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3},
            "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "GLM-4.5": ("glm4_moe", GLM_4_5),
    "GLM-4.5, groups": ("glm4_moe", {**GLM_4_5, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
    "Gemma 4": ("gemma4_text", gemma_4()),
    "Gemma 4, no keys as values, untied": (
        "gemma4_text",
        gemma_4(attention_k_eq_v=False, tie_word_embeddings=False, final_logit_softcapping=None),
    ),
    "Gemma 4, 11 layers": ("gemma4_text", gemma_4(num_hidden_layers=11)),
    "Muse Glimmer": ("muse_glimmer", muse(num_hidden_layers=6)),
    "DeepSeek V3": ("deepseek_v3", drawn_families.deepseek_v3(1)),
    "DeepSeek V3 without experts": ("deepseek_v3", DENSE_V3),
    "Gemma 4 with inputs of layers and a tower": (
        "gemma4",
        gemma_4_with_tower(drawn_families.small_gemma4(3, ranks=2)),
    ),
    "Qwen3.5": ("qwen3_5_text", drawn_families.qwen3_5(1, ranks=2)),
    "Idefics 3": ("idefics3", idefics3(head_dim=32, rope_parameters=LLAMA3)),
    "SmolVLM": ("smolvlm", idefics3(tie_word_embeddings=True)),
    "Qwen3.5 with a tower": ("qwen3_5", qwen_3_5_with_tower(drawn_families.qwen3_5(2, ranks=2))),
}
SPEC_OF_USER = {"DeepSeek V3 without experts": "support.own_specs:mla"}
"""model.spec of cases that have no entry in the registry."""
DRAWN = 1  # cases of each family
CASES |= {
    f"{name}, drawn {seed}": (model_type, drawn(model_type, seed))
    for model_type, name in {kind: name.partition(",")[0] for name, (kind, _) in reversed(CASES.items())}.items()
    if model_type in (*BY_MODEL_TYPE, *SPECS)
    for seed in range(DRAWN)
}


def make_folder(name: str, folder: Path) -> None:
    """Write the folder of a case."""
    model_type, keys = CASES[name]
    write_folder(folder, model_type, SIZES | keys, seed=name)


def write_folder(folder: Path, model_type: str, keys: dict[str, Any], *, seed: str) -> None:
    """Write a folder of a random model."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(Random(seed).getrandbits(32))
    config = AutoConfig.for_model(model_type, **keys)
    config.save_pretrained(folder)
    model = transformers_class(folder).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.normal_(0, 1 if "sinks" in key else 0.1)
            if SCALE.search(key) and (model_type not in CENTERED or key in CENTERED[model_type]):
                tensor.add_(1)
    model.save_pretrained(folder)


def transformers_class(folder: Path) -> Any:
    """Return the class that loads a folder as a model that writes text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = "vision_config" in json.loads((folder / "config.json").read_text())
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
