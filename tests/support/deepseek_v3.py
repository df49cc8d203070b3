"""Tiny DeepSeek V3 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

import random
from pathlib import Path
from typing import Any

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # the only sizes of vLLM's kernel for CPUs


def drawn(seed: int) -> dict[str, Any]:
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


def make_folder(folder: Path, keys: dict[str, Any], *, std: float = 0.2) -> Path:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**keys)).float()
    biases = [(name, bias) for name, bias in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *biases]:
            tensor.normal_(1.0 if "norm" in name else 0.0, std)
    model.save_pretrained(folder)
    return folder


def make_model(folder: Path, keys: dict[str, Any]) -> Path:
    """Write a folder with the built-in tokenizer, whose weights learn."""
    from titan_rl.text.tokenizer import build

    make_folder(folder, keys, std=0.08)
    config = (folder / "config.json").read_text()
    build(folder)
    (folder / "config.json").write_text(config)
    return folder


def of_each_expert(stacks: dict[str, Any]) -> dict[str, Any]:
    """Return matrices of a folder from the stacks that transformers has in memory."""
    found = dict[str, Any]()
    for name, stack in stacks.items():
        at, _, last = name.rpartition(".")
        if not at.endswith(".experts"):
            found[name] = stack
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
        for i, matrix in enumerate(stack):
            found |= {f"{at}.{i}.{part}.weight": w for part, w in zip(parts, matrix.chunk(len(parts)), strict=True)}
    return found
