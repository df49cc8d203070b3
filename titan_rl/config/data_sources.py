"""Where rows come from and how they are read: the tables [task.sources.NAME], or the file of [task] alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from titan_rl.config.algorithm_sections import TaskSection
from titan_rl.config.choices import Table, bounds
from titan_rl.config.eval_sets import NAME
from titan_rl.config.named_tables import as_declared, table_problems
from titan_rl.config.toml import Key, as_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Files whose rows are read in one way."""

    name: str = ""  # empty: the file of [task]
    path: str = ""
    weight: float = bounds(1.0, gt=0, le=1e6)
    prompt_key: str = ""
    answer_key: str = ""
    chosen_key: str = ""
    rejected_key: str = ""
    demonstration_key: str = ""
    images_key: str = ""
    system_prompt: str = ""
    chat_template: str = ""
    chat_template_kwargs: Table = field(default_factory=dict, hash=False)
    path_key: str = "task.path"  # that names the files
    skip_bad_rows: bool = False

    @property
    def section(self) -> str:
        return f"task.sources.{self.name}" if self.name else "task"


OWN = ("name", "path_key", "skip_bad_rows")
"""Fields that are no keys of a table."""


def source_of(task: TaskSection, path: str, path_key: str) -> DataSource:
    """Return files that are read with the keys of [task]."""
    return DataSource(path=path, path_key=path_key, skip_bad_rows=task.bad_rows == "drop", **_inherited(task))


def data_sources(task: TaskSection) -> list[DataSource]:
    """Return the sources of the training rows: checked tables in their order, or the file of [task]."""
    if not task.sources:
        return [source_of(task, task.path, "task.path")]
    found = []
    for name, table in task.sources.items():
        given = {**_inherited(task), **as_declared(table, source_keys())}
        own = {"name": name, "path_key": f"task.sources.{name}.path", "skip_bad_rows": task.bad_rows == "drop"}
        found.append(DataSource(**given, **own))
    return found


def source_keys() -> dict[str, Key]:
    """Return the keys of a source's table."""
    types = get_type_hints(DataSource)
    found = {f.name: Key(type=types[f.name], default=f.default, doc="", **f.metadata) for f in fields(DataSource)}
    return {name: key for name, key in found.items() if name not in OWN}


def source_problems(task: TaskSection) -> Iterator[str]:
    """Yield the problems of the tables by themselves."""
    known = source_keys()
    if task.sources and task.path:
        yield f"task.path: expected to be unset where task.sources is set, found {as_toml(task.path)}"
    for name, table in task.sources.items():
        label = f"task.sources.{name}"
        if not NAME.fullmatch(name):
            expected = "a name of letters, digits, '_', '-' and '.'"
            yield f"task.sources: expected {expected}, found {as_toml(name)}"
        yield from table_problems(label, table, known)
        if not table.get("path"):
            yield f'{label}.path: expected a JSONL or Parquet file, found ""'


def _inherited(task: TaskSection) -> dict[str, Any]:
    return {name: getattr(task, name) for name in source_keys() if name not in ("path", "weight")}
