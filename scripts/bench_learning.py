#!/usr/bin/env python3
"""Measure how reliably shipped configs learn: whole runs over seeds and emulated machines. Appends a row per run.

    .venv/bin/python scripts/bench_learning.py                       # grpo_llama: 4 machines, 5 seeds: 20 runs
    .venv/bin/python scripts/bench_learning.py --configs ppo_llama --machines avx2 "sse4, 2 threads" --seeds 3
    .venv/bin/python scripts/bench_learning.py --models "Muse Glimmer" "Gemma 4" --machines "as it is" --seeds 1
    .venv/bin/python scripts/bench_learning.py --plot                # only print the ranges and plot the CSV

A machine is emulated by limiting the instruction sets that torch, oneDNN and MKL use, and by the number of threads:
sums are then computed in another order, which is what another CPU changes. Runs that have a row are not repeated, so
the script continues where it was stopped. A run is deterministic: a busy machine changes its seconds, not its scores.
"""

import argparse
from pathlib import Path

from bench.learning import GRID, MACHINES, MODELS, learning, plot, summary
from bench.rows import BENCHMARKS, CONFIG, csv_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=[CONFIG])
    parser.add_argument("--machines", nargs="+", default=list(GRID), choices=list(MACHINES))
    parser.add_argument("--models", nargs="+", default=[""], choices=MODELS, help="in place of the configs' model")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS - 1 on every machine (default: 5)")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "learning.csv")
    parser.add_argument("--plot", action="store_true", help="only plot the CSV")
    a = parser.parse_args()
    if not a.plot:
        for config in a.configs:
            for model in a.models:
                learning(a.csv, config, a.machines, range(a.seeds), csv_rows(a.csv), model)
    rows = csv_rows(a.csv)
    print("\n".join(summary(rows)))
    a.csv.with_suffix(".svg").write_text(plot(rows, CONFIG))


if __name__ == "__main__":
    main()
