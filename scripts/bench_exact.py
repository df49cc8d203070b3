#!/usr/bin/env python3
"""Measure what exact mode costs: sampling and training of whole runs, with debug.exact and without.

    .venv/bin/python scripts/bench_exact.py                     # about 2 minutes
    .venv/bin/python scripts/bench_exact.py --presets grpo_llama --rounds 1

Runs of one trainer process and one engine, in turn. "sampling" is tokens per second of the engine's own time,
"training" trained tokens per second of the trainer's own time; both are medians over a run's steps but the first.
Appends to docs/benchmarks/exact.csv; a ratio is exact over normal.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, metric_lines, report, run_to_end

COLUMNS = ("part", "case", "way", "measure", *FIGURES, "ratio", "note", *RAN_ON)
WAYS = {"normal": "false", "exact": "true"}
KEYS = {
    "cold_start.steps": 10,
    "cold_start.stop_at": 0,
    "rollout.groups_per_step": 32,
    "parallelism.data_parallel_shard_degree": 1,
    "hosts.threads": 1,
    "eval.size": 16,
    "eval.interval": 0,
    "checkpoint.interval": 1000,
}
MEASURES = {"sampling, tokens/s": "engine/sampling_seconds", "training, tokens/s": "engine/training_seconds"}


def measured(preset: str, exact: str, steps: int) -> list[float]:
    """Return tokens per second of sampling and of training."""
    with tempfile.TemporaryDirectory() as folder:
        run_to_end(
            {
                "config": preset,
                **KEYS,
                "debug.exact": exact,
                "training.steps": 1 + steps,
                "job.dump_folder": folder,
            }
        )
        lines = metric_lines(Path(folder), "rl")[1:]
    tokens = {"engine/sampling_seconds": "tokens/sampled", "engine/training_seconds": "tokens/trained"}
    return [statistics.median(line[tokens[key]] / line[key] for line in lines) for key in MEASURES.values()]


def price(preset: str, steps: int, rounds: int) -> Iterator[Row]:
    found = defaultdict[str, list[list[float]]](list)
    for _, way in in_turn(WAYS, rounds):
        found[way].append(measured(preset, WAYS[way], steps))
    for number, measure in enumerate(MEASURES):
        values = {way: [each[number] for each in runs] for way, runs in found.items()}
        for way in WAYS:
            ratio = statistics.median(values[way]) / statistics.median(values["normal"]) if way == "exact" else None
            yield Row("exact", preset, measure, values[way], way=way, ratio=ratio, note=f"{steps} steps a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "exact.csv")
    parser.add_argument("--presets", nargs="+", default=["grpo_llama", "grpo_qwen3"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    for preset in a.presets:
        report(a.csv, COLUMNS, price(preset, a.steps, a.rounds))


if __name__ == "__main__":
    main()
