"""Tiny Gemma 4 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

import random
from pathlib import Path
from typing import Any

FULL, WINDOW = "full_attention", "sliding_attention"


def drawn(seed: int, *, ranks: int = 1) -> dict[str, Any]:
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


def make_folder(folder: Path, keys: dict[str, Any], *, std: float = 0.2) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**keys), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std)
        for i, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.8 + 0.1 * i)
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
