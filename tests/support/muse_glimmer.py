"""A tiny Muse Glimmer folder with random weights, made by transformers itself."""

from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 16},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
VISION: dict[str, Any] = {
    **{"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16},
    **{"pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4, "patch_size": 2, "output_dim": 64},
}


def make_folder(folder: Path, *, std: float = 0.2, head_std: float = 5.0, **changes: Any) -> Path:
    """Write the folder. By default some logits are near the cap."""
    import torch
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    torch.manual_seed(0)
    ids: dict[str, Any] = {
        "image_token_id": 60,
        "video_token_id": 61,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
    }
    config = MuseGlimmerConfig(text_config=TEXT | changes, vision_config=VISION, **ids)
    model = MuseGlimmerForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, head_std if name == "lm_head.weight" else std)
    model.save_pretrained(folder)
    return folder


def make_model(folder: Path, **keys: Any) -> Path:
    """Write a folder with the built-in tokenizer, whose weights learn."""
    from titan_rl.text.tokenizer import build

    make_folder(folder, std=0.08, head_std=0.5, **keys)
    config = (folder / "config.json").read_text()
    build(folder)
    (folder / "config.json").write_text(config)
    return folder


def transformers_model(folder: Path, *, vision: bool = True) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
