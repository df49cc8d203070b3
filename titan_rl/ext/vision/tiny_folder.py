"""Writes the folder of a tiny random model that reads images, with the built-in tokenizer and an image processor.

    python -m titan_rl.ext.vision.tiny_folder FOLDER [--seed 0]

The text model is a Llama, the tower is SigLIP's, and a projection leads from one to the other (Idefics 3). Images have
56 x 56 pixels and 16 placeholders each.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from titan_rl.text import tokenizer as built_in

IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
SIDE = 56  # pixels
TEXT: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": SIDE, "patch_size": 7},
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
EMBEDDED = 0.1  # size of the numbers that a token is embedded as, and an image
SCALE = 2  # patches on each side of the square that has one placeholder


def write_folder(
    folder: Path,
    *,
    seed: int = 0,
    text: Mapping[str, Any] = TEXT,
    vision: Mapping[str, Any] = VISION,
    tied: bool = False,
) -> Path:
    """Write config.json, weights, tokenizer and processor. `text` and `vision` are keys of the two models."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    write_tokenizer(folder)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    keys = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids: dict[str, Any] = {
        key: vocabulary[token] for key, token in zip(keys, built_in.SPECIAL[: len(keys)], strict=True)
    }
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **text, **ids, "tie_word_embeddings": tied}
    config = Idefics3Config(
        text_config=text,
        vision_config=dict(vision),
        scale_factor=SCALE,
        image_token_id=vocabulary[IMAGE],
        tie_word_embeddings=tied,
        **ids,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and not name.endswith("bias"):
                scale = EMBEDDED if "embed_tokens" in name or "position" in name or "connector" in name else 1.0
                inputs = 1 if "embed_tokens" in name or "position" in name else parameter[0].numel()
                parameter.normal_(0, scale * inputs**-0.5)
    model.save_pretrained(folder)
    write_processor(folder, vision["image_size"], (vision["image_size"] // vision["patch_size"] // SCALE) ** 2)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write the built-in tokenizer with the tokens of images, and a chat template that reads messages with images."""
    built_in.build(folder)
    settings = folder / "tokenizer_config.json"
    config = json.loads(settings.read_text()) | {"chat_template": CHAT_TEMPLATE}
    settings.write_text(json.dumps(config, indent=2) + "\n")
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens([IMAGE, AROUND, WHOLE, END])
    tokens.save(str(folder / "tokenizer.json"))


def write_processor(folder: Path, side: int, placeholders: int) -> None:
    """Write the processor's files: an image is resized to a square, and not split."""
    images = {
        **{"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "do_resize": True},
        **{"size": {"longest_edge": side}, "max_image_size": {"longest_edge": side}},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": placeholders}
    (folder / "preprocessor_config.json").write_text(json.dumps(images | processor, indent=2) + "\n")
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the folder of a tiny random model that reads images.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_folder(args.folder, seed=args.seed)
