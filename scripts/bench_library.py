#!/usr/bin/env python3
"""Measure a step of a user's own GRPO loop (docs/loops/grpo.py) next to one of the built-in controller.

    .venv/bin/python scripts/bench_library.py                         # SmolLM2, two runs of 6 steps each, in turns
    .venv/bin/python scripts/bench_library.py --config grpo_llama --rounds 1

Both make the same steps. The first two steps of a run are left out: engines and trainers allocate in them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

LOOP = """
import asyncio, sys
import titan_rl

async def main(config, steps, folder):
    keys = {"training.steps": steps, "eval.interval": 0, "job.dump_folder": folder}
    async with titan_rl.start(config, keys, quiet=True) as run:
        for _ in range(steps):
            groups = await run.sample(run.prompts(run.config.rollout.groups_per_step))
            groups = await run.judge(groups)
            await run.train(groups)
            await run.sync()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""
LEFT_OUT = 2


def step_seconds(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["time/step"] for line in lines if line["kind"] == "rl"][LEFT_OUT:]


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "rl"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="grpo_smollm2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"own loop": [], "controller": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(given.rounds):
            own, built_in = Path(scratch, f"own{number}"), Path(scratch, f"built_in{number}")
            keys = {"training.steps": given.steps, "eval.interval": 0, "job.dump_folder": built_in}
            flags = [f"--{key}={value}" for key, value in keys.items()]
            run = [sys.executable, "-m", "titan_rl.run", "--config", given.config, *flags]
            program = [sys.executable, "-c", LOOP, given.config, str(given.steps), str(own)]
            for command in (program, run):
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds["own loop"] += step_seconds(own)
            seconds["controller"] += step_seconds(built_in)
            same = losses(own) == losses(built_in)
            print(f"round {number + 1}: the losses of {given.steps} steps are {'equal' if same else 'NOT equal'}")
    for name, found in seconds.items():
        print(f"{name:12} {median(found):.3f} s a step ({min(found):.3f} to {max(found):.3f}, {len(found)} steps)")
    print(f"ratio {median(seconds['own loop']) / median(seconds['controller']):.3f}")


if __name__ == "__main__":
    main()
