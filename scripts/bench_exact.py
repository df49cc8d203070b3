#!/usr/bin/env python3
"""Measure what exact mode costs, and the kept sets of truncated sampling: sampling and training, in turn.

    .venv/bin/python scripts/bench_exact.py                     # about 3 minutes
    .venv/bin/python scripts/bench_exact.py --presets grpo_llama --rounds 1

Tokens per CPU second of one process with one thread: an engine that decodes 128 samples of 32 prompts together, and a
trainer's forward and backward over as many tokens. Appends to docs/benchmarks/exact.csv. Ratios are exact over usual;
for sampling recorded over truncated (top_p, top_k and min_p), for training recorded over usual.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV

COLUMNS = ("part", "case", "way", "measure", *FIGURES, "ratio", "note", *RAN_ON)
SIDES = Path(__file__).parent / "bench" / "exact_sides.py"
WAYS = [
    *(("sampling", mode) for mode in ("usual", "exact", "truncated", "recorded")),
    *(("training", mode) for mode in ("usual", "exact", "recorded")),
]
OVER = {("sampling", "recorded"): "truncated"}  # what a ratio compares with; else with "usual"


def measured(side: str, preset: str, mode: str) -> tuple[float, str]:
    """Return tokens per CPU second, and what else it says."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(ENV | vllm_cpu.ENV if side == "sampling" else {})}
    command = [sys.executable, str(SIDES), side, preset, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FOUND ", "BYTES ")))
    note = f"{float(found['BYTES']):.1f} bytes of kept sets per token" if "BYTES" in found else ""
    return float(found["FOUND"]), note


def price(preset: str, rounds: int, ways: Sequence[str]) -> Iterator[Row]:
    found, notes = defaultdict[tuple[str, str], list[float]](list), dict[tuple[str, str], str]()
    chosen = [way for way in WAYS if way[1] in ways]
    for _, way in in_turn(chosen, rounds):
        rate, notes[way] = measured(way[0], preset, way[1])
        found[way].append(rate)
    for side, mode in chosen:
        own, over = found[side, mode], found[side, OVER.get((side, mode), "usual")]
        ratio = statistics.median(own) / statistics.median(over) if over and over is not own else None
        measure = f"{side}, tokens per CPU second"
        yield Row("exact", preset, measure, own, way=mode, ratio=ratio, note=notes[side, mode])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "exact.csv")
    parser.add_argument("--presets", nargs="+", default=["grpo_llama", "grpo_qwen3"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["usual", "exact", "truncated", "recorded"])
    a = parser.parse_args()
    for preset in a.presets:
        report(a.csv, COLUMNS, price(preset, a.rounds, a.ways))


if __name__ == "__main__":
    main()
