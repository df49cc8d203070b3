#!/usr/bin/env python3
"""Measure throughput, cached prefixes and learning of lagging rollouts. Appends rows to CSVs.

    .venv/bin/python scripts/bench_async.py overlap              # about 15 minutes
    .venv/bin/python scripts/bench_async.py prefix               # about 1 minute
    .venv/bin/python scripts/bench_async.py learning             # about 25 minutes; continues where it was stopped

overlap    real runs, one trainer process and one engine, of rollouts whose lengths have a long tail: throughput at a
           lag, divided by the synchronous run's in the same round. If generation (G) and training (T) took as long as
           in that run, but overlapped perfectly, the ratio would be (G + T) / max(G, T): the bound
prefix     one engine with the prefix cache and one without, in turn: a group's samples of one long prompt, and a second
           turn whose prompts continue where the first turn's samples ended
learning   held-out score by samples seen, at lags with and without a correction, from equal cold starts; and a plot
"""

import argparse
import asyncio
from pathlib import Path

from bench.async_learning import learning, plot
from bench.async_overlap import overlap
from bench.async_prefix import prefix
from bench.rows import BENCHMARKS, FIGURES, RAN_ON, csv_rows, report

OUTPUTS = Path(__file__).resolve().parents[1] / "outputs" / "learning_by_lag"
COLUMNS = ("part", "case", "measure", *FIGURES, "note", *RAN_ON)


OPTIONS = {
    "overlap": {"repeats": 3, "steps": 15},
    "prefix": {"repeats": 7},
    "learning": {"seeds": 3, "steps": 60},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, options in OPTIONS.items():
        part = parts.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        file = "learning_by_lag.csv" if name == "learning" else "async.csv"
        part.add_argument("--csv", type=Path, default=BENCHMARKS / file)
        for option, default in options.items():
            part.add_argument(f"--{option}", type=int, default=default)
        if name == "learning":
            part.add_argument("--plot", action="store_true", help="only plot the CSV")
    a = parser.parse_args()
    if a.part == "overlap":
        report(a.csv, COLUMNS, overlap(a.repeats, a.steps))
    elif a.part == "prefix":
        report(a.csv, COLUMNS, asyncio.run(prefix(a.repeats)))
    else:
        if not a.plot:
            learning(a.csv, OUTPUTS, a.seeds, a.steps)
        a.csv.with_suffix(".svg").write_text(plot(csv_rows(a.csv)))


if __name__ == "__main__":
    main()
