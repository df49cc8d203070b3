"""Keys of configs of families that TorchTitan's specs build, drawn from a seed, with sizes that no author chose."""

import random
from typing import Any

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only sizes of vLLM's kernel for CPUs


def deepseek_v3(seed: int) -> dict[str, Any]:
    """Draw keys of a config."""
    draw = random.Random(f"deepseek_v3 {seed}")
    layers, heads, groups, of_group = (
        draw.randint(2, 4),
        draw.choice([2, 4]),
        draw.choice([1, 2, 4]),
        draw.choice([2, 4]),
    )
    taken = draw.randint(1, groups)
    yarn = {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        **{"vocab_size": 64, "hidden_size": draw.choice([64, 96]), "intermediate_size": draw.choice([64, 96])},
        **{"num_hidden_layers": layers, "first_k_dense_replace": draw.randrange(layers)},
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 256},
        **{"q_lora_rank": draw.choice([None, 32]), "qk_nope_head_dim": 32, "v_head_dim": draw.choice([32, 64])},
        **LATENT,
        **{"n_routed_experts": groups * of_group, "n_group": groups, "topk_group": taken},
        **{"num_experts_per_tok": draw.randint(1, taken * of_group), "n_shared_experts": draw.choice([1, 2])},
        **{"moe_intermediate_size": draw.choice([16, 48]), "routed_scaling_factor": draw.choice([1.0, 2.5])},
        **{"norm_topk_prob": draw.random() < 0.5, "rope_parameters": draw.choice([None, YARN | yarn])},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }


def qwen3_5(seed: int, *, ranks: int = 1) -> dict[str, Any]:
    """Draw keys of a config. Heads divide by a number of tensor-parallel ranks."""
    draw = random.Random(f"qwen3.5 {seed}")
    layers, key_heads = draw.randint(2, 5), draw.choice([1, 2, 3]) * ranks
    kinds = [FULL, LINEAR] + [draw.choice([FULL, LINEAR, LINEAR]) for _ in range(layers - 2)]
    draw.shuffle(kinds)
    return {
        **{"vocab_size": 64, "hidden_size": draw.choice([64, 96]), "intermediate_size": draw.choice([64, 96])},
        **{"num_hidden_layers": layers, "layer_types": kinds, "head_dim": draw.choice([32, 64])},
        **{"num_attention_heads": 4 * ranks, "num_key_value_heads": draw.choice([1, 2]) * ranks},
        **{"linear_num_key_heads": key_heads, "linear_num_value_heads": draw.choice([1, 2, 3]) * key_heads},
        **{"linear_key_head_dim": draw.choice([8, 16]), "linear_value_head_dim": draw.choice([8, 24])},
        **{"linear_conv_kernel_dim": draw.choice([2, 4]), "max_position_embeddings": 256},
        **{"tie_word_embeddings": draw.random() < 0.5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }


def gemma4(seed: int, *, ranks: int = 1) -> dict[str, Any]:
    """Draw keys of a config. Heads divide by a number of tensor-parallel ranks."""
    draw = random.Random(f"gemma4 {seed}")
    layers, same = draw.randint(2, 5), draw.random() < 0.5
    kv_heads = draw.choice([1, 2]) * ranks
    return {
        **{"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0},
        **{
            "hidden_size": draw.choice([64, 128]),
            "intermediate_size": draw.choice([64, 96]),
            "num_hidden_layers": layers,
        },
        **{"num_attention_heads": 4 * ranks, "num_key_value_heads": kv_heads, "head_dim": 32},
        **{"global_head_dim": draw.choice([32, 64]), "num_global_key_value_heads": draw.choice([1, 2]) * ranks},
        **{"attention_k_eq_v": same, "final_logit_softcapping": draw.choice([None, 20.0])},
        "layer_types": [draw.choice([FULL, WINDOW]) for _ in range(layers - 1)] + [FULL],
        **{"sliding_window": 16, "max_position_embeddings": 256, "tie_word_embeddings": draw.random() < 0.5},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }


def small_gemma4(seed: int, *, ranks: int = 1) -> dict[str, Any]:
    """Draw keys of a config as E2B and E4B have them: layers have inputs, and the last ones take keys and values."""
    draw = random.Random(f"small gemma4 {seed}")
    own, shared = draw.randint(2, 4), draw.randint(1, 3)
    kinds = [FULL, WINDOW] + [draw.choice([FULL, WINDOW]) for _ in range(own - 2)]
    draw.shuffle(kinds)
    kinds += [draw.choice([FULL, WINDOW]) for _ in range(shared - 1)] + [FULL]
    return {
        **gemma4(seed, ranks=ranks),
        **{"num_hidden_layers": own + shared, "num_kv_shared_layers": shared, "layer_types": kinds},
        **{"hidden_size_per_layer_input": draw.choice([8, 24]), "vocab_size_per_layer_input": draw.choice([64, 80])},
        "use_double_wide_mlp": draw.random() < 0.5,
    }
