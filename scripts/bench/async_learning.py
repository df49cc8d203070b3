"""Learning curves by lag, with and without an off-policy correction, from equal cold starts; and their plot."""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.axes import COLORS, Axes, legend, look_of, svg
from bench.rows import CONFIG, append_rows, csv_rows, metric_lines, ran_on, run_to_end
from titan_rl.config.toml import find, load
from titan_rl.record.metric_docs import EVAL_SCORE

LAGS = (0, 1, 2, 4)
LOOK = 5  # steps between evaluations
CORRECTED = {"algorithm.proximal": "trainer", "algorithm.correction": "token_tis"}
UNCORRECTED = CORRECTED | {"algorithm.correction": "none"}
Key = tuple[int, int, str]  # seed, lag, correction


def learning(path: Path, folder: Path, seeds: int, steps: int) -> None:
    """Measure the curves that are not complete in the CSV."""
    for (seed, lag, correction), keys in missing(csv_rows(path), seeds, steps, LAGS).items():
        began = time.monotonic()
        start = folder / f"seed{seed}"  # every run of a seed starts from it; a finished cold start is not repeated
        run_to_end({"training.steps": 0, "debug.seed": seed, "job.dump_folder": start})
        curve = learnt(start / "hf", seed, steps, keys)
        common = {"seed": seed, "lag": lag, "correction": correction}
        append_rows(path, [common | point | ran_on() for point in curve])
        took, last = time.monotonic() - began, curve[-1]["score"]
        print(f"seed {seed}, lag {lag}, correction {correction}: {last} after {steps} steps, {took:.0f} s", flush=True)


def missing(
    rows: Sequence[Mapping[str, str]], seeds: int, steps: int, lags: Sequence[int]
) -> dict[Key, dict[str, Any]]:
    """Return the config keys of each run to make. Without a lag there is nothing to correct."""
    there = {(int(row["seed"]), int(row["lag"]), row["correction"]) for row in rows if int(row["step"]) == steps}
    found: dict[Key, dict[str, Any]] = {}
    for seed in range(seeds):
        for lag in lags:
            keys = {"rollout.max_staleness_steps": lag}
            if lag:
                found[seed, lag, "corrected"] = keys | CORRECTED
            found[seed, lag, "none"] = keys | (UNCORRECTED if lag else {})
    return {key: keys for key, keys in found.items() if key not in there}


def learnt(start: Path, seed: int, steps: int, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "model.hf_assets_path": start,
            "cold_start.steps": 0,
            "training.steps": steps,
            "eval.interval": LOOK,
            "debug.seed": seed,
            "job.dump_folder": folder,
            "checkpoint.enable": "false",
            "metrics.trackers": "[]",
        }
        run_to_end({**own, **keys})
        lines = metric_lines(Path(folder), "eval", "rl")
    groups = load(find(CONFIG), []).rollout
    return [
        {
            "step": line["step"],
            "samples": line["step"] * groups.groups_per_step * groups.group_size,
            "score": f"{line[EVAL_SCORE]:.4f}",
            "reward": f"{line['reward/mean']:.4f}" if "reward/mean" in line else "",
            "policy_age": f"{line['policy_age/mean']:.2f}" if "policy_age/mean" in line else "",
        }
        for line in lines
        if EVAL_SCORE in line
    ]


def plot(rows: Sequence[Mapping[str, str]]) -> str:
    """Draw the mean score over the seeds by samples. A dashed line has no correction."""
    scores: dict[tuple[int, str], dict[int, list[float]]] = {}
    for row in rows:
        line = scores.setdefault((int(row["lag"]), row["correction"]), {})
        line.setdefault(int(row["samples"]), []).append(float(row["score"]))
    lines = {key: {x: statistics.fmean(ys) for x, ys in points.items()} for key, points in sorted(scores.items())}
    most = max(x for points in lines.values() for x in points) or 1
    least = min(y for points in lines.values() for y in points.values())
    axes = Axes(most, floor=max(0.0, int(least * 10) / 10))
    seeds = max(len(ys) for points in scores.values() for ys in points.values())
    drawn = axes.grid(f"Held-out score by samples seen, mean of {seeds} seeds", "samples")
    color = dict(zip(sorted({lag for lag, _ in lines}), COLORS, strict=False))
    for place, ((lag, correction), points) in enumerate(lines.items()):
        dashed = bool(lag) and correction == "none"
        look = look_of(color[lag], dashed=dashed)
        drawn += [axes.line(points, look), *legend(place, f"lag {lag}" + (", uncorrected" if dashed else ""), look)]
    return svg(drawn)
