#!/usr/bin/env python3
"""Measure how grpo_smollm2 learns, next to TRL from the same weights on the same prompts. Appends a row per run.

    .venv/bin/python scripts/bench_smollm2.py                                          # seeds 0 to 4, without TRL
    .venv/bin/python scripts/bench_smollm2.py --trl /tmp/trl/bin/python --seeds 0 1    # with TRL, in turn
    .venv/bin/python scripts/bench_smollm2.py --lora                                   # with grpo_smollm2_lora, in turn
    .venv/bin/python scripts/bench_smollm2.py --plot                                   # only print and plot the CSV

Both take the same number of GRPO steps on the same problems, with the same batch, rate and temperature, and answer the
same held-out problems greedily as often. Seconds count from the command: start-up and evaluations too. Memory is the
peak of the proportional set sizes of all processes of a run, measured at most twice a second. TRL's environment:

    python3 -m venv /tmp/trl
    /tmp/trl/bin/pip install trl==1.16.0 torch==2.13.0+cpu transformers==5.19.0 reasoning-gym==0.1.25
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.axes import COLORS, Axes, legend, look_of, svg
from bench.peak_memory import run_and_measure
from bench.rows import BENCHMARKS, append_rows, csv_rows, curve_columns, metric_lines, points_of, ran_on, run_command
from bench.step_ways import ENV, engines_of
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.ext.reasoning_gym.problems import Unfit, procedural
from titan_rl.preflight.pretrained import with_models
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.tasks.rewards import NUMBER
from titan_rl.wire.seeds import derive

CONFIG = "grpo_smollm2"
OURS, LORA, TRL = "titan_rl", "titan_rl, LoRA", "TRL"
CONFIGS = {OURS: CONFIG, LORA: f"{CONFIG}_lora"}
PROGRAM = Path(__file__).resolve().parent / "bench" / "smollm2_trl.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="an interpreter that has TRL. Without it, TRL is not measured")
    parser.add_argument("--lora", action="store_true", help="also measure grpo_smollm2_lora")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "smollm2.csv")
    parser.add_argument("--plot", action="store_true", help="only print and plot the CSV")
    a = parser.parse_args()
    for seed in [] if a.plot else a.seeds:
        for way in (OURS, *([LORA] if a.lora else []), *([TRL] if a.trl else [])):
            row = {"way": way, "seed": seed, **measured(way, seed, a.steps, a.trl), **ran_on()}
            append_rows(a.csv, [row | ({"engines": engines_of(a.trl)} if way == TRL else {})])
            print(f"seed {seed}, {way}: {row['curve']}; {row['step_s']} s a step, {row['peak_gib']} GiB", flush=True)
    rows = csv_rows(a.csv)
    print("\n".join(summary(rows)))
    for unit in ("step", "seconds"):
        a.csv.with_name(f"{a.csv.stem}_by_{unit}.svg").write_text(plot(rows, unit))


def measured(way: str, seed: int, steps: int | None, trl: Path | None) -> dict[str, Any]:
    """Return the scores, seconds and peak memory of one run."""
    keys = {"debug.seed": str(seed)} | ({"training.steps": str(steps)} if steps else {})
    name = CONFIGS.get(way, CONFIG)
    config = with_models(load(find(name), list(keys.items())))
    load_before = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as folder:
        if way in CONFIGS:
            command = run_command({**keys, "job.dump_folder": folder}, config=name)
            began = time.time()
            peak = run_and_measure(command, {**CONTROLLER_ENV, **os.environ}, Path(folder) / "log")
            lines = metric_lines(Path(folder), "eval", "rl")
            points = [(line["step"], line["time"] - began, line[EVAL_SCORE]) for line in lines if EVAL_SCORE in line]
            took = [line["time/step"] for line in lines if line["kind"] == "rl"]
        else:
            given, log = Path(folder) / "given.json", Path(folder) / "log"
            given.write_text(json.dumps({**same_for_trl(config), "began": time.time()}))
            env = {**os.environ, **ENV, "PYTHONPATH": str(PROGRAM.parents[1])}
            peak = run_and_measure([str(trl), str(PROGRAM), str(given)], env, log)
            found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
            points = [(each["step"], each["seconds"], each["score"]) for each in found if "score" in each]
            took = [each["took"] for each in found if "took" in each]
    return {
        "steps": config.training.steps,
        **curve_columns(points),
        "step_s": f"{statistics.median(took):.2f}",
        "peak_gib": f"{peak / 2**30:.2f}",
        "load_before": load_before,
    }


def same_for_trl(config: Config) -> dict[str, Any]:
    """Return the problems and the settings of a run as TRL's program reads them."""
    train, heldout = procedural(config.task, derive(config.debug.seed, "task"), config.eval.size)
    passed = Unfit(train, heldout, lambda _: True)
    count, places = config.training.steps * config.rollout.groups_per_step, range(10**6)
    indices = [index for index in places[: 4 * count] if index not in passed][:count]
    system = [{"role": "system", "content": config.task.system_prompt}] if config.task.system_prompt else []

    def shown(example: Any) -> dict[str, Any]:
        return {"prompt": [*system, {"role": "user", "content": example.prompt}], **example.row}

    return {
        "folder": config.model.hf_assets_path,
        "train": [shown(train[index]) for index in indices],
        "heldout": [shown(example) for example in heldout],
        "number": NUMBER.pattern,
        "extract": config.task.reward_args.get("extract", "tag"),
        **{name: asdict(getattr(config, name)) for name in ("rollout", "training", "optimizer", "algorithm", "eval")},
        "seed": config.debug.seed,
    }


