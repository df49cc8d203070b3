#!/usr/bin/env python3
"""Run shipped configs over seeds, check each run, and append a row per run to docs/benchmarks/recipes.csv.

    .venv/bin/python scripts/recipes.py --run grpo_smollm2_mixed --seeds 0 1 2

A row has the held-out scores and the seconds since the command, what `titan_rl audit` found, the causes that
`titan_rl why` names, and the commit and the machine. The run stays in its folder, below --folder. A config and a seed
that have a row are not run again: after Ctrl-C the same command continues.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import BENCHMARKS, append_rows, csv_rows, curve_columns, metric_lines, ran_on, run_to_end
from titan_rl.config.toml import find
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.wire.program import DONE

ROWS = BENCHMARKS / "recipes.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="configs to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("outputs/recipes"), help="where the runs stay")
    parser.add_argument("--csv", type=Path, default=ROWS)
    a = parser.parse_args()
    there = {(row["config"], row["seed"]) for row in csv_rows(a.csv)}
    for seed in a.seeds:
        for config in map(find, a.run):
            name = config.stem
            if (name, str(seed)) not in there:
                found = proven(config, seed, a.folder / f"{name}_{seed}")
                row = {"config": name, "seed": seed, **found, **ran_on()}
                append_rows(a.csv, [row])
                print(f"{name}, seed {seed}: {row['curve']}; audit: {row['audit']}; why: {row['why']}", flush=True)


def proven(config: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Run a config in a folder from its first step, and return its scores, its audit and its diagnosis."""
    began = time.time()
    run_to_end({"debug.seed": seed, "job.dump_folder": folder, "job.fresh": "true"}, config=str(config))
    wall = time.time() - began
    lines = metric_lines(folder, "eval", "rl", "fit")
    points = [(line["step"], line["time"] - began, line[EVAL_SCORE]) for line in lines if EVAL_SCORE in line]
    code, said = checked("audit", folder)
    diagnosis = json.loads(checked("why", folder, "--json")[1])
    causes = [finding["rule"] for finding in diagnosis["findings"] if finding["severity"] == "problem"]
    return {
        "steps": max(line["step"] for line in lines),
        **curve_columns(points),
        "wall_s": f"{wall:.0f}",
        "audit": "clean" if code == DONE else said.splitlines()[-1],
        "why": ", ".join(causes) or "no problem",
    }


def checked(tool: str, folder: Path, *flags: str) -> tuple[int, str]:
    """Run a tool on a run's folder, and return its exit code and what it printed."""
    command: Sequence[str] = [sys.executable, "-m", "titan_rl", tool, str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout or done.stderr


if __name__ == "__main__":
    main()
