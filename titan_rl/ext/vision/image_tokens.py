"""Tokens of prompts with images, as the processor of the model's folder expands them.

    prompt -> chat template -> ... <image> ... -> each <image> becomes the processor's tokens for its size

An image has a placeholder for each feature that the model makes of it, and the processor's tokens around them. Their
number depends on the image's size alone. Another process asks the processor, because importing transformers takes
seconds and hundreds of megabytes.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from titan_rl.preflight.child import ask
from titan_rl.tasks.examples import Example
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer

IMPORT_SECONDS = 300.0  # for a process to import transformers on a busy machine
BESIDE = "x"  # a text next to an image, whose tokens must stay the same

Size = tuple[int, int]  # width and height, in pixels


class ImageText(NamedTuple):
    """How a folder's processor writes images."""

    token: str  # that stands for an image
    id: int
    tokens: dict[Size, list[int]]


class PromptTokens(NamedTuple):
    prompt: str | list[Message]  # as it is rendered
    short: list[int]  # with one token for each image
    expanded: list[int]  # as the model reads it


_known: dict[str, ImageText] = {}  # by folder
"""A process asks about a folder's sizes once: the checks see the same rows as the run."""


def image_text(folder: Path, sizes: Iterable[Size]) -> ImageText:
    """Return how the processor of a folder writes images of these sizes. Raise ValueError if it writes none."""
    known = _known.get(str(folder))
    before = known.tokens if known else {}
    missing = [size for size in dict.fromkeys(sizes) if size not in before]
    if known and not missing:
        return known
    question = str(folder), missing
    answer = ask(f"{__name__}:write_tokens", question, seconds=IMPORT_SECONDS, lines=len(missing) + 1)
    wrong = next((line["error"] for line in answer.lines if "error" in line), "")
    if wrong or answer.failed:
        expected = "a folder whose processor reads images, for the images of rows"
        found = wrong or answer.ended
        raise ValueError(f"model.hf_assets_path: expected {expected}, found {found} in {folder}")
    first, *others = answer.lines
    tokens = dict(before)
    for size, line in zip(missing, others, strict=True):
        tokens[size] = line["tokens"]
    made = ImageText(first["token"], first["id"], tokens)
    _known[str(folder)] = made
    return made


def write_tokens(question: tuple[str, Sequence[Size]], write: Callable[..., None]) -> None:
    """Write the token of an image, and then the tokens of an image of each size. Runs in a child process."""
    try:
        _write_tokens(*question, write)
    except Exception as error:  # a folder may have any processor
        write({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def _write_tokens(folder: str, sizes: Sequence[Size], write: Callable[..., None]) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
    token = getattr(processor, "image_token", None)
    if not token or getattr(processor, "image_processor", None) is None:
        write({"error": f"a {type(processor).__name__}"})
        return
    write({"token": token, "id": processor.tokenizer.convert_tokens_to_ids(token)})
    text = processor.tokenizer(BESIDE, add_special_tokens=False)["input_ids"]
    for size in sizes:
        blank = [Image.new("RGB", size)]
        written = processor(text=token, images=blank, add_special_tokens=False)
        (alone,) = written["input_ids"]
        written = processor(text=f"{BESIDE}{token}{BESIDE}", images=blank, add_special_tokens=False)
        (beside,) = written["input_ids"]
        if list(beside) != [*text, *alone, *text]:
            write({"error": "a tokenizer that joins an image's tokens with the text beside it"})
            return
        write({"tokens": list(alone)})


def read_prompt(
    example: Example,
    reader: TextTokenizer,
    template: Literal["plain", "chat"],
    system: str,
) -> PromptTokens:
    """Return the tokens of a prompt with images. Raise ValueError if its text and its row differ in their number."""
    sizes = [(image.width, image.height) for image in example.images]
    text = image_text(reader.folder, sizes)
    prompt = _with_images(example, text.token, template)
    short = reader.prompt(prompt, template, system)
    found = short.count(text.id)
    if found != len(sizes):
        expected = f"{len(sizes)} {text.token}, one for each image"
        raise ValueError(f"{example.where}: expected {expected}, found {found} in the rendered prompt")
    left, expanded = iter(sizes), list[int]()
    for token in short:
        if token == text.id:
            expanded += text.tokens[next(left)]
        else:
            expanded.append(token)
    return PromptTokens(prompt, short, expanded)


def _with_images(example: Example, token: str, template: str) -> str | list[Message]:
    """Return the prompt, after the images of its row if it is a text that names none."""
    prompt = example.prompt
    if not isinstance(prompt, str):
        return prompt
    if template == "plain":
        return prompt if token in prompt else token * len(example.images) + prompt
    parts: list[Any] = [{"type": "image", "image": image.hash} for image in example.images]
    parts.append({"type": "text", "text": prompt})
    return [{"role": "user", "content": parts}]
