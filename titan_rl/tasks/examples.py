"""Reads the rows of a data source: every row becomes an Example, or a problem that names its file and line.

DataSource -> row_files -> jsonl_rows, ext/parquet -> row_formats -> SourceRows of Examples
"""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.data_sources import DataSource
from titan_rl.tasks.announced import announced
from titan_rl.tasks.jsonl_rows import jsonl_rows
from titan_rl.tasks.row_files import FileState, row_files
from titan_rl.tasks.row_formats import ABSENT, RowKeys, cell, keys_of
from titan_rl.text.template import Message
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Demonstration, ImagePlace

GYM = "reasoning_gym"
MOST_NAMED = 20
"""Bad rows of a source that are named; the others are counted."""


class RowImage(NamedTuple):
    """An image of a row."""

    hash: str  # SHA-256 of its file
    width: int
    height: int
    nbytes: int
    source: Path | bytes  # its file, or the bytes of one


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
    source: str = ""  # name in [task.sources]
    demonstration: Demonstration = ()
    images: tuple[RowImage, ...] = ()  # in the order in which the prompt reads them


class PromptTokens(NamedTuple):
    """A prompt as the policy reads it."""

    prompt: str | list[Message]  # as it is rendered
    short: list[int]  # with one token for each image
    expanded: list[int]  # with a placeholder for each feature of an image
    images: tuple[ImagePlace, ...] = ()  # in `expanded`


class EndlessExamples(Sequence[Example]):
    """Training problems that are generated when they are asked for."""

    @abstractmethod
    def unfit(self, heldout: Sequence[Example], fits: Callable[[Example], bool]) -> Collection[int]:
        """Return the indices that are passed over, which are found when they are asked for."""


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row of a file, and the row."""
    if path.suffix == ".parquet":
        return needed_part("Parquet files", "task.path")(path)
    return jsonl_rows(path)


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a source that can be used."""

    examples: list[Example]
    recognized: str = ""  # whose rows they are, if the configured columns are not there
    bad: int = 0  # rows that task.bad_rows left out
    problems: tuple[str, ...] = ()  # with the first bad rows

    def notes(self, path_key: str) -> Iterator[str]:
        """Yield notes for the user about the rows."""
        if self.recognized:
            yield f"{path_key}: {self.recognized}"
        if self.bad:
            total = self.bad + len(self.examples)
            yield f"task.bad_rows: {self.bad} of {total} rows of {path_key} are left out; {self.problems[0]}"


class BadRows(ValueError):
    """Names the bad rows of a source, one line per row."""

    def __init__(self, problems: list[str], path: str) -> None:
        self.problems = named(problems, path)
        super().__init__("\n".join(self.problems))


def named(problems: list[str], path: str) -> list[str]:
    """Return the first problems, and a line that counts the others."""
    more = len(problems) - MOST_NAMED
    return [*problems[:MOST_NAMED], *([f"{path}: {more} more bad rows"] if more > 0 else [])]


def read_source(source: DataSource, limit: int | None = None, *, pairs: bool = False) -> SourceRows:
    """Read the first `limit` rows of a source. BadRows names all bad ones, unless these are skipped."""
    return _read_files(source, row_files(source.path, source.path_key), limit, pairs)


@lru_cache(maxsize=32)  # the checks read the same files as the run
def _read_files(source: DataSource, files: tuple[FileState, ...], limit: int | None, pairs: bool) -> SourceRows:
    rows = chain.from_iterable(rows_of(file.path) for file in files)
    return read_rows(source, islice(rows, limit), pairs=pairs)


