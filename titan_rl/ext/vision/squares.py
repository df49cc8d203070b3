"""A task for models that read images: how many squares are there? The images are drawn from the seed.

    task.name = "titan_rl.ext.vision.squares:counted"

`shuffled` gives the images to other rows, and no model learns to answer.
"""

import random

from titan_rl.ext.vision.drawn import SIDE, Rows, as_png, bright, drawn_rows, with_others_images

CELLS = 4  # on each side; a cell has one square, or none
CELL = SIDE // CELLS
LEAST, MOST = 1, 6  # squares
SMALLEST = 8  # pixels on each side of a square


def counted(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    return drawn_rows("squares?", _some, seed, eval_size)


def shuffled(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return the rows with the images of other rows."""
    return with_others_images(counted(seed, eval_size), seed)


def _some(chance: random.Random) -> tuple[str, bytes]:
    count = chance.randint(LEAST, MOST)
    return str(count), drawn(count, chance)


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
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=bright(chance))
    return as_png(image)
