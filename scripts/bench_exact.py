#!/usr/bin/env python3
"""Measure what exact mode costs: sampling and training, with debug.exact and without, in turn.

    .venv/bin/python scripts/bench_exact.py                     # about 3 minutes
    .venv/bin/python scripts/bench_exact.py --presets grpo_llama --rounds 1

Tokens per CPU second of one process with one thread: an engine that decodes 128 samples of 32 prompts together, and a
trainer's forward and backward over as many tokens. Appends to docs/benchmarks/exact.csv; a ratio is exact over
usual.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV

COLUMNS = ("part", "case", "way", "measure", *FIGURES, "ratio", "note", *RAN_ON)
SIDES = Path(__file__).parent / "bench" / "exact_sides.py"
WAYS = [(side, mode) for side in ("sampling", "training") for mode in ("usual", "exact")]


def measured(side: str, preset: str, mode: str) -> float:
    """Return tokens per CPU second."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(ENV | vllm_cpu.ENV if side == "sampling" else {})}
    command = [sys.executable, str(SIDES), side, preset, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return float(line.removeprefix("FOUND "))


def price(preset: str, rounds: int) -> Iterator[Row]:
    found = defaultdict[tuple[str, str], list[float]](list)
    for _, (side, mode) in in_turn(WAYS, rounds):
        found[side, mode].append(measured(side, preset, mode))
    for side, mode in WAYS:
        usual, own = (statistics.median(found[side, each]) for each in ("usual", mode))
        ratio = own / usual if mode == "exact" else None
        yield Row("exact", preset, f"{side}, tokens per CPU second", found[side, mode], way=mode, ratio=ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "exact.csv")
    parser.add_argument("--presets", nargs="+", default=["grpo_llama", "grpo_qwen3"])
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    for preset in a.presets:
        report(a.csv, COLUMNS, price(preset, a.rounds))


if __name__ == "__main__":
    main()
