"""A task for models that read images: how many squares are there? The images are drawn from the seed.

    task.name = "titan_rl.ext.vision.squares:counted"

`shuffled` gives the images to other rows. Then nothing about an answer can be seen, and no model learns to give it.
"""

import random
from io import BytesIO
from typing import Any

SIDE = 56  # pixels on each side of an image
CELLS = 4  # on each side; a cell has one square, or none
CELL = SIDE // CELLS
LEAST, MOST = 1, 6  # squares
SMALLEST = 8  # pixels on each side of a square
DARKEST = 128  # color of a square; the background is black
TRAINING = 2_000

Rows = list[dict[str, Any]]


def counted(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    chance, rows = random.Random(seed), Rows()
    for _ in range(TRAINING + eval_size):
        count = chance.randint(LEAST, MOST)
        image = drawn(count, chance)
        rows.append({"question": "squares?", "answer": str(count), "image": image})
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

    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    for place in chance.sample(range(CELLS * CELLS), count):
        row, column = divmod(place, CELLS)
        side = chance.randint(SMALLEST, CELL - 2)
        most = CELL - side - 1  # squares of neighbouring cells do not touch
        left = column * CELL + chance.randint(1, most)
        top = row * CELL + chance.randint(1, most)
        color = tuple(chance.randint(DARKEST, 255) for _ in range(3))
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=color)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
