"""The keys of a named table, such as [eval.sets.NAME], and their problems."""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_rl.config.toml import Key, as_float, as_toml, did_you_mean


def as_declared(table: Mapping[str, Any], known: Mapping[str, Key]) -> dict[str, Any]:
    """Return the table with integers as floats where a key takes a float."""
    floats = {name for name, key in known.items() if key.type is float}
    return {name: as_float(v) if name in floats and type(v) is int else v for name, v in table.items()}


def table_problems(label: str, table: Mapping[str, Any], known: Mapping[str, Key]) -> Iterator[str]:
    """Yield the unknown keys, and the values that a key does not accept."""
    for name, value in as_declared(table, known).items():
        if name not in known:
            yield f"{label}: there is no key {as_toml(name)}{did_you_mean(name, known)}; it has {', '.join(known)}"
        elif not known[name].accepts(value):
            yield f"{label}.{name}: expected {known[name].expected}, found {as_toml(value)}"
