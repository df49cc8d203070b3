"""Endless problems of the package reasoning-gym: task.name = "reasoning_gym".

    [task.datasets.NAME] -> ProceduralSet -> Problems: problem k is a pure function of the seed and k

A data set of reasoning-gym draws problem k from its own seed plus k. Training and held-out problems have seeds so far
apart that they never share one; problems that are held out by their text too are passed over in training.
"""

import json
import math
import resource
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from titan_rl.config.sections import TaskSection
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.tasks.examples import EndlessExamples, Example
from titan_rl.wire.seeds import derive

NAME = "reasoning_gym"
NEEDS = "needs the package reasoning-gym: pip install 'titan-rl[reasoning]'"
ENDLESS = 2**30
"""Problems of one seed: more than a run draws. Training and held-out seeds together stay below 2^31."""
RESERVED = ("seed", "size", "weight")
"""Settings that every data set of the package has, and that this project derives; and the key of this project."""
TRIED = 8
"""Problems of each data set that the checks generate."""
CPU_SECONDS, MEMORY_BYTES = 20, 2**31
"""Bounds on these problems."""


@dataclass(frozen=True, slots=True)
class ProceduralSet:
    """One table [task.datasets.NAME]."""

    name: str
    weight: float
    settings: Mapping[str, Any]

    def generator(self, seed: int) -> Any:
        """Return reasoning-gym's data set of these settings, whose problem k is drawn from `seed` + k."""
        return _generator(self.name, json.dumps(self.settings, sort_keys=True), seed)


class Problems(EndlessExamples):
    """Endless problems of several data sets, mixed by their weights. Nothing is kept: each is generated when asked."""

    def __init__(self, sets: Sequence[ProceduralSet], seed: int, *, heldout: bool = False) -> None:
        self._sets, self._seed = sets, seed
        self._first = derive(seed, NAME) % ENDLESS + ENDLESS * heldout
        self._shares = np.cumsum([each.weight for each in sets]) / sum(each.weight for each in sets)

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(ENDLESS))]
        draw = derive(self._seed, "data set", self._first, index) / 2**63
        chosen = self._sets[int(np.searchsorted(self._shares, draw, side="right"))]
        return problem(chosen, self._first, index)

    def unfit(self, heldout: Sequence[Example], fits: Callable[[Example], bool]) -> "Unfit":
        return Unfit(self, heldout, fits)


class Unfit(Collection[int]):
    """Indices of training problems that are passed over: too long, or held out. They are found when asked for."""

    def __init__(self, train: Problems, heldout: Sequence[Example], fits: Callable[[Example], bool]) -> None:
        self._train, self._fits = train, fits
        self._heldout = {str(example.prompt) for example in heldout}

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        example = self._train[index]
        return str(example.prompt) in self._heldout or not self._fits(example)

    def __iter__(self) -> Iterator[int]:
        return iter(())  # unknown: there are endlessly many problems

    def __len__(self) -> int:
        return 0


@lru_cache(maxsize=256)
def _problem(name: str, settings: str, first_seed: int, index: int) -> Example:
    entry = _generator(name, settings, first_seed)[index]
    row = {"dataset": name, "entry": entry}
    return Example(str(entry["question"]), str(entry["answer"]), row, where=f"{name}:{index}")


def problem(chosen: ProceduralSet, first_seed: int, index: int) -> Example:
    """Return problem `index` of a data set."""
    return _problem(chosen.name, json.dumps(chosen.settings, sort_keys=True), first_seed, index)


@lru_cache(maxsize=64)
def _generator(name: str, settings: str, seed: int) -> Any:
    return package().create_dataset(name, seed=seed, size=ENDLESS, **json.loads(settings))


def package() -> Any:
    """Import reasoning-gym, or raise a ValueError with what to install."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # from cellpylib, when Python first compiles it
            import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f'"{NAME}" {NEEDS} ({error})') from error
    return reasoning_gym


def procedural_sets(task: TaskSection) -> list[ProceduralSet]:
    """Return the data sets of checked tables."""
    tables: dict[str, dict[str, Any]] = {name: dict(table) for name, table in task.datasets.items()}
    return [ProceduralSet(name, float(table.pop("weight", 1.0)), table) for name, table in tables.items()]


def procedural(task: TaskSection, seed: int, eval_size: int) -> tuple[Problems, list[Example]]:
    """Return endless training problems, and `eval_size` held-out ones."""
    sets = procedural_sets(task)
    return Problems(sets, seed), Problems(sets, seed, heldout=True)[:eval_size]


def set_problems(task: TaskSection) -> Iterator[str]:
    """Yield the problems of the tables [task.datasets.NAME]."""
    try:
        known_sets = package().factory.DATASETS
    except ValueError as error:
        yield f"task.name: {error}"
        return
    if not task.datasets:
        yield f'task.datasets: expected a table [task.datasets.NAME] with task.name = "{NAME}", found none'
    for name, table in task.datasets.items():
        key = f"task.datasets.{name}"
        if name not in known_sets:
            yield f"{key}: reasoning-gym has no data set {as_toml(name)}{did_you_mean(name, known_sets)}"
            continue
        weight = table.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
            yield f"{key}.weight: expected a number above 0, at most 1e6, found {as_toml(weight)}"
        known = [each.name for each in fields(known_sets[name][1]) if each.name not in RESERVED]
        unknown = [setting for setting in table if setting not in known and setting != "weight"]
        for setting in unknown:
            yield f"{key}: there is no key {as_toml(setting)}{did_you_mean(setting, known)}; it has {', '.join(known)}"


def try_sets(sets: Sequence[ProceduralSet], write: Callable[[str], None]) -> None:
    """Write a line when the package is imported, and why each set cannot generate problems, or "", as a process whose
    time and memory are bounded."""
    package()
    write("")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.RLIM_INFINITY))
    for each in sets:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        write(_unusable(f"task.datasets.{each.name}", each))


def _unusable(key: str, chosen: ProceduralSet) -> str:
    """Return why reasoning-gym cannot generate problems with these settings, or ""."""
    try:
        entries = [chosen.generator(0)[index] for index in range(TRIED)]
    except Exception as error:  # the package checks its settings by assertions, and generates with any of them
        found = f"more than {MEMORY_BYTES >> 30} GiB" if isinstance(error, MemoryError) else str(error)
        return f"{key}: expected settings that reasoning-gym accepts, found {type(error).__name__}: {found}"
    lacking = any(entry["answer"] is None for entry in entries)
    return f"{key}: expected a data set whose problems have an answer, found one without" if lacking else ""
