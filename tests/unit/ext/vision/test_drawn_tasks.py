"""Rows of the tasks that draw their images: the seed decides, and shuffled images show nothing of an answer."""

import random
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from titan_rl.ext.vision import digits, squares
from titan_rl.ext.vision.drawn import SIDE, TRAINING

TASKS: dict[str, tuple[Any, Any, list[str]]] = {
    "squares": (squares.counted, squares.shuffled, [str(count) for count in range(squares.LEAST, squares.MOST + 1)]),
    "digits": (digits.read, digits.shuffled, list("0123456789")),
}
HELD_OUT = 40


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_drawn_from_the_seed(name: str) -> None:
    rows, shuffled, answers = TASKS[name]
    train, heldout = rows(3, HELD_OUT)
    assert (train, heldout) == rows(3, HELD_OUT)
    assert train != rows(4, HELD_OUT)[0]
    assert (len(train), len(heldout)) == (TRAINING, HELD_OUT)
    assert sorted({row["answer"] for row in train}) == answers
    mixed, _ = shuffled(3, HELD_OUT)
    assert [row["answer"] for row in mixed] == [row["answer"] for row in train]
    assert sorted(row["image"] for row in mixed) == sorted(row["image"] for row in train)
    by_image = {row["image"]: row["answer"] for row in train}
    right = np.mean([by_image[row["image"]] == row["answer"] for row in mixed])
    assert abs(right - 1 / len(answers)) < 4 / np.sqrt(TRAINING)


@pytest.mark.parametrize("digit", range(10))
def test_a_digit_lights_its_segments_within_the_image(digit: int) -> None:
    chance = random.Random(digit)
    for _ in range(20):
        with Image.open(BytesIO(digits.drawn(digit, chance))) as image:
            lit: Any = np.asarray(image).any(2)
        rows, columns = np.flatnonzero(lit.any(1)), np.flatnonzero(lit.any(0))
        assert min(rows[0], columns[0]) > 0
        assert max(rows[-1], columns[-1]) < SIDE - 1
        length = (rows[-1] + 1 - rows[0] - digits.THICK) // 2
        x, y, half = columns[-1] + 1 - digits.THICK - length, rows[0], digits.THICK // 2
        found = ""
        for name, (left, top, right, bottom) in digits.SEGMENTS.items():
            column, row = x + (left + right) * length // 2 + half, y + (top + bottom) * length // 2 + half
            found += name if lit[row, column] else ""
        assert found == digits.DIGITS[digit]
    assert len(set(digits.DIGITS)) == len(digits.DIGITS)
