#!/usr/bin/env python3
"""Write the model folders and the rows of a visit: random weights in real shapes, which never end an answer early.

    python scripts/gpu_visit/model_folder.py SHAPE FOLDER      # smollm2, qwen3-0.6b or tiny
    python scripts/gpu_visit/model_folder.py rows FILE         # {"question", "answer"}, a line each

The tokenizer is a byte-level BPE of this project's documentation, with a chat template.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SHAPES = {
    "smollm2": (576, 1536, 30, 9, 3, 64),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128),
    "tiny": (64, 96, 2, 4, 2, 32),
}
VOCABULARIES = {"smollm2": 49152, "qwen3-0.6b": 151936, "tiny": 1024}
ROWS = 512


def write_rows(file: Path) -> None:
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(ROWS):
            a, b = draw.randrange(100), draw.randrange(100)
            out.write(json.dumps({"question": f"Calculate {a} + {b}.", "answer": str(a + b)}) + "\n")


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """Write a tokenizer; return the ids that config.json names."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(vocab_size=900, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train([str(ROOT / "docs/design.md")], trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad, begin = CONTROL
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(("eos", "pad", "bos"), CONTROL, strict=True)}
    return {f"{name}_token_id": id for name, id in ids.items()}


def write_model(shape: str, folder: Path) -> None:
    torch.manual_seed(0)
    facts = write_tokenizer(folder)
    keys: dict[str, Any] = dict(zip(KEYS, SHAPES[shape], strict=True))
    keys |= facts | {"vocab_size": VOCABULARIES[shape], "tie_word_embeddings": True, "max_position_embeddings": 8192}
    llama = shape == "smollm2"
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**keys)) if llama else Qwen3ForCausalLM(Qwen3Config(**keys))
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SHAPES, "rows"])
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    if a.what == "rows":
        return write_rows(a.out)
    a.out.mkdir(parents=True, exist_ok=True)
    write_model(a.what, a.out)


if __name__ == "__main__":
    main()
