"""Learning curves at several lags, with and without an off-policy correction, from equal cold starts."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rows import append_rows, csv_rows, ran_on
from bench.runs import CONFIG, metric_lines, run_to_end
from titan_rl.config.toml import find, load
from titan_rl.record.metrics import EVAL_SCORE

LOOK = 5  # steps between evaluations
UNCORRECTED = {"algorithm.proximal": "trainer", "algorithm.correction": "none"}
Key = tuple[int, int, str]  # seed, lag, correction


def learning(path: Path, folder: Path, seeds: int, steps: int, lags: Sequence[int]) -> None:
    """Measure the curves that are not complete in the CSV. No run is paced, so tokens are as old as the lag allows."""
    for (seed, lag, correction), keys in missing(csv_rows(path), seeds, steps, lags).items():
        began = time.monotonic()
        curve = learnt(cold_started(folder / f"seed{seed}", seed), seed, steps, keys)
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
            keys = {"rollout.lag": lag, "rollout.pace": "false"}
            if lag:
                found[seed, lag, "default"] = keys
            found[seed, lag, "none"] = keys | (UNCORRECTED if lag else {})
    return {key: keys for key, keys in found.items() if key not in there}


def cold_started(folder: Path, seed: int) -> Path:
    """Return the Hugging Face folder that every run of a seed starts from; a finished cold start is not repeated."""
    run_to_end({"training.steps": 0, "debug.seed": seed, "job.dump_folder": folder})
    return folder / "hf"


def learnt(start: Path, seed: int, steps: int, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "model.hf_assets_path": start,
            "cold_start.steps": 0,
            "training.steps": steps,
            "eval.interval": LOOK,
            "debug.seed": seed,
            "job.dump_folder": folder,
            "checkpoint.enable": "false",
            "metrics.enable_tensorboard": "false",
            **keys,
        }
        run_to_end(keys)
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
