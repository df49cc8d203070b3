"""Reads a run's settings and results back from its folder. The run may be active, damaged or of another version."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.config.eval_sets import HELD_OUT
from titan_rl.config.removed_keys import REMOVED, RENAMED
from titan_rl.config.toml import CONFIG, schema
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.run_names import METRICS
from titan_rl.record.scores import ScoreEstimate, estimate
from titan_rl.record.summary import elapsed
from titan_rl.tools.inspect.run_files import RunFiles

NOT_SETTINGS = ("job.dump_folder", "job.fresh", "job.description")
"""Keys that differ between any two runs, and change no result."""
ROWS = ("task.name", "task.prompt_key", "task.answer_key")
DRAWN = ("task.path", "task.sources", "task.datasets", "debug.seed")
"""Keys that decide the held-out problems, the last ones only if no file is named for them."""
ABSENT = object()


class NoRun(Exception):
    """The folder holds no run that can be compared."""


@dataclass(frozen=True, slots=True)
class StepScore:
    """What one evaluation of a set found."""

    step: int
    seconds: float
    estimate: ScoreEstimate  # without an interval (NaN) where the run stored none
    problems: Mapping[str, float]  # mean reward by problem; empty: the run stored none


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it."""

    files: RunFiles
    settings: Mapping[str, Any]  # by "section.key", as the run resolved them, under today's names
    unreadable: str  # why the settings are missing, or ""
    lines: Sequence[Mapping[str, Any]]  # from metrics.jsonl
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """Read a run's folder. Raise NoRun if it holds none, or one without any step."""
        files = RunFiles(folder)
        if not (files / METRICS).is_file():
            raise NoRun(files.absence)
        lines = [line for line in files.metrics() if _sound(line)]
        if not any(line["kind"] in ("rl", "fit", "eval", "cold_start") for line in lines):
            raise NoRun(f"found no step in {files / METRICS}")
        settings, unreadable = {}, ""
        try:
            settings = current_names(files.tables())
        except FileNotFoundError:
            unreadable = f"it has no {CONFIG}"
        except (OSError, ValueError, RecursionError) as error:
            unreadable = f"{CONFIG}: {error}"
        return cls(files, settings, unreadable, lines, files.summary())

    @property
    def folder(self) -> Path:
        return self.files.folder

    def setting(self, key: str) -> Any:
        """Return the run's value of a key. A key that the run's version did not have counts as its default of today;
        ABSENT if this version does not have it either."""
        section, _, name = key.partition(".")
        if key in self.settings or self.unreadable:
            return self.settings.get(key, ABSENT)
        known = schema().get(section, {}).get(name)
        return known.default if known else ABSENT

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of trained steps in order, each step once."""
        return list({line["step"]: line for line in self.lines if line["kind"] in ("rl", "fit")}.values())

    @property
    def last(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def state(self) -> str:
        planned = self.setting("training.steps")
        if self.files.active:
            return f"running, step {self.last} of {planned}"
        if not isinstance(planned, int) or self.last >= planned:
            return f"finished, {self.last} {'step' if self.last == 1 else 'steps'}"
        return f"not finished, step {self.last} of {planned}"

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Seconds of all of the run's processes until the end of each step; 0 is the policy with which RL began."""
        total, found = 0.0, dict[int, float]()
        for line, seconds in elapsed(self.lines):
            total += seconds
            if line["kind"] in ("rl", "fit", "eval"):
                found[line["step"]] = total
        return found

    @property
    def seconds_in_total(self) -> float:
        return sum(seconds for _, seconds in elapsed(self.lines))

    @cached_property
    def scores(self) -> dict[str, list[StepScore]]:
        """The scores of each evaluation set in the order of steps, from RL's beginning on."""
        found: dict[str, dict[int, StepScore]] = {}
        for line in self.lines:
            if line["kind"] in ("rl", "fit", "eval"):
                for name, value in _logged_scores(line):
                    found.setdefault(name, {})[line["step"]] = StepScore(
                        line["step"], self.seconds[line["step"]], value, {}
                    )
        with suppress(OSError):
            for name, step, problems in self._evaluations():
                if step in self.seconds:  # a step that has its metrics
                    score = StepScore(step, self.seconds[step], estimate(list(problems.values())), problems)
                    found.setdefault(name, {})[step] = score
        return {name: [scores[step] for step in sorted(scores)] for name, scores in found.items()}

    def problems_of(self, name: str) -> Any:
        """Return what decides the problems of a set, to be compared with another run's; None if it is unknown."""
        if not self.settings:
            return None
        sets = self.setting("eval.sets")
        table = sets.get(name) if isinstance(sets, dict) else None
        table = table if isinstance(table, dict) else {}
        path = table.get("path") or self.setting("task.eval_path")
        keys = ROWS if path else (*ROWS, *DRAWN)
        return path, self.setting("eval.size"), table.get("size", 0), [self.setting(key) for key in keys]

    def _evaluations(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        """Yield set, step and each problem's mean reward of the evaluations that have a score. An answer without a
        reward counts as 0."""
        for line in self.files.evaluations():
            rewards: Mapping[str, Sequence[float | None]] = line["rewards"]
            scored = any(reward is not None for each in rewards.values() for reward in each)
            if line["kind"] != "cold_start" and scored:
                with suppress(ValueError, OverflowError):  # a problem without answers, a sum beyond floats
                    problems = {id: fmean(float(reward or 0.0) for reward in each) for id, each in rewards.items()}
                    yield line["set"], line["step"], problems


def current_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.toml by "section.key". Renamed keys get today's names; removed keys with the
    value that they now always have are left out; other unknown keys stay."""
    found: dict[str, Any] = {}
    for section, table in tables.items():
        values: dict[str, Any] = {}
        for name, value in table.items() if isinstance(table, dict) else ():
            key = f"{section}.{name}"
            new = RENAMED.get(key)
            if new and name not in schema().get(section, {}):
                values |= new.becomes(value, values)
            elif key not in REMOVED or name in schema().get(section, {}) or not REMOVED[key].is_default(value):
                values[name] = value
        found |= {f"{section}.{name}": value for name, value in values.items()}
    return {key: value for key, value in found.items() if key not in NOT_SETTINGS}


def _sound(line: Mapping[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl has the step and the times by which it is placed."""
    times = ["time", *(["time/startup"] if line["kind"] == "startup" else [])]
    return isinstance(line.get("step"), int) and all(math.isfinite(number_of(line, key)) for key in times)


def number_of(line: Mapping[str, Any], key: str) -> float:
    """Return a number of a line; NaN if it has none."""
    value = line.get(key)
    return value if isinstance(value, float | int) and not isinstance(value, bool) else math.nan


def _logged_scores(line: Mapping[str, Any]) -> Iterator[tuple[str, ScoreEstimate]]:
    """Yield the scores in a line of metrics.jsonl, by set."""
    for key in line:
        held_out = key == EVAL_SCORE
        if held_out or (key.startswith("eval/") and "/avg@" in key and key.count("/") == 2):
            head = "eval" if held_out else key
            found = ScoreEstimate(*(number_of(line, each) for each in (key, f"{head}/low", f"{head}/high")))
            if math.isfinite(found.value):
                yield (HELD_OUT if held_out else key.split("/")[1]), found
