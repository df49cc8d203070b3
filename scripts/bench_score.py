#!/usr/bin/env python3
"""Measure the seconds from a command to a score, next to TRL, from the same weights. Appends a row per way and seed.

    .venv/bin/python scripts/bench_score.py --trl /tmp/trl/bin/python            # seeds 0 to 4
    .venv/bin/python scripts/bench_score.py --ways titan_rl "titan_rl, 2 engines" --seeds 1
    .venv/bin/python scripts/bench_score.py --commit 282fd113a9da                # only print what a commit has measured

Each seed has a policy of its own: that of grpo_llama after its cold start. From there both ways take GRPO steps of the
same size and learning rate on the same problems, and answer the same held-out ones greedily every fifth step. Start-up
and evaluations count. `bench_step.py --help` says how to make TRL's environment.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.rows import BENCHMARKS, CONFIG, append_rows, csv_rows, ran_on, run_to_end
from bench.startup import cpu_seconds
from bench.step_ways import ENV, engines_of
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.tasks.task import addition

SCRIPTS = Path(__file__).resolve().parent
TRL = "TRL"
KEYS: dict[str, dict[str, Any]] = {
    "titan_rl": {},
    "titan_rl, 2 engines": {"generator.replicas": 2},
    "titan_rl, lag 1": {  # as in grpo_llama_async
        "rollout.lag": 1,
        "parallelism.data_parallel_shard_degree": 1,
    },
}
WAYS = (*KEYS, TRL)
HELDOUT, INTERVAL, STEPS = 256, 5, 100
SECONDS = 600  # most of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="an interpreter that has TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--score", type=float, default=0.95)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "score.csv")
    parser.add_argument("--commit", help="print the rows of this commit, and run nothing; its first digits are enough")
    a = parser.parse_args()
    if a.commit is not None:
        print("\n".join(summary(rows_of_commit(csv_rows(a.csv), a.commit))))
        return
    if TRL in a.ways and a.trl is None:
        parser.error("--trl: expected an interpreter that has TRL, or --ways without TRL")
    for seed in a.seeds:
        with tempfile.TemporaryDirectory() as folder:
            start = cold_started(Path(folder), seed)
            for way in a.ways:
                load = f"{os.getloadavg()[0]:.1f}"
                began = time.perf_counter()
                scores, cpu = trl(a.trl, start, seed, a.score) if way == TRL else ours(start, seed, a.score, way)
                seconds = time.perf_counter() - began
                step, score = scores[-1]
                figures = {"seconds": f"{seconds:.1f}", "CPU seconds": f"{cpu:.1f}", "step": step}
                row = {"way": way, "seed": seed, "score": a.score, "reached": score >= a.score, **figures}
                row |= {"last": f"{score:.4f}", "first": f"{scores[0][1]:.4f}", **ran_on(), "load": load}
                append_rows(a.csv, [row | ({"engines": engines_of(a.trl)} if way == TRL else {})])
                took = f"{seconds:.1f} s, {cpu:.1f} of CPU"
                print(f"seed {seed}, {way}: {score:.3f} at step {step} after {took}, load {load}", flush=True)
    print("\n".join(summary(rows_of_commit(csv_rows(a.csv), ran_on()["commit"]))))


def cold_started(folder: Path, seed: int) -> Path:
    """Return a Hugging Face folder of the policy that a cold start made."""
    keys = {"training.steps": 1, "optimizer.lr": 1e-12, "checkpoint.enable": "false"}
    run_to_end({**keys, "debug.seed": seed, "job.dump_folder": folder / "cold"})
    return folder / "cold" / "hf"


def ours(start: Path, seed: int, score: float, way: str) -> tuple[list[tuple[int, float]], float]:
    """Return the scores by step of a run that is ended as soon as it has reached `score`, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as dump:
        keys: Mapping[str, Any] = {
            "model.hf_assets_path": start,
            "cold_start.steps": 0,
            "cold_start.stop_at": 0,
            "training.steps": STEPS,
            "eval.interval": INTERVAL,
            "eval.size": HELDOUT,
            "debug.seed": seed,
            "job.dump_folder": dump,
            **KEYS[way],
        }
        command = [sys.executable, "-m", "titan_rl.run", "--config", CONFIG]
        command += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
        env = {**CONTROLLER_ENV, **os.environ}
        with open(Path(dump, "log"), "wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as run:
            ends, scores, seen, cpu = time.monotonic() + SECONDS, [(0, 0.0)], 0, 0.0
            while run.poll() is None and time.monotonic() < ends and scores[-1][1] < score:
                time.sleep(0.05)
                with suppress(FileNotFoundError), open(Path(dump, "metrics.jsonl"), "rb") as file:
                    file.seek(seen)  # reading it whole takes time from the run
                    new = file.read()
                    whole = new[: new.rfind(b"\n") + 1]  # a line is being written
                    seen += len(whole)
                    lines = [json.loads(line) for line in whole.splitlines() if EVAL_SCORE.encode() in line]
                    scores += [(line["step"], line[EVAL_SCORE]) for line in lines if EVAL_SCORE in line]
            if run.poll() is None:
                cpu = cpu_seconds(run.pid)
            run.kill()  # its processes end with it; only the time so far is measured
        return scores[1:] or scores, cpu


def trl(python: Path, start: Path, seed: int, score: float) -> tuple[list[tuple[int, float]], float]:
    train, heldout = addition(seed, HELDOUT)
    problems = {name: [(e.prompt, e.answer) for e in part] for name, part in (("train", train), ("heldout", heldout))}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**problems, "seed": seed, "score": score, "steps": STEPS, "interval": INTERVAL}, file)
        file.flush()
        command = [str(python), str(SCRIPTS / "bench" / "score_trl.py"), str(start), file.name]
        env = {**os.environ, **ENV, "PYTHONPATH": str(SCRIPTS)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")], cpu


def rows_of_commit(rows: list[dict[str, str]], commit: str) -> list[dict[str, str]]:
    """Return the rows that one commit has measured, or raise if there are none: commits are not to be pooled."""
    own = [row for row in rows if commit and row["commit"].startswith(commit)]
    if not own:
        measured = ", ".join(dict.fromkeys(row["commit"] for row in rows)) or "none"
        raise SystemExit(f"--commit: expected a commit that has been measured ({measured}), found {commit!r}")
    return own


def summary(rows: list[dict[str, str]]) -> list[str]:
    """Return a line per way: how many runs reached the score, and the median of their seconds; then the median of each
    seed's ratio to TRL, which starts from the same policy. Several runs of a seed count as their median."""
    lines, by_seed = [], dict[str, dict[str, float]]()
    for way in dict.fromkeys(row["way"] for row in rows):
        own, reached = [row for row in rows if row["way"] == way], defaultdict[str, list[float]](list)
        for row in own:
            if row["reached"] == "True":
                reached[row["seed"]].append(float(row["seconds"]))
        by_seed[way] = {seed: statistics.median(seconds) for seed, seconds in reached.items()}
        seconds = [each for one in reached.values() for each in one]
        lines.append(f"{way}: {len(seconds)} of {len(own)} reached {own[0]['score']}")
        if seconds:
            lines[-1] += f" after {spread(seconds, '.1f')} s"
    theirs = by_seed.pop(TRL, {})
    for way, mine in by_seed.items():
        if ratios := [mine[seed] / theirs[seed] for seed in mine.keys() & theirs.keys()]:
            lines.append(f"{way} / TRL, by seed: {spread(ratios, '.2f')}")
    return lines


def spread(figures: Collection[float], form: str) -> str:
    """Return the median of figures, and their range."""
    return f"{statistics.median(figures):{form}} ({min(figures):{form}} to {max(figures):{form}})"


if __name__ == "__main__":
    main()
