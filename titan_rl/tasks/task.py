"""Tasks: training examples, held-out examples, and the template that makes an example a Prompt.

    config.TaskSection -> load_task -> Task(train, heldout) -> task.prompt -> Prompt

"addition" generates its own data; "jsonl" reads one JSON object per line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_rl.config import sections as config
from titan_rl.tasks.tokenizer import Message, TextTokenizer
from titan_rl.wire.types import Prompt


@dataclass(frozen=True, slots=True)
class Example:
    """One problem and its reference answer.

    >>> Example("12+34=", "640", {"a": 12, "b": 34})
    """

    prompt: str | list[Message]
    answer: str
    row: dict[str, Any] = field(default_factory=dict)  # the data set's own columns
    rejected: str = ""  # the rejected answer of a preference pair; `answer` is the chosen one
    where: str = ""  # file:line


@dataclass(frozen=True, slots=True)
class Task:
    """Examples to train on, examples to evaluate on, and the template of both."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    template: Literal["plain", "chat"] = "plain"
    system_prompt: str = ""
    unfit: frozenset[int] = frozenset()  # indices of training examples that are left out, because they do not fit

    def prompt(self, example: Example, id: int, tokenizer: TextTokenizer) -> Prompt:
        """Return the example as the policy reads it. For a chat, `text` is the rendered template."""
        tokens = tokenizer.prompt(example.prompt, self.template, self.system_prompt)
        text = example.prompt if self.template == "plain" else tokenizer.decode(tokens, skip_special=False)
        return Prompt(id, str(text), tokens, example.answer, example.row, example.rejected)


def load_task(task: config.TaskSection, *, seed: int, eval_size: int, pairs: bool = False) -> Task:
    """Load the task of [task], with at most `eval_size` held-out examples, and with rejected answers if `pairs`."""
    if task.name == "addition":
        train, heldout = addition(seed, eval_size)
    else:
        train = jsonl(task, "path", pairs=pairs)
        heldout = jsonl(task, "eval_path", eval_size, pairs=pairs) if eval_size else []
    return Task(train, heldout, task.template, task.system_prompt)


@lru_cache(maxsize=1)
def addition(seed: int, eval_size: int) -> tuple[list[Example], list[Example]]:
    """Return all two-digit sums, split by the seed. The answer's three digits are written least significant first, so
    that each digit depends only on digits already read and a carry already computed."""
    wrong = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))).random_raw(10_000).tolist()
    sums = [
        Example(f"{a:02d}+{b:02d}=", answer, {"a": a, "b": b}, rejected_answer(answer, wrong[100 * a + b]))
        for a in range(100)
        for b in range(100)
        for answer in [f"{a + b:03d}"[::-1]]
    ]
    if eval_size >= len(sums):
        raise ValueError(f"eval.size: expected less than addition's {len(sums)} problems, found {eval_size}")
    held = set(shuffled(len(sums), seed)[:eval_size].tolist())
    return [e for i, e in enumerate(sums) if i not in held], [sums[i] for i in sorted(held)]


def rejected_answer(answer: str, draw: int) -> str:
    """Return a wrong answer as a learner would give it: one digit off (most often), missing, or added."""
    kind, place, shift = draw % 8, draw // 8 % len(answer), draw // 64 % 9 + 1
    if kind == 0:
        return answer[:place] + answer[place + 1 :]
    if kind == 1:
        return answer[:place] + str(shift) + answer[place:]
    return answer[:place] + str((int(answer[place]) + shift) % 10) + answer[place + 1 :]


def jsonl(
    task: config.TaskSection, key: Literal["path", "eval_path"], limit: int | None = None, *, pairs: bool = False
) -> list[Example]:
    """Read the first `limit` examples of the file at `task.<key>`, skipping blank lines."""
    path = Path(getattr(task, key))
    if not path.is_file():
        without = "" if key == "path" else "; eval.size = 0 disables evaluation"
        raise FileNotFoundError(f"task.{key}: expected a JSONL file, found none at {getattr(task, key)!r}{without}")
    state = path.stat()
    return _rows(task, key, limit, pairs, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=2)  # the checks read the same files as the run
def _rows(
    task: config.TaskSection, key: Literal["path", "eval_path"], limit: int | None, pairs: bool, state: tuple[int, ...]
) -> list[Example]:
    path = Path(getattr(task, key))
    with path.open(encoding="utf-8") as file:
        lines = ((f"{path}:{number}", line) for number, line in enumerate(file, 1) if line.strip())
        examples = [_example(line, where, task, pairs) for where, line in islice(lines, limit)]
    if not examples:
        raise ValueError(f"task.{key}: expected at least one row in {path}, found none")
    return examples


def shuffled(size: int, seed: int, *stream: int) -> np.ndarray:
    """Return a permutation of 0..size-1 that depends only on (seed, stream). It sorts raw bits of PCG64, which numpy
    keeps stable across versions and machines, unlike its shuffles: a resumed run must see the same order."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))
    return np.argsort(bits.random_raw(size), kind="stable")


def _example(line: str, where: str, task: config.TaskSection, pairs: bool) -> Example:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object, found {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
    keys = ("prompt_key", "chosen_key", "rejected_key") if pairs else ("prompt_key", "answer_key")
    for key in keys:
        if getattr(task, key) not in row:
            raise ValueError(f"{where}: expected task.{key} = {getattr(task, key)!r}, found the columns {sorted(row)}")
    prompt, answer, *rejected = (row[getattr(task, key)] for key in keys)
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ValueError(
            f"{where}: expected a string or a list of chat messages in {task.prompt_key!r}, found {prompt!r}"
        )
    for key, text in zip(keys[1:], (answer, *rejected), strict=True):
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise ValueError(f"{where}: expected a string or a number in {getattr(task, key)!r}, found {text!r}")
    return Example(prompt, str(answer), row, *map(str, rejected), where=where)


def _is_chat(value: Any) -> bool:
    """Return True for a non-empty list of {"role": ..., "content": ...}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )
