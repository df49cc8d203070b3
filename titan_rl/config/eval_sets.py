"""The tables [eval.sets.NAME]: evaluation sets besides the held-out problems."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from titan_rl.config.choices import bounds
from titan_rl.config.named_tables import as_declared, table_problems
from titan_rl.config.toml import Key, as_toml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
HELD_OUT = "heldout"
"""The name of the run's held-out problems where a set is chosen by name: greedy, one answer each."""
COLDEST = 0.01
"""vLLM samples at 0.01 below it."""
RESERVED = ("score", "failed", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One evaluation set. Its table has the same name."""

    name: str
    path: str = ""  # as task.eval_path, with the columns of [task]; empty: the run's held-out problems
    size: int = bounds(0, ge=0, le=10**6)  # the first problems of it; 0: all
    samples: int = bounds(1, ge=1, le=2**12)  # answers per problem
    temperature: float = bounds(0.0, ge=0, le=2)  # 0: greedy
    reward: str = ""  # as task.eval_reward; empty: the same as the held-out problems
    correct_at: float = bounds(1.0, ge=-1e6, le=1e6)  # lowest reward of an answer that pass@k counts as correct


def keys() -> dict[str, Key]:
    """Return the keys of a set's table."""
    types = get_type_hints(EvalSet)
    found = {f.name: Key(type=types[f.name], default=f.default, doc="", **f.metadata) for f in fields(EvalSet)}
    del found["name"]
    return found


def eval_sets(tables: Mapping[str, Mapping[str, Any]]) -> list[EvalSet]:
    """Return the sets of checked tables, in their order."""
    return [EvalSet(name=name, **as_declared(table, keys())) for name, table in tables.items()]


def problems_of(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the problems of the tables by themselves."""
    for name, table in tables.items():
        label = f"eval.sets.{name}"
        if not NAME.fullmatch(name) or name in RESERVED:
            expected = f"a name of letters, digits, '_', '-' and '.', other than {', '.join(RESERVED)}"
            yield f"eval.sets: expected {expected}, found {as_toml(name)}"
        yield from (found := list(table_problems(label, table, keys())))
        samples, hot = table.get("samples", 1), table.get("temperature", 0)
        if not found and samples > 1 and hot == 0:
            why = f"because samples = {samples} greedy answers would be the same"
            yield f"{label}.temperature: expected a number > 0, {why}, found 0"
        elif not found and 0 < hot < COLDEST:
            yield f"{label}.temperature: expected 0 or a value in [{COLDEST:g}, 2], found {hot:g}"
