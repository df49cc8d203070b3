#!/usr/bin/env python3
"""Measure how fast a run starts, recovers and ends, with ranks that are forked and that start cold. Appends to a CSV.

    .venv/bin/python scripts/bench_startup.py                         # five runs each way, in turn
    .venv/bin/python scripts/bench_startup.py --against ../before     # also another checkout of titan_rl
    .venv/bin/python scripts/bench_startup.py --against ../before --start-only

Each run has two trainer ranks and one generator of a tiny model, so that nothing but starting takes long. The ratio is
to cold starts of this checkout, or with --start-only to the other one. CPU seconds compare better than wall seconds
on a machine that has other work.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from bench.startup import WARM, WAYS, kept_warm, timed_run

COLUMNS = ("variant", "measure", *FIGURES, "ratio", *RAN_ON)
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, whose start is measured too")
    parser.add_argument("--start-only", action="store_true", help="no cold starts, no recovery; needs --against")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "startup.csv")
    a = parser.parse_args()
    if a.start_only and not a.against:
        parser.error("--start-only: expected --against, found none")
    base = "before" if a.start_only else "cold"
    ways = {way: (ROOT, environment) for way, environment in WAYS.items() if way != "cold" or not a.start_only}
    if a.against:
        ways["before"] = (a.against.resolve(), {})
    measured: dict[tuple[str, str], list[float]] = {}

    def keep(way: str, found: Mapping[str, float]) -> None:
        for measure, value in found.items():
            measured.setdefault((way, measure), []).append(value)

    for _, way in in_turn(ways, a.repeats):
        keep(way, timed_run(*ways[way], recovers=not a.start_only))
    if not a.start_only:
        with kept_warm(ROOT) as environment:  # not in turn: its fork servers would take memory from the others
            for _ in range(a.repeats):
                found = timed_run(ROOT, environment, recovers=False)
                own = [measure for measure in found if measure.endswith("s") and "CPU" not in measure]
                keep(WARM, {measure: found[measure] for measure in own})
    rows = [
        Row("startup", "start, recovery and end of a run", measure, values, way, ratio(measured, way, measure, base))
        for (way, measure), values in measured.items()
    ]
    report(a.csv, COLUMNS, rows)


def ratio(measured: dict[tuple[str, str], list[float]], way: str, measure: str, base: str) -> float:
    return statistics.median(measured[way, measure]) / statistics.median(measured[base, measure])


if __name__ == "__main__":
    main()
