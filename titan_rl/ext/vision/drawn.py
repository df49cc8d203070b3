"""Tasks whose images are drawn from the seed: rows with an image and the answer that it shows."""

import random
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 56  # pixels on each side of an image
DARKEST = 128  # least part of a color; the background is black
TRAINING = 2_000  # rows

Rows = list[dict[str, Any]]
Draw = Callable[[random.Random], tuple[str, bytes]]
"""Draws an image, and returns the answer and the file."""


def drawn_rows(question: str, draw: Draw, seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    chance, rows = random.Random(seed), Rows()
    for _ in range(TRAINING + eval_size):
        answer, image = draw(chance)
        rows.append({"question": question, "answer": answer, "image": image})
    return rows[eval_size:], rows[:eval_size]


def with_others_images(parts: tuple[Rows, Rows], seed: int) -> tuple[Rows, Rows]:
    """Return the rows with the images of other rows. Then nothing about an answer can be seen."""
    for rows in parts:
        images = [row["image"] for row in rows]
        random.Random(seed).shuffle(images)
        for row, image in zip(rows, images, strict=True):
            row["image"] = image
    return parts


def bright(chance: random.Random) -> tuple[int, ...]:
    """Return a color."""
    return tuple(chance.randint(DARKEST, 255) for _ in range(3))


def as_png(image: "Image") -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
