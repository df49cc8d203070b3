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
        raise ValueError(f"model.hf_assets_path: expected {expected}, found {wrong or answer.ended} in {folder}")
    first, *others = answer.lines
    made = dict(zip(missing, (line["tokens"] for line in others), strict=True))
    _known[str(folder)] = ImageText(first["token"], first["id"], {**before, **made})
    return _known[str(folder)]


def write_tokens(question: tuple[str, Sequence[Size]], write: Callable[..., None]) -> None:
    """Write the token of an image, and then the tokens of an image of each size, in a process of its own."""
    folder, sizes = question
    try:
        from PIL import Image
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)
        token = getattr(processor, "image_token", None)
        if not token or getattr(processor, "image_processor", None) is None:
            write({"error": f"a {type(processor).__name__}"})
            return
        write({"token": token, "id": processor.tokenizer.convert_tokens_to_ids(token)})

        def tokens(text: str, images: list[Any] | None = None) -> list[int]:
            more = {"images": images} if images else {}
            return list(processor(text=text, add_special_tokens=False, **more)["input_ids"][0])

        for size in sizes:
            blank = Image.new("RGB", size)
            alone, beside = tokens(token, [blank]), tokens(f"{BESIDE}{token}{BESIDE}", [blank])
            text = processor.tokenizer(BESIDE, add_special_tokens=False)["input_ids"]
            if beside != [*text, *alone, *text]:
                write({"error": "a tokenizer that joins an image's tokens with the text beside it"})
                return
            write({"tokens": alone})
    except Exception as error:  # a folder may have any processor
        write({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def read_prompt(
    example: Example, reader: TextTokenizer, template: Literal["plain", "chat"], system: str
) -> tuple[str | list[Message], list[int], list[int]]:
    """Return the prompt as it is rendered, its tokens with one for each image, and its tokens as the model reads them.
    Raise ValueError if there are not as many images in the text as in the row."""
    text = image_text(reader.folder, [(image.width, image.height) for image in example.images])
    prompt, count = example.prompt, len(example.images)
    if isinstance(prompt, str) and template == "plain":
        prompt = prompt if text.token in prompt else text.token * count + prompt
    elif isinstance(prompt, str):
        parts = [{"type": "image", "image": image.hash} for image in example.images]
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    tokens = reader.prompt(prompt, template, system)
    if tokens.count(text.id) != count:
        found = f"{tokens.count(text.id)} in the rendered prompt"
        raise ValueError(f"{example.where}: expected {count} {text.token}, one for each image, found {found}")
    left, expanded = iter(example.images), list[int]()
    for token in tokens:
        if token == text.id:
            image = next(left)
            expanded += text.tokens[image.width, image.height]
        else:
            expanded.append(token)
    return prompt, tokens, expanded
