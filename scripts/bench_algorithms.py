#!/usr/bin/env python3
"""Compare algorithms on a task: whole runs of one config over presets of [algorithm] and seeds. Appends a row per run.

    .venv/bin/python scripts/bench_algorithms.py                                     # grpo_llama, 12 presets, 3 seeds
    .venv/bin/python scripts/bench_algorithms.py --config calc_llama                 # several turns
    .venv/bin/python scripts/bench_algorithms.py --config grpo_smollm2_lora --seeds 0 1              # 6 presets
    .venv/bin/python scripts/bench_algorithms.py --config my_task.toml --algorithms grpo gspo --training.steps 100
    .venv/bin/python scripts/bench_algorithms.py --plot                              # only print and plot the CSV

A run has the keys of the config, with the preset in place of its [algorithm], and two updates per step: in the first
every ratio is 1, and presets that differ in their gates alone are the same. All presets have the same rate: the figure
compares them as they ship, not each at its best rate. Seconds count from the command, start-up and evaluations
included, on the machine that the CSV names; presets run in turn, so that a busy hour slows them alike.

A row is appended after each run. After Ctrl-C the same command makes the runs that have no row yet. A row belongs to a
config, a preset, a seed, a number of steps, and the keys of the command. Files in docs/benchmarks: algorithms.csv,
algorithms_CONFIG_by_step.svg and algorithms_CONFIG_by_seconds.svg.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

from bench.axes import COLORS, Axes, legend, look_of, svg
from bench.rows import (
    BENCHMARKS,
    CONFIG,
    append_rows,
    csv_rows,
    curve_columns,
    metric_lines,
    points_of,
    ran_on,
    run_to_end,
)
from titan_rl.config.algorithms import PRESETS
from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, find, load, to_toml
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.tools.deployed import overrides_of
from titan_rl.tools.refused_input import UsageError

ALGORITHMS = (
    *("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl", "ppo"),  # baselines
    *("dapo", "gspo", "cispo", "sapo", "dppo", "kl_cov"),  # gates
)
"""Presets that need nothing but a task, whose rewards are at least 0 (maxrl)."""
FEWER = {"grpo_smollm2_lora": ("grpo", "rloo", "dapo", "gspo", "cispo", "sapo")}
"""Presets by default for configs whose runs take long."""
NEARLY = 0.9  # share of the best last score, whose time the summary names
TICKS = 4  # the longest curve's steps or seconds are rounded up to a multiple, so that ticks are whole numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=CONFIG, help="a shipped config, or your own file")
    parser.add_argument("--algorithms", nargs="+", choices=list(PRESETS), metavar="NAME", help="default: 12, or 6")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minibatches", type=int, default=2, help="updates per step")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "algorithms.csv")
    parser.add_argument("--plot", action="store_true", help="only print and plot the CSV")
    a, others = parser.parse_known_args()
    name = Path(a.config).stem
    try:
        overrides = overrides_of(others)
        configs = configs_of(a.config, a.algorithms or FEWER.get(name, ALGORITHMS), overrides, a.minibatches)
        if not a.plot and (problems := refused(configs)):
            raise ConfigError(problems)
    except (ConfigError, UsageError) as error:
        print(error, file=sys.stderr)
        return 2
    keys = " ".join(f"{key}={value}" for key, value in [("algorithm.minibatches", a.minibatches), *overrides])
    if not a.plot:
        try:
            measure(a.csv, {"config": name, "keys": keys}, configs, a.seeds)
        except KeyboardInterrupt:
            print("stopped; the same command continues", file=sys.stderr)
            return 130
    rows = [row for row in csv_rows(a.csv) if (row["config"], row["keys"]) == (name, keys)]
    if not rows:
        print(f"{a.csv} has no run of {name} with {keys}", file=sys.stderr)
        return 1
    print("\n".join(summary(rows)))
    for unit in ("step", "seconds"):
        a.csv.with_name(f"{a.csv.stem}_{name}_by_{unit}.svg").write_text(plot(rows, unit))
    return 0


def configs_of(
    file: str, algorithms: Sequence[str], overrides: Sequence[tuple[str, str]], minibatches: int
) -> dict[str, Config]:
    """Return the config of each algorithm: the file's, with the preset in place of its [algorithm]. A critic without a
    rate has the policy's."""
    config = load(find(file), overrides)
    own = {key.removeprefix("algorithm."): value for key, value in overrides if key.startswith("algorithm.")}
    if own:
        raise ConfigError([f"--algorithm.{key}: expected no key of [algorithm]: presets are compared" for key in own])
    configs = dict[str, Config]()
    for name in algorithms:
        algorithm = algorithm_of({"name": name, "minibatches": minibatches}, config)
        critic = config.critic
        if algorithm.needs_critic and not critic.lr:
            critic = replace(critic, lr=config.optimizer.lr)
        configs[name] = replace(config, algorithm=algorithm, critic=critic)
    return configs


