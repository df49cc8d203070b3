"""Checks what the JSON objects of a run's files have."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titan_rl.record.lines import is_count, whole_lines

Check = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def fields(counts: str, lists: str = "", **others: Check) -> dict[str, Check]:
    """Return the check of each key. `counts` and `lists` are names of counts and of lists of counts."""
    return others | dict.fromkeys(counts.split(), is_count) | dict.fromkeys(lists.split(), list_of(is_count))


def invalid(
    found: Mapping[str, Any], fields: Mapping[str, Check], optional: Mapping[str, Check] = MappingProxyType({})
) -> str:
    """Return which value is not a valid one, or ""."""
    wrong = [key for key, valid in fields.items() if not valid(found.get(key, ...))]
    wrong += [key for key, valid in optional.items() if key in found and not valid(found[key])]
    return f"expected a valid {wrong[0]}, found {str(found.get(wrong[0], 'none'))[:80]}" if wrong else ""


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it has none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def objects(path: Path, expected: Mapping[str, Check]) -> Iterator[tuple[str, bytes, dict[str, Any] | str]]:
    """Yield each whole line's place, its bytes, and its object, or the problem with it."""
    for number, line in enumerate(whole_lines(path), 1):
        at, found = f"{path.name}, line {number}", parsed(line)
        if found is None:
            yield at, line, f"{at}: expected a JSON object, found {line[:80].rstrip()!r}"
        elif wrong := invalid(found, expected):
            yield at, line, f"{at}: {wrong}"
        else:
            yield at, line, found


def valid_objects(path: Path, expected: Mapping[str, Check]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines that are as expected."""
    for _, _, found in objects(path, expected):
        if isinstance(found, dict):
            yield found
