#!/usr/bin/env python3
"""Measure what a step costs the controller as the generators become many. Appends rows to a CSV, and plots it.

    .venv/bin/python scripts/bench_scale.py                             # 8 to 512 generators: minutes
    .venv/bin/python scripts/bench_scale.py --replicas 8 32 --csv /tmp/scale.csv
    .venv/bin/python scripts/bench_scale.py --plot                      # only plot the CSV

Every run is a whole one: controller, rollout stream, routing, weight sync, ledger, logs, control socket and
timeline are those of titan_rl.run. Only the ranks are simulated: Monarch actors, 64 in a process, which answer with
random tokens after the time that an engine would take, and move no weights. Work grows with the generators: each step
has GROUPS groups per generator. So a cost that grows in proportion has the exponent 1, and one of every pair has 2.

lag 0           synchronous, 8 trainer ranks
lag 1           asynchronous
lag 0, N ranks  as many trainer ranks as generators, so each reader reads from each of them
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

from bench.rows import BENCHMARKS, append_rows, csv_rows, ran_on
from bench.scale_growth import WAYS, Way, plot, rows_of
from titan_rl.environment import prepare_environment, socket_folder

CONFIG, GROUPS, SAMPLES, TOKENS = "grpo_llama", 2, 4, 64
PACE = 0.002  # seconds of an engine's step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--variant", default="this commit")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "scale.csv")
    parser.add_argument("--plot", action="store_true", help="only plot the CSV")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in this process
    a = parser.parse_args()
    if a.one:
        print(json.dumps(measured(WAYS[a.ways[0]], a.replicas[0], a.steps)))
        sys.stdout.flush()
        os._exit(0)  # Monarch's threads would keep it
    for way in [] if a.plot else a.ways:
        for replicas in a.replicas:
            found = in_another_process(way, replicas, a.steps)
            append_rows(a.csv, [row | ran_on() for row in rows_of(a.variant, way, replicas, found)])
            print(f"{way}, {replicas} generators: {found}", flush=True)
    if drawn := plot(csv_rows(a.csv), a.variant):
        a.csv.with_suffix(".svg").write_text(drawn)


def in_another_process(way: str, replicas: int, steps: int) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--one", "--ways", way, "--replicas", str(replicas), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def keys_of(way: Way, replicas: int, steps: int, folder: str) -> dict[str, object]:
    return {
        "job.dump_folder": folder,
        "cold_start.steps": 0,
        "cold_start.stop_at": 0,
        "eval.size": 0,
        "checkpoint.enable": "false",
        "fault.snapshot_interval": 0,
        "algorithm.max_dead_steps": 0,  # nothing is learned
        "training.steps": steps,
        "rollout.max_staleness_steps": way.lag,
        "rollout.groups_per_step": GROUPS * replicas,
        "rollout.group_size": SAMPLES,
        "rollout.max_new_tokens": TOKENS,
        "generator.replicas": replicas,
        "parallelism.data_parallel_shard_degree": way.trainers or replicas,
        "hosts.slots": 2**12,
        "hosts.isolation": "off",
    }


def measured(way: Way, replicas: int, steps: int) -> dict[str, list[float]]:
    """Return what the controller of one run used: by step, without the first."""
    with tempfile.TemporaryDirectory() as folder, socket_folder():
        prepare_environment(meshes=replicas)  # before Monarch is imported
        from bench.simulated_launch import Observed, simulated
        from titan_rl.preflight.checks import checked_run
        from titan_rl.preflight.plan import prepare, settle
        from titan_rl.record.run_lock import RunLock
        from titan_rl.record.terminal import Terminal
        from titan_rl.session import session

        keys = keys_of(way, replicas, steps, folder + "/run")
        observed, scratch = Observed(), Path(folder) / "scratch"
        scratch.mkdir()
        argv = ["--config", CONFIG, *(word for k, v in keys.items() for word in (f"--{k}", str(v)))]
        invocation = checked_run(argv, only_warns=lambda _, problem: "this host" in problem)  # real ranks would not fit
        with RunLock(Path(folder) / "run") as lock:
            setup = prepare(CONFIG, invocation.config, device="cpu", scratch=scratch)
            setup = settle(setup, lock)
            asyncio.run(session(setup, Terminal(), partial(simulated, observed=observed, pace=PACE)))
        timeline = (Path(folder) / "run" / "timeline.json").stat().st_size
    begun, *marks = observed.marks
    between = list(pairwise(marks))
    return {
        "a step: wall s": [after.wall - before.wall for before, after in between],
        "a step: CPU s": [after.cpu - before.cpu for before, after in between],
        "a step: CPU s, main thread": [after.main - before.main for before, after in between],
        "a step: CPU s, Monarch's threads": [after.monarch - before.monarch for before, after in between],
        "a step: CPU s, garbage": [after.collecting - before.collecting for before, after in between],
        "a step: messages": [sum(observed.calls.values()) / (len(marks) - 1)],
        "memory: MB": [marks[-1].rss / 1e6],
        "start: CPU s": [marks[0].cpu - begun.cpu],
        "start: wall s": [marks[0].wall - begun.wall],
        "timeline: KB a step": [timeline / 1e3 / len(marks)],
    }


if __name__ == "__main__":
    main()
