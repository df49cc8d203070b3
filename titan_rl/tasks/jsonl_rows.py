"""Reads the rows of JSONL files: one JSON object per line, or a problem that names the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MOST_NESTED = 100
"""Levels of lists and objects in a row. pickle, by which rows reach other processes, fails at about 300."""


def jsonl_rows(path: Path) -> Iterator[tuple[str, Row | ValueError]]:
    """Yield the place of each row and the row, or the problem with it. Blank lines are skipped."""
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    yield where, _row(line, where)
                except ValueError as error:
                    yield where, error


def _row(line: str, where: str) -> Row:
    """Return a line's JSON object. Raise ValueError if it is none, or has a text that UTF-8 cannot encode."""
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
        if line.count("[") + line.count("{") > MOST_NESTED and _nested(row) > MOST_NESTED:
            raise RecursionError
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


def _nested(value: Any) -> int:
    """Return the levels of lists and objects in a value."""
    levels, inner = 0, [value]
    while inner := [each for each in inner if isinstance(each, list | dict)]:
        levels += 1
        inner = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    return levels


def _once(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the column {twice!r} twice")
    return found
