"""Rows that a run cannot use, because they are too long or empty, or have images that it cannot read.

The optional part row_lengths measures them. Without it no row is refused before the run: the engines refuse a prompt
that does not fit, and packing a sample.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.tasks.examples import MOST_NAMED, Example
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.parts import needed_part, part

Unfit = Mapping[int, str]
"""Indices of examples, and why the run cannot use them."""


def unfit_rows(config: Config, task: Task, tokenizer: TextTokenizer) -> tuple[Unfit, Unfit]:
    """Return the unfit training examples and held-out examples. Raise BadRows with rows that cannot even be read."""
    measured = part("row lengths")
    return measured(config, task, tokenizer) if measured else ({}, {})


def image_problems(config: Config, examples: Sequence[Example], tokenizer: TextTokenizer) -> list[str]:
    """Return why the images of examples cannot be read. The processor is asked about all of them at once."""
    seen = [example for example in examples if example.images]
    return [*needed_part("checks of images", "task.images_key")(config, seen, tokenizer)] if seen else []


def fits(config: Config, task: Task, tokenizer: TextTokenizer) -> Callable[[Example], bool]:
    """Return a predicate: whether the run can train on an example."""
    measured = part("lengths of endless rows")
    return measured(config, task, tokenizer) if measured else lambda example: True


def other_unfit(examples: Sequence[Example], unfit: Unfit) -> str:
    """Return where the other unfit rows are, as far as a line can hold them."""
    others = [examples[i].where.rpartition(":") for i in sorted(unfit)[1:MOST_NAMED] if examples[i].where]
    files = {file for file, _, _ in others} | {examples[min(unfit)].where.rpartition(":")[0]}
    lines = ", ".join(line if len(files) == 1 else f"{Path(file).name}:{line}" for file, _, line in others)
    more = "" if len(unfit) <= MOST_NAMED else ", ..."
    return f" (the others: {'line ' if len(files) == 1 else ''}{lines}{more})" if lines else ""


def first_unfit(examples: Sequence[Example], unfit: Unfit) -> str:
    """Return where the first of the unfit rows is, and why it cannot be used."""
    index = min(unfit)
    return f"{examples[index].where or f'task {examples[index].prompt!r}'}: {unfit[index]}"
