"""Tiny Qwen3.5 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

import json
import random
from pathlib import Path
from typing import Any

FULL, LINEAR = "full_attention", "linear_attention"


def drawn(seed: int, *, ranks: int = 1) -> dict[str, Any]:
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


def make_folder(folder: Path, keys: dict[str, Any], *, std: float = 0.2, tower: bool = False) -> Path:
    """Write a folder of the text model, or of one with a vision tower."""
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    torch.manual_seed(0)
    if tower:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
        vision |= {"num_position_embeddings": 16, "out_hidden_size": keys["hidden_size"]}
        tied = keys["tie_word_embeddings"]
        model: Any = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=keys, vision_config=vision, tie_word_embeddings=tied)
        )
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**keys))
    with torch.no_grad():
        for name, parameter in model.float().named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 1)
            else:
                parameter.normal_(1.0 if "linear_attn.norm" in name else 0.0, std)
    model.save_pretrained(folder)
    return folder


def transformers_model(folder: Path) -> Any:
    """Return the whole model of a folder, whose logits are the text model's."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    kinds = {"qwen3_5": Qwen3_5ForConditionalGeneration, "qwen3_5_text": Qwen3_5ForCausalLM}
    kind: Any = kinds[json.loads((folder / "config.json").read_text())["model_type"]]
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_model(folder: Path, keys: dict[str, Any], *, tower: bool = False) -> Path:
    """Write a folder with the built-in tokenizer, whose weights learn."""
    from titan_rl.text.tokenizer import build

    make_folder(folder, keys, std=0.08, tower=tower)
    config = (folder / "config.json").read_text()
    build(folder)
    (folder / "config.json").write_text(config)
    return folder