def refused(configs: Mapping[str, Config]) -> list[str]:
    """Return the refusal of each config that fails a dry run."""
    problems = list[str]()
    for algorithm, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "titan_rl.run", "--config", written(config, Path(folder), 0), "--dry-run"],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            problems.append(f"{algorithm}: {done.stderr.strip()}")
    return problems


def written(config: Config, folder: Path, seed: int) -> str:
    """Write a config for a run in `folder`, and return its path."""
    job, debug = replace(config.job, dump_folder=str(folder / "run")), replace(config.debug, seed=seed)
    path = folder / "config.toml"
    path.write_text(to_toml(replace(config, job=job, debug=debug)), encoding="utf-8")
    return str(path)


def measure(path: Path, common: Mapping[str, str], configs: Mapping[str, Config], seeds: Sequence[int]) -> None:
    """Make the runs without a row, seed by seed, and append a row after each. `common`: columns of all rows."""
    there = {key_of(row) for row in csv_rows(path)}
    for seed in seeds:
        for algorithm, config in configs.items():
            what = {**common, "algorithm": algorithm, "seed": str(seed), "steps": str(config.training.steps)}
            if key_of(what) not in there:
                row = what | measured(config, seed)
                append_rows(path, [row | ran_on()])
                print(f"{algorithm}, seed {seed}: {row['curve']}; {row['step_s']} s a step", flush=True)


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[column] for column in ("config", "keys", "algorithm", "seed", "steps"))


def measured(config: Config, seed: int) -> dict[str, Any]:
    """Return the scores of one run by step, and the seconds at which each was known."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        run_to_end({}, config=written(config, Path(folder), seed))
        lines = metric_lines(Path(folder) / "run", "eval", "rl", "fit")
    points = [(line["step"], line["time"] - began, line[EVAL_SCORE]) for line in lines if EVAL_SCORE in line]
    trained = sorted(line["time/step"] for line in lines if "time/step" in line)
    return {
        **curve_columns(points),
        "step_s": f"{trained[len(trained) // 2]:.3f}",
    }


def summary(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line per algorithm, the best first: held-out scores before and after, the highest, and seconds of a
    step, each as the mean and the range over seeds; and when the mean score reaches NEARLY times the best last one."""
    best = {algorithm: mean([float(row["final"]) for row in own]) for algorithm, own in by_algorithm(rows).items()}
    for algorithm, own in sorted(by_algorithm(rows).items(), key=lambda item: -best[item[0]]):
        columns = {
            "start": [float(row["start"]) for row in own],
            "end": [float(row["final"]) for row in own],
            "highest": [max(points_of(row["curve"]).values()) for row in own],
            "s a step": [float(row["step_s"]) for row in own],
        }
        figures = (f"{title} {mean(each):.3f} ({min(each):.3f} to {max(each):.3f})" for title, each in columns.items())
        scores, target = mean_curve(own, "step"), NEARLY * max(best.values())
        first = next((step for step, score in scores.items() if score >= target), None)
        seconds = [] if first is None else [points_of(row["seconds"])[first] for row in own]
        when = f"at step {first}, after {mean(seconds):.0f} s" if seconds else "not reached"
        yield f"{algorithm}: {len(own)} runs, {', '.join(figures)}, {target:.3f} {when}"


def by_algorithm(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    return {name: [row for row in rows if row["algorithm"] == name] for name in {row["algorithm"]: 0 for row in rows}}


def plot(rows: Sequence[Mapping[str, str]], unit: str) -> str:
    """Draw each algorithm's held-out score, the mean over its seeds, by "step" or by mean "seconds"."""
    curves = {algorithm: mean_curve(own, unit) for algorithm, own in by_algorithm(rows).items()}
    least = min(score for curve in curves.values() for score in curve.values())
    most = TICKS * ceil(max(x for curve in curves.values() for x in curve) / TICKS)
    axes = Axes(most=most, floor=int(least * 10) / 10)
    drawn = axes.grid(f"{rows[0]['config']}: held-out score by {unit}, mean of {len(rows) // len(curves)} seeds", unit)
    for place, (algorithm, curve) in enumerate(curves.items()):
        look = look_of(COLORS[place % len(COLORS)], dashed=place >= len(COLORS))
        drawn += [axes.line(curve, look), *legend(place, algorithm, look)]
    return svg(drawn)


def mean_curve(rows: Sequence[Mapping[str, str]], unit: str) -> dict[int, float]:
    """Return the mean score of the runs of one algorithm at each step, by step or by the mean seconds until then."""
    scores, seconds = ([points_of(row[column]) for row in rows] for column in ("curve", "seconds"))
    steps = sorted(set.intersection(*(set(each) for each in scores)))
    at = {step: step if unit == "step" else round(mean([each[step] for each in seconds])) for step in steps}
    return {at[step]: mean([each[step] for each in scores]) for step in steps}


if __name__ == "__main__":
    sys.exit(main())
