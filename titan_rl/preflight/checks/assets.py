"""Checks of the policy's Hugging Face folder: shape, weights, tokenizer, chat template."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.checks.weights import check_weights
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks.task import chat_settings
from titan_rl.text.template import own_template
from titan_rl.text.tokenizer import TextTokenizer, build
from titan_rl.wire.model_shape import ModelShape


def usable_shape(config: Config) -> tuple[ModelShape | None, list[str]]:
    """Return the policy's shape, or None and the reason why there is none."""
    try:
        return shape_of(config.model), []
    except ValueError as error:
        return None, [str(error)]


def check_assets(config: Config, shape: ModelShape | None) -> Iterator[str]:
    folder = Path(config.model.hf_assets_path)
    if not config.model.hf_assets_path or not os.path.isdir(folder):
        return
    if config.model.flavor:
        yield f'model.flavor: expected "", because model.hf_assets_path is set, found "{config.model.flavor}"'
    key = "model.hf_assets_path"
    if shape is None:
        yield from check_weights(folder, key)
        return  # the tokenizer needs the same config.json
    trains_head = config.algorithm.kind == "reward"  # a new one, whatever the folder has
    if shape.head == "value" and not trains_head:
        yield f"{key}: expected a language model (*ForCausalLM), found a reward model in {folder}"
    unusable = shape.head == "value" and not trains_head
    yield from check_weights(folder, key, None if unusable else shape, head=not trains_head)
    try:
        tokenizer = TextTokenizer.load(folder)
    except Exception as error:  # tokenizers raises Exception itself
        yield f"model.hf_assets_path: expected a tokenizer, found {error}"
        return
    if tokenizer.size > shape.vocab_size:
        yield (
            f"model.hf_assets_path: expected a vocab_size of at least the tokenizer's {tokenizer.size} in "
            f"{folder / 'config.json'}, found {shape.vocab_size}"
        )
    if config.task.template == "chat" and not (
        config.task.chat_template or any(own_template(folder, tokenizer.settings))
    ):
        yield f'task.template: expected "plain", because {folder} has no chat template, found "chat"'


@contextmanager
def policy_tokenizer(config: Config) -> Iterator[TextTokenizer | None]:
    """Yield the policy's tokenizer; None if it cannot be loaded, which check_assets reports."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = None
        with suppress(Exception):
            folder = Path(config.model.hf_assets_path)
            if not config.model.hf_assets_path:
                folder = Path(scratch)
                build(folder)
            tokenizer = TextTokenizer.load(folder, chat_settings(config))
        yield tokenizer
