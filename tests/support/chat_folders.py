"""Tokenizer folders with a chat template: a byte-level BPE, trained on this project's documentation."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

TEMPLATES = Path(__file__).parent / "chat_templates"
DOCS = Path(__file__).parents[2] / "docs"
CONTROL = {
    "qwen3": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "hermes": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "phi3": ("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "header": ("<|eot|>", "<|endoftext|>", "<|begin|>", "<|head|>", "<|body|>"),
    "coder": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "mistral": (
        *("</s>", "<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
        *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]"),
    ),
    "open_ended": ("<|user|>", "<|observation|>", "<|endoftext|>", "<|sop|>", "<|assistant|>", "<|system|>"),
    "glm": ("<|user|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|assistant|>", "<|system|>"),
    "gemma4": (
        *("<turn|>", "<|tool_response>", "<eos>", "<bos>", "<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        *("<tool_response|>", "<|tool>", "<tool|>", "<|channel>", "<channel|>", "<|think|>"),
    ),
    "gpt_oss": (
        *("<|return|>", "<|call|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        *("<|constrain|>", "<|startoftext|>"),
    ),
}
"""The control tokens of each template, its usual end of a turn first."""
EOS = {"mistral": 1, **dict.fromkeys(("open_ended", "glm", "gemma4", "gpt_oss"), 3)}  # how many of them end a turn


@cache
def trained() -> str:
    """Return a tokenizer of 600 tokens without control tokens, as JSON."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train([str(DOCS / "design.md")], trainer)
    return tokenizer.to_str()


def chat_folder(folder: Path, name: str, template: str = "") -> Path:
    """Write a tokenizer folder with the template of that name, or with the given one and its control tokens."""
    tokenizer = Tokenizer.from_str(trained())
    tokenizer.add_special_tokens(list(CONTROL[name]))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if name == "glm":
        tokenizer.add_tokens(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in CONTROL[name][: EOS.get(name, 2)]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"header": "<|begin|>", "mistral": "<s>", "gemma4": "<bos>"}.get(name),
        "eos_token": CONTROL[name][0],
        "pad_token": "<|endoftext|>" if "<|endoftext|>" in CONTROL[name] else CONTROL[name][0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    source = template or (TEMPLATES / f"{name}.jinja").read_text()
    (folder / "chat_template.jinja").write_text(source)
    return folder
