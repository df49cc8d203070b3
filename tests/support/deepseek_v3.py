"""Tiny DeepSeek V3 folders with random weights, made by transformers itself, with sizes that are drawn from a seed."""

from pathlib import Path
from typing import Any

from bench import drawn_families

drawn, LATENT = drawn_families.deepseek_v3, drawn_families.LATENT


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
