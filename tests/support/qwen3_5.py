"""Tiny Qwen3.5 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

import json
from pathlib import Path
from typing import Any

from bench import drawn_families

drawn, FULL, LINEAR = drawn_families.qwen3_5, drawn_families.FULL, drawn_families.LINEAR


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
