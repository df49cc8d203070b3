#!/usr/bin/env python3
"""Measure what lagging rollouts bring and cost: time, capacity, cached prefixes, learning. Appends rows to CSVs.

    .venv/bin/python scripts/bench_async.py overlap              # about 15 minutes
    .venv/bin/python scripts/bench_async.py capacity             # about 7 minutes
    .venv/bin/python scripts/bench_async.py prefix               # about 1 minute
    .venv/bin/python scripts/bench_async.py learning             # about 25 minutes; continues where it was stopped

overlap    real runs, one trainer process and one engine, of rollouts whose lengths have a long tail: throughput at a
           lag over that of the synchronous run of the same round. If generation (G) and training (T) took as long as
           in that run, but overlapped perfectly, the ratio would be (G + T) / max(G, T): the bound
capacity   the real stream and generator mesh over processes that answer after a timer, with no model: what a rollout
           costs the controller, how much later than its timer it arrives, whether memory grows
prefix     one engine with the prefix cache and one without, in turn: a group's samples of one long prompt, and a second
           turn whose prompts continue where the first turn's samples ended
learning   held-out score by samples seen, at lags with and without a correction, from equal cold starts; and a plot
"""

import argparse
import asyncio
from pathlib import Path

from bench.async_capacity import capacity
from bench.async_learning import learning
from bench.async_overlap import MODES, overlap
from bench.async_plot import plot
from bench.async_prefix import prefix
from bench.rows import BENCHMARKS, FIGURES, RAN_ON, csv_rows, report

HERE = Path(__file__).resolve().parents[1]
COLUMNS = ("part", "case", "measure", *FIGURES, "note", *RAN_ON)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = {name: parts.add_parser(name) for name in ("overlap", "capacity", "prefix", "learning")}
    for name, repeats in (("overlap", 3), ("prefix", 7)):
        part[name].add_argument("--repeats", type=int, default=repeats)
    for name in ("overlap", "capacity", "prefix"):
        part[name].add_argument("--csv", type=Path, default=BENCHMARKS / "async.csv")
    part["overlap"].add_argument("--steps", type=int, default=15, help="measured steps of each run")
    part["overlap"].add_argument("--modes", nargs="+", choices=list(MODES)[1:], default=list(MODES)[1:])
    part["overlap"].add_argument("--set", action="append", default=[], help="a flag of the runs: --set=--model.dim=64")
    part["capacity"].add_argument("--steps", type=int, default=100)
    part["capacity"].add_argument("--rollouts", type=int, default=1600, help="number admitted at a time")
    part["capacity"].add_argument("--seconds", type=float, default=2.0, help="average seconds of a rollout")
    part["learning"].add_argument("--csv", type=Path, default=BENCHMARKS / "learning_by_lag.csv")
    part["learning"].add_argument("--svg", type=Path, default=BENCHMARKS / "learning_by_lag.svg")
    part["learning"].add_argument("--folder", type=Path, default=HERE / "outputs" / "learning_by_lag")
    part["learning"].add_argument("--seeds", type=int, default=3)
    part["learning"].add_argument("--steps", type=int, default=60)
    part["learning"].add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    part["learning"].add_argument("--plot", action="store_true", help="only plot the CSV")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    if a.part == "overlap":
        report(a.csv, COLUMNS, overlap(a.modes, a.repeats, a.steps, a.set))
    elif a.part == "capacity":
        for group_size in (1, 10):
            report(a.csv, COLUMNS, asyncio.run(capacity(a.rollouts, group_size, a.steps, a.seconds)))
    elif a.part == "prefix":
        report(a.csv, COLUMNS, asyncio.run(prefix(a.repeats)))
    else:
        if not a.plot:
            learning(a.csv, a.folder, a.seeds, a.steps, a.lags)
        a.svg.write_text(plot(csv_rows(a.csv)))


if __name__ == "__main__":
    main()