def summary(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line per way: scores, seconds of a step and memory as medians and ranges. Then the ratios to TRL, over
    the seeds that both ran."""
    lines = list[str]()
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        gains = [float(row["final"]) - float(row["start"]) for row in own]
        lines.append(
            f"{way}: {len(own)} runs, start {spread([float(row['start']) for row in own])}, end "
            f"{spread([float(row['final']) for row in own])}, gain at least {min(gains):.3f}; "
            f"{spread([float(row['step_s']) for row in own])} s a step, "
            f"{spread([run_seconds(row) for row in own])} s in all, "
            f"{spread([float(row['peak_gib']) for row in own])} GiB at most"
        )
    by_way = {way: {row["seed"]: row for row in rows if row["way"] == way} for way in (OURS, TRL)}
    pairs = [(own, by_way[TRL][seed]) for seed, own in by_way[OURS].items() if seed in by_way[TRL]]
    if pairs:
        steps = spread([float(own["step_s"]) / float(trl["step_s"]) for own, trl in pairs])
        whole = spread([run_seconds(own) / run_seconds(trl) for own, trl in pairs])
        lines.append(f"{OURS} / {TRL}: step {steps}, whole run {whole}")
    return lines


def run_seconds(row: Mapping[str, str]) -> float:
    """Return the seconds from the command to the last evaluation."""
    return max(points_of(row["seconds"]).values())


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def plot(rows: Sequence[Mapping[str, str]], unit: str) -> str:
    """Draw the held-out score of every run by `unit`, "step" or "seconds", in the color of its way."""
    curves = list[tuple[str, dict[int, float]]]()
    for row in rows:
        scores, seconds = points_of(row["curve"]), points_of(row["seconds"])
        at = {step: step if unit == "step" else round(seconds[step]) for step in scores}
        curves.append((row["way"], {at[step]: score for step, score in scores.items()}))
    axes = Axes(most=max(x for _, curve in curves for x in curve), floor=0.0)
    ways = dict.fromkeys(way for way, _ in curves)
    color = dict(zip(ways, COLORS[1:], strict=False))
    drawn = axes.grid(f"{CONFIG}: held-out score by {unit}, {len(curves)} runs", unit)
    drawn += [axes.line(curve, look_of(color[way])) for way, curve in curves]
    for place, way in enumerate(ways):
        drawn += legend(place, way, look_of(color[way]))
    return svg(drawn)


if __name__ == "__main__":
    main()
