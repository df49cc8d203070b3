"""A user's task in the place of task.name: a function that returns rows to train on and rows to evaluate on.

    def squares(seed, eval_size):
        numbers = random.Random(seed).sample(range(1000), 1000)
        rows = [{"question": f"{n} * {n} =", "answer": str(n * n)} for n in numbers]
        return rows[eval_size:], rows[:eval_size]

It may name `seed`, which follows from debug.seed, and `eval_size`, which is eval.size. A row is read like the row of a
file (docs/data.md). The same seed must give the same rows, so that a resumed run continues with them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from titan_rl.config.data_sources import source_of
from titan_rl.config.sections import TaskSection
from titan_rl.tasks.examples import Example, read_rows
from titan_rl.wire.user_functions import keywords_of, load

Rows = Sequence[Mapping[str, Any]]


@lru_cache(maxsize=4)  # the checks read the same rows as the run
def own_examples(
    task: TaskSection, seed: int, eval_size: int, *, pairs: bool = False
) -> tuple[list[Example], list[Example]]:
    """Return the training and the held-out examples of a user's task. BadRows names the rows that cannot be read."""
    source, name = source_of(task, task.name, "task.name"), f"task.name = {task.name!r}"
    train, heldout = _rows(load(task.name, "task.name"), name, seed, eval_size)
    if not train or len(heldout) < eval_size:
        expected = f"at least one row to train on, and eval.size = {eval_size} to evaluate on"
        raise ValueError(f"{name}: expected {expected}, found {len(train)} and {len(heldout)}")

    def examples(rows: Rows, part: str) -> list[Example]:
        numbered = ((f"{part} row {number} of {task.name}", dict(row)) for number, row in enumerate(rows, 1))
        return read_rows(source, numbered, pairs=pairs).examples

    return examples(train, "training"), examples(heldout[:eval_size], "held-out") if eval_size else []


def check(task: Callable[..., Any], name: str) -> str:
    """Return why a user's task cannot be used, or ""."""
    try:
        _rows(task, name, seed=0, eval_size=2)
    except Exception as error:  # a user's function may raise any error
        text = str(error)
        return text if text.startswith(name) else f"{name}: {type(error).__name__}: {text}"
    return ""


def _rows(task: Callable[..., Any], name: str, seed: int, eval_size: int) -> tuple[Rows, Rows]:
    found = task(**keywords_of(task, {"seed": seed, "eval_size": eval_size}, name))
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(rows, Sequence) for rows in found):
        raise ValueError(
            f"{name}: expected two lists, rows to train on and to evaluate on, found {type(found).__name__}"
        )
    for row in (row for rows in found for row in rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{name}: expected rows as tables of columns, found {type(row).__name__}")
    return found
