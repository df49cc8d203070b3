"""A game of several turns for models that read images: in which quarter of the picture is the square?

    picture, "where?"  ->  3  ->  picture, "where?"  ->  1  ->  "same?"  ->  1

After "same?" the square is where it was, and no picture shows it: the policy has to remember. The first picture is the
row's, the others are the environment's.

    task.name = "titan_rl.ext.vision.find_square:rows", environment.name = "titan_rl.ext.vision.find_square:FindSquare"
"""

import random
from collections.abc import Mapping
from typing import Any

from titan_rl.ext.vision.drawn import SIDE, TRAINING, Rows, as_png, bright
from titan_rl.ext.vision.squares import SMALLEST

TURNS = 3
SHOWN = 2 / 3  # how often a later turn has a picture
HALF = SIDE // 2
LARGEST = 20  # pixels on each side of a square


def rows(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    """Return rows to train on and to evaluate on."""
    chance, found = random.Random(seed), Rows()
    for _ in range(TRAINING + eval_size):
        quarter = chance.randint(1, 4)
        image = drawn(quarter, chance)
        found.append({"question": "where?", "answer": str(quarter), "image": image, "seed": chance.getrandbits(31)})
    return found[eval_size:], found[:eval_size]


class FindSquare:
    """Moves the square, or not, by the row's seed: all rollouts of a group see the same."""

    def reset(self, answer: str, row: Mapping[str, Any]) -> Any:
        self._quarter, self._chance = answer, random.Random(row["seed"])
        self._turns = 0

    def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self._turns += 1
        reward = float(reply.text == self._quarter) / TURNS
        if self._turns == TURNS:
            return None, reward, True, {}
        if self._chance.random() > SHOWN:
            return "same?", reward, False, {}
        quarter = self._chance.randint(1, 4)
        self._quarter = str(quarter)
        picture = {"type": "image", "image": drawn(quarter, self._chance)}
        return [picture, {"type": "text", "text": "where?"}], reward, False, {}


def drawn(quarter: int, chance: random.Random) -> bytes:
    """Return a picture with a square in this quarter, as PNG."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE))
    row, column = divmod(quarter - 1, 2)
    side = chance.randint(SMALLEST, LARGEST)
    left = column * HALF + chance.randint(0, HALF - side)
    top = row * HALF + chance.randint(0, HALF - side)
    ImageDraw.Draw(image).rectangle((left, top, left + side - 1, top + side - 1), fill=bright(chance))
    return as_png(image)
