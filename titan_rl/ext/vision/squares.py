"""A task for models that read images: how many squares are there? The images are drawn from the seed.

    task.name = "titan_rl.ext.vision.squares:counted"

`shuffled` has the same images in another order, so that they have nothing to do with the answers: whoever learns from
it beyond guessing reads something else.
"""

import random
from io import BytesIO
from typing import Any

SIDE, CELLS = 56, 4
"""Pixels and cells on each side of an image. A cell has one square, or none."""
LEAST, MOST = 1, 6  # squares
TRAINING = 2_000

Rows = list[dict[str, Any]]


def counted(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    chance = random.Random(seed)
    counts = [chance.randint(LEAST, MOST) for _ in range(TRAINING + eval_size)]
    rows = [{"question": "squares?", "answer": str(count), "image": drawn(count, chance)} for count in counts]
    return rows[eval_size:], rows[:eval_size]


def shuffled(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return the rows with the images of other rows."""
    train, heldout = counted(seed, eval_size)
    for rows in (train, heldout):
        images = [row["image"] for row in rows]
        random.Random(seed).shuffle(images)
        for row, image in zip(rows, images, strict=True):
            row["image"] = image
    return train, heldout


def drawn(count: int, chance: random.Random) -> bytes:
    """Return an image with this many squares, as PNG."""
    from PIL import Image, ImageDraw

    image, cell = Image.new("RGB", (SIDE, SIDE)), SIDE // CELLS
    draw = ImageDraw.Draw(image)
    for place in chance.sample(range(CELLS**2), count):
        side = chance.randint(8, cell - 2)
        left, top = (cell * at + chance.randint(1, cell - side - 1) for at in (place % CELLS, place // CELLS))
        color = tuple(chance.randint(128, 255) for _ in range(3))
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=color)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
