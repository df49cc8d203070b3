"""The results: a row per fault, a row per class of faults, and the audits; on a terminal, as JSON, as CSV."""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan_rl.record.lines import write_whole
from titan_rl.tools.chaos.outcome import FaultOutcome

HEADERS = {
    "detected_s": "detected",
    "recovered_s": "recovered",
    "detected_median_s": "detected",
    "detected_max_s": "most",
    "recovered_median_s": "recovered",
    "recovered_max_s": "most",
    "steps_again": "steps",
    "samples_anew": "samples",
}
"""Shorter column headers for the terminal."""


@dataclass(slots=True)
class Findings:
    seed: int
    planned: int
    outcomes: list[FaultOutcome] = field(default_factory=list)
    audits: dict[str, list[str]] = field(default_factory=dict)
    ended: str = ""  # why the chaos ended early
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        problems = [self.ended] if self.ended else []
        for outcome in self.outcomes:
            head = f"{outcome.fault.what} of {outcome.fault.victim} at step {outcome.step}"
            problems += [f"{head}: {wrong}" for wrong in outcome.wrong]
        for found in self.audits.values():
            problems += found
        return problems


def rows(outcomes: Sequence[FaultOutcome]) -> Iterator[dict[str, Any]]:
    for o in outcomes:
        yield {
            "fault": o.fault.what,
            "victim": o.fault.victim,
            "step": o.step,
            "detected_s": _rounded(o.detected),
            "recovered_s": _rounded(o.recovered),
            "steps_again": o.steps,
            "samples_anew": o.samples,
            "lost": o.blamed,
            "note": "; ".join([*o.wrong, *([o.note] if o.note else [])]),
        }


def classes(outcomes: Sequence[FaultOutcome]) -> list[dict[str, Any]]:
    """Return a row per kind of fault and role: count, and median and maximum of the seconds."""
    groups: defaultdict[tuple[str, str], list[FaultOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.fault.kind, outcome.fault.role].append(outcome)
    found = list[dict[str, Any]]()
    for (kind, role), each in sorted(groups.items()):
        row: dict[str, Any] = {"fault": kind, "role": role, "count": len(each)}
        row["held"] = sum(not outcome.wrong for outcome in each)
        row |= _spread("detected", [outcome.detected for outcome in each])
        row |= _spread("recovered", [outcome.recovered for outcome in each])
        row["steps_again"] = sum(outcome.steps for outcome in each)
        row["samples_anew"] = sum(outcome.samples for outcome in each)
        found.append(row)
    return found


def show(findings: Findings, console: Console) -> None:
    console.print(_table("faults: seconds, and steps and samples repeated", list(rows(findings.outcomes))))
    console.print(_table("by class: medians", classes(findings.outcomes)))
    for what, problems in findings.audits.items():
        console.print(Text.assemble(("  ✗ ", "red") if problems else ("  ✓ ", "green"), what))
    for name, value in findings.facts.items():
        console.print(Text(f"  {name}: {value}"))
    for problem in findings.problems:
        console.print(Text(f"  {problem}", "red"), soft_wrap=True)


def write(findings: Findings, folder: Path, path: Path | None, facts: Mapping[str, Any]) -> None:
    """Write RUN/chaos.json, and append the rows by class to the CSV file `path`."""
    whole = {
        "seed": findings.seed,
        "planned": findings.planned,
        "faults": [asdict(outcome) for outcome in findings.outcomes],
        "classes": classes(findings.outcomes),
        "audits": findings.audits,
        "problems": findings.problems,
        **findings.facts,
    }
    write_whole(folder / "chaos.json", json.dumps(whole, indent=2) + "\n")
    lines = [{**row, **facts} for row in classes(findings.outcomes)]
    if path is not None and lines:
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(lines)


def _spread(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    known = [s for s in seconds if s is not None]
    return {
        f"{name}_median_s": _rounded(statistics.median(known)) if known else None,
        f"{name}_max_s": _rounded(max(known)) if known else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in lines[0] if lines else ():
        numbers = all(isinstance(line[name], int | float | None) for line in lines)
        table.add_column(
            HEADERS.get(name, name), justify="right" if numbers else "left", overflow="fold", no_wrap=name != "note"
        )
    for line in lines:
        table.add_row(*(Text("-" if value is None else str(value)) for value in line.values()))
    return table
