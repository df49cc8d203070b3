"""What benchmarks share: whole runs of titan_rl, and results as printed tables and lines of CSVs in docs/benchmarks."""

import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from titan_rl.environment import CONTROLLER_ENV
from titan_rl.record.provenance import git_commit, machine, versions

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
FIGURES = ("median", "min", "max", "runs")
RAN_ON = ("date", "commit", "machine", "engines", "load")
ALIASES = {"kernel": "part", "config": "case", "variant": "way", "over plain": "ratio"}  # column names of single files
CONFIG = "grpo_llama"
RUN = ("-m", "titan_rl.run")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: the median, minimum and maximum of its values."""

    part: str
    case: str  # rows of one case are printed as one table
    measure: str
    values: Sequence[float]
    way: str = ""
    ratio: float | None = None  # to the baseline
    note: str = ""

    def cells(self) -> dict[str, str]:
        values = self.values
        figures = {"median": statistics.median(values), "min": min(values), "max": max(values), "ratio": self.ratio}
        texts = {"part": self.part, "case": self.case, "way": self.way, "measure": self.measure, "note": self.note}
        numbers = {name: "" if figure is None else f"{figure:.4g}" for name, figure in figures.items()}
        return {**texts, **numbers, "runs": str(len(values))}


def report(path: Path, columns: Sequence[str], rows: Iterable[Row], **more: Any) -> None:
    """Print a table and append CSV rows as soon as a case is measured. `more` adds to what ran_on() returns."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for case, group in groupby(rows, key=lambda row: row.case):
        common, lines = ran_on() | more, [row.cells() for row in group]
        append_rows(path, [{name: (line | common)[ALIASES.get(name, name)] for name in columns} for line in lines])
        table = Table(title=case, title_justify="left")
        shown = [name for name in columns if ALIASES.get(name, name) in lines[0].keys() - {"part", "case"}]
        for name in shown:
            table.add_column(name, justify="left" if name in ("way", "variant", "measure", "note") else "right")
        for line in lines:
            table.add_row(*(line[ALIASES.get(name, name)] for name in shown))
        console.print(table)


def ran_on() -> dict[str, str]:
    host = machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "machine": f"{host['cores']} x {host['cpu']}",
        "engines": ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python"),
        "load": f"{os.getloadavg()[0]:.1f}",  # load beyond the benchmark's own threads comes from other programs
    }


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV. A column that the file lacks becomes its last one, empty in the rows that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = csv_rows(path)
    header = list(old[0]) if old else []
    columns = list(dict.fromkeys([*header, *rows[0]]))
    with path.open("a" if columns == header else "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if columns != header:
            writer.writeheader()
            writer.writerows(old)
        writer.writerows(rows)


def csv_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def in_turn(ways: Iterable[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, way) for every way in every round, so that a busy machine slows all ways alike. Every other round
    runs in the opposite order."""
    order = list(ways)
    for i in range(rounds):
        yield from ((i, way) for way in (order if i % 2 else reversed(order)))


def run_command(keys: Mapping[str, Any], program: Sequence[str] = RUN, config: str = CONFIG) -> list[str]:
    """Return the command of `program` with a config and these keys."""
    flags = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    return [sys.executable, *program, "--config", config, *flags]


def run_to_end(keys: Mapping[str, Any], program: Sequence[str] = RUN, config: str = CONFIG) -> str:
    """Run `program` with a config and these keys, and return its output."""
    command = run_command(keys, program, config)
    done = subprocess.run(command, env={**CONTROLLER_ENV, **os.environ}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def metric_lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def curve_columns(points: Sequence[tuple[int, float, float]]) -> dict[str, str]:
    """Return the columns of a run's evaluations, each of which is a step, seconds since the command, and a score."""
    return {
        "start": f"{points[0][2]:.4f}",
        "final": f"{points[-1][2]:.4f}",
        "curve": " ".join(f"{step}:{score:.4f}" for step, _, score in points),
        "seconds": " ".join(f"{step}:{seconds:.1f}" for step, seconds, _ in points),
    }


def points_of(text: str) -> dict[int, float]:
    """Read a column of curve_columns: values by step."""
    return {int(step): float(value) for step, value in (point.split(":") for point in text.split())}