def read_rows(source: DataSource, rows: Iterable[tuple[str, Any]], *, pairs: bool = False) -> SourceRows:
    """Read rows, each with its place, as a source configures. BadRows names all bad ones, unless these are skipped."""
    key, keys = source.path_key, None
    examples: list[Example] = []
    problems: list[str] = []
    try:
        for where, row in announced(rows, f"reading {key}"):
            if isinstance(row, ValueError):
                problems.append(str(row))
                continue
            keys = keys or keys_of(source, row, pairs=pairs)
            try:
                examples.append(_example(row, where, source, keys))
            except ValueError as error:
                problems.append(f"{where}: {error}")
    except OSError as error:
        raise OSError(f"{key}: expected a file that can be read, found {error}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if problems and not (source.skip_bad_rows and examples):
        alike = {problem.partition(": ")[2].partition(", found ")[0] for problem in problems}
        if not examples and len(alike) == 1 < len(problems):
            problems = [f"{problems[0]}, in all {len(problems)} rows alike"]  # a key, not a row, is wrong
        raise BadRows(problems, source.path)
    if not examples:
        raise ValueError(f"{key}: expected at least one row in {source.path}, found none")
    return SourceRows(examples, keys.recognized if keys else "", len(problems), tuple(problems[:MOST_NAMED]))


def _example(row: dict[str, Any], where: str, source: DataSource, keys: RowKeys) -> Example:
    for name, column in zip(keys.names, keys.columns, strict=True):
        if cell(row, column) is ABSENT:
            columns = _short(sorted(row))
            raise ValueError(f"expected {source.section}.{name} = {column!r}, found the columns {columns}")
    prompt, *answers = (cell(row, column) for column in keys.columns)
    if not isinstance(prompt, str):
        if not _is_chat(prompt):
            expected = f"a string or a list of chat messages in {keys.columns[0]!r}"
            raise ValueError(f"expected {expected}, found {_short(prompt)}")
        for number, message in enumerate(prompt, 1):
            _check_message(message, f"message {number} of {keys.columns[0]!r}")
    images: tuple[RowImage, ...] = ()
    if source.images_key or _shows_images(prompt):
        read_images = needed_part("images of rows", f"{source.section}.images_key")
        row, prompt, images = read_images(row, prompt, keys.columns[0], source.images_key, where)
    answer, *rejected = (_answer_text(value, column) for value, column in zip(answers, keys.columns[1:], strict=True))
    demonstration = _demonstration(row, source.demonstration_key) if source.demonstration_key else ()
    example = Example(prompt, answer, row, *rejected, where=where, source=source.name, demonstration=demonstration)
    return replace(example, images=images) if images else example


def _demonstration(row: dict[str, Any], column: str) -> Demonstration:
    """Return a conversation as turns of the policy, each with the messages that it reads next."""
    messages = cell(row, column)
    if messages is ABSENT or not messages:
        return ()
    turns: list[tuple[str, list[Message]]] = []
    if not _is_chat(messages) or messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        expected = f"a list of chat messages in {column!r}, the first and the last of the assistant"
        raise ValueError(f"expected {expected}, found {_short(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message["content"], str) or message.get("tool_calls"):
            expected = f"message {number} of {column!r} to have its text, also of calls, as content"
            raise ValueError(f"expected {expected}, found {_short(message)}")
        if message["role"] != "assistant":
            turns[-1][1].append(message)
        elif turns and not turns[-1][1]:
            raise ValueError(f"expected message {number} of {column!r} not to follow another one of the assistant")
        else:
            turns.append((message["content"], []))
    return turns


def _answer_text(value: Any, column: str) -> str:
    """Return an answer as text: also of a conversation that consists of it, and of a table, as JSON."""
    if _is_chat(value) and len(value) == 1 and isinstance(value[0]["content"], str):
        return value[0]["content"]
    if isinstance(value, Mapping | list):  # a ground truth that only its own reward function reads
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a string, a number, a list or a table in {column!r}, found {_short(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number in {column!r}, found {value}")
    return str(value)


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


def _shows_images(prompt: str | list[Message]) -> bool:
    """Return True if a message has parts that are no text."""
    contents = [] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m["content"], list)]
    return any(isinstance(part, dict) and part.get("type") != "text" for content in contents for part in content)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
