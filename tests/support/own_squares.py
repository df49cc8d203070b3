"""A user's task: squares, whose digits are written in reverse."""

import random
from typing import Any

Rows = list[dict[str, Any]]


def squares(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    numbers = random.Random(seed).sample(range(100), 100)
    rows = [{"question": f"{n:02d}*{n:02d}=", "answer": f"{n * n:04d}"[::-1]} for n in numbers]
    return rows[eval_size:], rows[:eval_size]
