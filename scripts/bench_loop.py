#!/usr/bin/env python3
"""Measure what the loop costs besides its engines: start-up, controller overhead, weight sync. Appends rows to a CSV.

    .venv/bin/python scripts/bench_loop.py            # grpo_llama.toml on this machine, about two minutes
    .venv/bin/python scripts/bench_loop.py --repeats 5 --csv /tmp/loop.csv

Every figure is from runs made now, on this machine. The ratio compares within one step: the controller's wall seconds
over the seconds that the step's critical path spent inside vLLM, TorchTitan and the weight transfer.
"""

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.rows import BENCHMARKS, CONFIG, FIGURES, Row, metric_lines, report, run_to_end

COLUMNS = ("measure", *FIGURES, "date", "commit", "config", "machine", "engines")
KEYS = {
    "cold_start.steps": 4,
    "cold_start.stop_at": 0,
    "eval.size": 0,
    "checkpoint.interval": 1000,
    "rollout.groups_per_step": 64,  # a step of a second or more
}
WARM_UP = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "loop.csv")
    a = parser.parse_args()
    measured: dict[str, list[float]] = {}
    for _ in range(a.repeats):
        for name, value in run(a.steps).items():
            measured.setdefault(name, []).append(value)
    report(a.csv, COLUMNS, [Row("loop", CONFIG, name, values) for name, values in measured.items()])


def run(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        out = run_to_end(KEYS | {"training.steps": steps, "job.dump_folder": folder})
        (first, *_), rl = metric_lines(Path(folder), "cold_start"), metric_lines(Path(folder), "rl")[WARM_UP:]
    found = {"startup: command to first training step, s": first["time"] - first["time/step"] - began}
    for phase, seconds in re.findall(r"✓ (\S+): .*?\s([\d.]+) s", out):
        found[f"startup: {phase}, s"] = float(seconds)

    def median(key: str) -> float:
        return statistics.median(line[key] for line in rl)

    return found | {
        "step: wall, s": median("time/step"),
        "step: inside the engines, s": statistics.median(map(inside, rl)),
        "step: wall / inside the engines": statistics.median(line["time/step"] / inside(line) for line in rl),
        "sync: publish, s": median("sync/publish_seconds"),
        "sync: read, s": median("sync/read_seconds"),
        "sync: write, s": median("sync/write_seconds"),
        "sync: wall, s": median("sync/seconds"),
        "sync: bytes": median("sync/bytes"),
    }


def inside(line: dict[str, Any]) -> float:
    """Return the seconds of a step's critical path inside vLLM, TorchTitan and the weight transfer."""
    transfer = line["sync/publish_seconds"] + line["sync/read_seconds"] + line["sync/write_seconds"]
    return line["engine/sampling_seconds"] + line["engine/training_seconds"] + transfer


if __name__ == "__main__":
    main()
