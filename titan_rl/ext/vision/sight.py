"""Proves, when an attempt begins, that trainers and engines see the images of a prompt, and the same ones.

prompt, answer, image        ── log-probs ──┐
prompt, answer, its negative ── log-probs ──┴── differ, by the trainers and by the engines
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.ext.vision.drawn import SIDE
from titan_rl.ext.vision.image_tokens import image_text
from titan_rl.ext.vision.kept_images import write_image
from titan_rl.ext.vision.squares import MOST, drawn
from titan_rl.train.engine_proof import Continuation
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import ImagePlace, Prompt, Request, Sample, Sampling, names_of

LEAST = 1e-5  # largest change of a log-prob that a blind model may show by rounding
MOST_READ = 16  # tokens of a prompt after a drawn picture
Scores = Callable[[Sequence[Sample]], Awaitable[Sequence[np.ndarray]]]


class Sight:
    """The proof of one attempt. Engines are asked before trainers take their turn on the same devices."""

    def __init__(self, continuation: Continuation, directory: Path) -> None:
        self._first, images = continuation, continuation.images
        negatives = tuple(ImagePlace(write_negative(directory, name), begin) for name, begin in images)
        self._images = images, negatives
        self._named = [*dict.fromkeys(names_of([*images, *negatives]))]
        self._pixels: list[list[str]] = []
        self._by_engines = 0.0

    async def ask_engines(self, generators: Any) -> None:
        if self._named:
            self._pixels = await generators.pixel_sums(self._named)
            asked = (_scored(generators, self._first.sample, images) for images in self._images)
            self._by_engines = changes(await asyncio.gather(*asked), self._first)

    async def proven(self, trainers: Any, scores: Scores) -> str:
        """Return a note about the proof, or raise RunError. Without images there is nothing to prove."""
        if not self._named:
            return "the first prompt has no image: nothing proves that the model sees"
        found = {tuple(each) for each in [*self._pixels, *await trainers.pixel_sums(self._named)]}
        if len(found) > 1:
            raise RunError(
                "generators and trainers see different pixels of one image",
                f"Expected equal hashes of {' and '.join(self._named)} on every rank, found {len(found)} kinds. Their "
                "processors, or Pillow, differ. Nothing was trained.",
            )
        samples = [replace(self._first.sample, images=images) for images in self._images]
        by_trainers = changes(await scores(samples), self._first)
        for who, change in {"trainers": by_trainers, "generators": self._by_engines}.items():
            if not change > LEAST:
                raise RunError(
                    f"the {who} are blind: the log-probs of an answer do not depend on the image",
                    f"Expected a change of more than {LEAST:g} with the negative of each image of the first prompt, "
                    f"found {change:.2g} over {len(self._first.completion.tokens)} tokens. Nothing was trained.",
                )
        return f"the model sees: another image changes a log-prob by {by_trainers:.1e}"


def changes(scores: Sequence[np.ndarray], continuation: Continuation) -> float:
    """Return the largest change of an answer's log-probs."""
    new = len(continuation.completion.tokens)
    one, other = (score[-new:] for score in scores)
    return float(np.abs(one - other).max())


async def _scored(generators: Any, sample: Sample, images: tuple[ImagePlace, ...]) -> np.ndarray:
    """Return an engine's log-probs of the tokens of a sample after some images."""
    sampling = Sampling(1, scores_context=True)
    request = Request(f"sight-{images[0].name}", [*sample.tokens], [0], sampling, images=images)
    (completion,) = await generators.generate(request)
    return np.array([score.logprob for score in completion.context])


def with_picture(prompt: Prompt, folder: Path, directory: Path) -> Prompt:
    """Return the beginning of a prompt after a drawn picture. `folder`: the model's."""
    directory.mkdir(parents=True, exist_ok=True)
    name = write_image(directory, drawn(MOST, random.Random(0)))
    size = SIDE, SIDE
    tokens = image_text(folder, [size]).tokens[size]
    return replace(prompt, tokens=[*tokens, *prompt.tokens[:MOST_READ]], images=(ImagePlace(name, 0),))


def write_negative(directory: Path, name: str) -> str:
    """Write an image with the opposite colors, of the same size, and return its name."""
    from PIL import Image, ImageOps

    written = BytesIO()
    with Image.open(directory / name) as image:
        ImageOps.invert(ImageOps.exif_transpose(image).convert("RGB")).save(written, "PNG")
    return write_image(directory, written.getvalue())
