"""A task for models that read images: which digit is there? The images are drawn from the seed.

    task.name = "titan_rl.ext.vision.digits:read"

A digit is made of seven segments, as on a pocket calculator, so that it is the same with every Pillow. Its place, size
and color are drawn. `shuffled` gives the images to other rows, and no model learns to answer.
"""

import random

from titan_rl.ext.vision.drawn import SIDE, Rows, as_png, bright, drawn_rows, with_others_images

SEGMENTS = {  # left, top, right and bottom, in halves of a digit's height
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}
DIGITS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
SHORTEST, LONGEST = 15, 19  # pixels of a segment
THICK = 5  # pixels
FARTHEST = 4  # pixels from the middle, in each direction


def read(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    return drawn_rows("digit?", _one, seed, eval_size)


def shuffled(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return the rows with the images of other rows."""
    return with_others_images(read(seed, eval_size), seed)


def _one(chance: random.Random) -> tuple[str, bytes]:
    digit = chance.randrange(len(DIGITS))
    return str(digit), drawn(digit, chance)


def drawn(digit: int, chance: random.Random) -> bytes:
    """Return an image of a digit, as PNG."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    length, color = chance.randint(SHORTEST, LONGEST), bright(chance)
    x = (SIDE - length - THICK) // 2 + chance.randint(-FARTHEST, FARTHEST)
    y = (SIDE - 2 * length - THICK) // 2 + chance.randint(-FARTHEST, FARTHEST)
    for name in DIGITS[digit]:
        left, top, right, bottom = (length * place for place in SEGMENTS[name])
        draw.rectangle((x + left, y + top, x + right + THICK - 1, y + bottom + THICK - 1), fill=color)
    return as_png(image)
