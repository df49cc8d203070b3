"""Checks of the policy's Hugging Face folder: shape, weights, tokenizer, chat template."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks.tokenizer import TextTokenizer, build
from titan_rl.wire.model_shape import ModelShape

HEADER_BYTES = 100_000_000  # the longest header that safetensors itself reads


def usable_shape(config: Config) -> tuple[ModelShape | None, list[str]]:
    """Return the policy's shape, or None and the reason why there is none."""
    try:
        return shape_of(config.model), []
    except ValueError as error:
        return None, [str(error)]


def check_assets(config: Config, shape: ModelShape | None) -> Iterator[str]:
    folder = Path(config.model.hf_assets_path)
    if not config.model.hf_assets_path or not folder.is_dir():
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
    yield from check_weights(folder, key, None if trains_head or shape.head == "value" else shape)
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
    settings = folder / "tokenizer_config.json"
    templated = settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    if config.task.template == "chat" and not (templated or (folder / "chat_template.jinja").is_file()):
        yield f'task.template: expected "plain", because {folder} has no chat template, found "chat"'


def check_weights(folder: Path, key: str, shape: ModelShape | None = None) -> Iterator[str]:
    """Check that the safetensors files exist, and have the output head of a `shape` that is read with its head. Other
    tensors are not looked for."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            tensors = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            files = set(tensors.values())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            yield f"{key}: expected a weight_map in {index}, found {error!r}"
            return
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            yield f"{key}: expected every file listed in {index}, found no {', '.join(missing)}"
            return
        names = set(tensors)
    else:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            yield f"{key}: expected *.safetensors in {folder}, found none"
            return
        names = set().union(*map(_tensors, paths))
    head = shape and shape.hf_head_weight
    if head and names and head not in names:
        why = "because tie_word_embeddings is false" if shape and shape.head == "lm" else "the head of a reward model"
        yield f"{key}: expected {head} in the weights of {folder}, {why}, found none"


def _tensors(path: Path) -> set[str]:
    """Return the names in a safetensors file's header; none if it cannot be read, which loading it will tell."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(min(size, HEADER_BYTES)))) - {"__metadata__"}
    return set()


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
            tokenizer = TextTokenizer.load(folder)
        yield tokenizer
