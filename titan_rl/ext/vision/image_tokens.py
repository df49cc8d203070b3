"""Tokens of prompts with images, as the processor of the model's folder expands them.

    prompt -> chat template -> ... <image> ... -> each <image> becomes the processor's tokens for its size

An image has a placeholder for each feature that the model makes of it, and the processor's tokens around them. Their
number depends on the image's size alone. Another process asks the processor, because importing transformers takes
seconds and hundreds of megabytes.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from titan_rl.ext.vision.quiet import without_idefics3_default
from titan_rl.preflight.child import ask
from titan_rl.tasks.examples import Example, PromptTokens
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import ImagePlace

IMPORT_SECONDS = 300.0  # for a process to import transformers on a busy machine
BESIDE = "x"  # a text next to an image, whose tokens must stay the same

Size = tuple[int, int]  # width and height, in pixels
Places = tuple[ImagePlace, ...]


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
    folder, sizes = question
    try:
        processor = ImageProcessor(folder)
        write({"token": processor.token, "id": processor.id})
        for size in sizes:
            write({"tokens": processor.tokens(size)})
    except UnfitProcessor as error:
        write({"error": str(error)})
    except Exception as error:  # a folder may have any processor
        write({"error": f"{type(error).__name__}: {str(error)[:300]}"})


class UnfitProcessor(ValueError):
    """A folder's processor does not write images as prompts need them."""


class ImageProcessor:
    """The processor of a folder. It imports transformers."""

    def __init__(self, folder: str) -> None:
        from transformers import Idefics3Processor  # SmolVLM's own writes the same, but needs torchvision for videos

        with without_idefics3_default():
            self._processor: Any = Idefics3Processor.from_pretrained(folder, backend="pil", local_files_only=True)
        self.token = getattr(self._processor, "image_token", None)
        if not self.token or getattr(self._processor, "image_processor", None) is None:
            raise UnfitProcessor(f"a {type(self._processor).__name__}")
        self.id: int = self._processor.tokenizer.convert_tokens_to_ids(self.token)
        self._beside = self._processor.tokenizer(BESIDE, add_special_tokens=False)["input_ids"]

    def tokens(self, size: Size) -> list[int]:
        """Return the tokens of an image of this size. Raise UnfitProcessor if they depend on the text beside it."""
        alone = self._written(f"{self.token}", size)
        beside = self._written(f"{BESIDE}{self.token}{BESIDE}", size)
        if beside != [*self._beside, *alone, *self._beside]:
            raise UnfitProcessor("a tokenizer that joins an image's tokens with the text beside it")
        return alone

    def _written(self, text: str, size: Size) -> list[int]:
        from PIL import Image

        blank = [Image.new("RGB", size)]
        (found,) = self._processor(text=text, images=blank, add_special_tokens=False)["input_ids"]
        return list(found)


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
    names = [image.hash for image in example.images]
    tokens = [text.tokens[size] for size in sizes]
    expanded, places = expand(short, text.id, zip(names, tokens, strict=True))
    return PromptTokens(prompt, short, expanded, places)


def expand(short: Iterable[int], id: int, images: Iterable[tuple[str, list[int]]]) -> tuple[list[int], Places]:
    """Return tokens with the tokens of images in the places of `id`. `images`: the name and the tokens of each."""
    left, expanded, places = iter(images), list[int](), list[ImagePlace]()
    for token in short:
        if token == id:
            name, tokens = next(left)
            places.append(ImagePlace(name, len(expanded)))
            expanded += tokens
        else:
            expanded.append(token)
    return expanded, tuple(places)


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
