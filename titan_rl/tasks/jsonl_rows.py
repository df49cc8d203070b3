"""Reads a task's JSONL file: every row becomes an Example, or a problem that names its file and line."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from titan_rl.config import sections as config
from titan_rl.tasks.announced import announced
from titan_rl.text.template import Message

MOST_NAMED = 20
"""Bad rows of a file that are named; the others are counted."""


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


class BadRows(ValueError):
    """What is wrong with the rows of a file, one line per row."""

    def __init__(self, problems: list[str], path: Path | str) -> None:
        self.problems = named(problems, path)
        super().__init__("\n".join(self.problems))


def named(problems: list[str], path: Path | str) -> list[str]:
    """Return the first problems, and a line that counts the others."""
    more = len(problems) - MOST_NAMED
    return [*problems[:MOST_NAMED], *([f"{path}: {more} more bad rows"] if more > 0 else [])]


def jsonl(
    task: config.TaskSection, key: Literal["path", "eval_path"], limit: int | None = None, *, pairs: bool = False
) -> list[Example]:
    """Read the first `limit` examples of the file at `task.<key>`, skipping blank lines. BadRows names all bad ones."""
    name = getattr(task, key)
    path = Path(name)
    try:
        found = "none" if not (name and path.exists()) else "a folder" if path.is_dir() else "no regular file"
        state = path.stat() if path.is_file() else None
    except (OSError, ValueError) as error:  # a name too long, a loop of links, NUL
        found, state = str(error), None
    if state is None:
        without = "" if key == "path" else "; eval.size = 0 disables evaluation"
        raise FileNotFoundError(f"task.{key}: expected a JSONL file, found {found} at {name!r}{without}")
    return _examples(task, key, limit, pairs, (state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=2)  # the checks read the same files as the run
def _examples(
    task: config.TaskSection, key: Literal["path", "eval_path"], limit: int | None, pairs: bool, state: tuple[int, ...]
) -> list[Example]:
    path = Path(getattr(task, key))
    examples: list[Example] = []
    problems: list[str] = []
    try:
        for where, line in announced(islice(_lines(path), limit), f"reading task.{key}"):
            try:
                examples.append(_example(line, where, task, pairs))
            except ValueError as error:
                problems.append(str(error))
    except OSError as error:
        raise OSError(f"task.{key}: expected a file that can be read, found {error}") from error
    if problems:
        raise BadRows(problems, path)
    if not examples:
        raise ValueError(f"task.{key}: expected at least one row in {path}, found none")
    return examples


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line


def _example(line: str, where: str, task: config.TaskSection, pairs: bool) -> Example:
    row = _row(line, where)
    keys = ("prompt_key", "chosen_key", "rejected_key") if pairs else ("prompt_key", "answer_key")
    for key in keys:
        if getattr(task, key) not in row:
            columns = _short(sorted(row))
            raise ValueError(f"{where}: expected task.{key} = {getattr(task, key)!r}, found the columns {columns}")
    prompt, answer, *rejected = (row[getattr(task, key)] for key in keys)
    if not isinstance(prompt, str):
        if not _is_chat(prompt):
            expected = f"a string or a list of chat messages in {task.prompt_key!r}"
            raise ValueError(f"{where}: expected {expected}, found {_short(prompt)}")
        for number, message in enumerate(prompt, 1):
            _check_message(message, f"{where}: message {number} of {task.prompt_key!r}")
    for key, text in zip(keys[1:], (answer, *rejected), strict=True):
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise ValueError(f"{where}: expected a string or a number in {getattr(task, key)!r}, found {_short(text)}")
        if isinstance(text, float) and not math.isfinite(text):
            raise ValueError(f"{where}: expected a finite number in {getattr(task, key)!r}, found {text}")
    return Example(prompt, str(answer), row, *map(str, rejected), where=where)


def _row(line: str, where: str) -> dict[str, Any]:
    """Return a line's JSON object. The ValueError says why it is none, or cannot be text."""
    if line.startswith("\ufeff"):
        raise ValueError(f"{where}: expected UTF-8 without a byte order mark, found one")
    try:
        line.encode()
    except UnicodeEncodeError as error:
        byte = ord(line[error.start]) - 0xDC00
        place = f"byte 0x{byte:02x} after {error.start} characters"
        raise ValueError(f"{where}: expected UTF-8, found {place}") from error
    try:
        row = json.loads(line, object_pairs_hook=_once)
        if "\\u" in line:  # an escape may stand for half of a character
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"a lone surrogate, U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{where}: expected text that UTF-8 can encode, found {half}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: expected a JSON object, found one that is nested too deeply") from error
    except ValueError as error:  # also an integer of too many digits
        raise ValueError(f"{where}: expected a JSON object, found {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the column {twice!r} twice")
    return found


def _is_chat(value: Any) -> bool:
    """Return True for a non-empty list of {"role": ..., "content": ...}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def _check_message(message: Message, what: str) -> None:
    role, content = message["role"], message["content"]
    if not isinstance(role, str):
        raise ValueError(f"{what}: expected a string as role, found {_short(role)}")
    calls = content is None and message.get("tool_calls")
    if not (isinstance(content, str | list) or calls):
        raise ValueError(f"{what}: expected a string as content, found {_short(content)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
