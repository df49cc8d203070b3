"""Recognizes whose rows a data set has, by the columns of its first row.

A configured key that the row has is used as it is. A key that is the default and absent is replaced by the key of the
first format below whose columns the row has. Dots go into tables: "reward_model.ground_truth".
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from titan_rl.config.algorithm_sections import TaskSection
from titan_rl.config.data_sources import DataSource

ABSENT = object()
DEFAULTS = TaskSection()


class RowFormat(NamedTuple):
    """Columns that tell whose rows these are, and which of them are read."""

    of: str
    columns: tuple[str, ...]
    keys: Mapping[str, str]


def _asked(of: str, prompt: str, answer: str, *others: str) -> RowFormat:
    return RowFormat(of, (prompt, answer, *others), {"prompt_key": prompt, "answer_key": answer})


FORMATS = (
    _asked("verl", "prompt", "reward_model.ground_truth"),
    _asked("SkyRL-gym", "prompt", "reward_spec.ground_truth"),
    _asked("slime", "prompt", "label"),
    _asked("verifiers", "prompt", "answer", "info"),
    _asked("verifiers", "prompt", "answer", "task"),
    *(_asked("TRL", "prompt", answer) for answer in ("answer", "solution", "ground_truth", "completion")),
    _asked("problems", "problem", "answer"),
    _asked("problems", "problem", "solution"),
    _asked("questions", "question", "solution"),
)
PAIR_FORMATS = (RowFormat("TRL", ("prompt", "chosen", "rejected"), {"prompt_key": "prompt"}),)


class RowKeys(NamedTuple):
    """The columns that are read, in order: prompt and answer, or prompt, chosen and rejected."""

    names: tuple[str, ...]  # keys of the config
    columns: tuple[str, ...]
    format: str = ""  # that was recognized; empty: the configured columns are there

    @property
    def recognized(self) -> str:
        read = (f"{name.removesuffix('_key')} from {c!r}" for name, c in zip(self.names, self.columns, strict=True))
        return f"rows of {self.format}: {', '.join(read)}" if self.format else ""


def keys_of(source: DataSource, row: Mapping[str, Any], *, pairs: bool) -> RowKeys:
    """Return the columns to read of rows like this one."""
    names = ("prompt_key", "chosen_key", "rejected_key") if pairs else ("prompt_key", "answer_key")
    configured = {name: getattr(source, name) for name in names}
    free = {n for n, c in configured.items() if c == getattr(DEFAULTS, n) and cell(row, c) is ABSENT}
    for each in (PAIR_FORMATS if pairs else FORMATS) if free else ():
        if all(cell(row, column) is not ABSENT for column in each.columns):
            columns = (each.keys.get(name, configured[name]) if name in free else configured[name] for name in names)
            return RowKeys(names, tuple(columns), each.of)
    return RowKeys(names, tuple(configured.values()))


def cell(row: Mapping[str, Any], key: str) -> Any:
    """Return a column's value, or ABSENT. A column whose own name has dots comes first."""
    found: Any = row
    if key in row:
        return row[key]
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ABSENT
        found = found[part]
    return found
