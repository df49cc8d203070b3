"""Qwen3.5 in whole runs, by its folder alone: it learns, equally on every mesh, and engines compute with the trainers'
weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.folders import tensors_of
from support.outputs import logprob_gaps
from support.qwen3_5 import drawn, make_model
from support.running import Run, Runs
from support.slow_cases import slow_except

PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "two ranks of trainer and engine, and a tower": (
        {
            **{"generator__tensor_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2},
            **{"parallelism__data_parallel_shard_degree": 1, "optimizer__lr": 1e-2},
        },
        1e-4,
    ),
    "16 bits and a lag": (
        {
            **{"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
            **{"rollout__max_staleness_steps": 1, "optimizer__lr": 1e-5},
        },
        5e-2,
    ),
}


@pytest.mark.parametrize("pair", slow_except(PAIRS, 1))
def test_engines_sample_with_the_trainers_weights(runs: Runs, tmp_path: Path, pair: str) -> None:
    keys, most = PAIRS[pair]
    folder = make_model(tmp_path / "model", drawn(7, ranks=2), tower="tower" in pair)
    keys |= {"model__name": "auto", "model__hf_assets_path": folder}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=2, training__steps=3)
    gaps = logprob_gaps(run)
    assert len(gaps) == 3
    assert max(gaps) < most
    before, after = tensors_of(folder), tensors_of(run.folder / "hf")
    assert {name: w.shape for name, w in after.items()} == {name: w.shape for name, w in before.items()}
    kept = {name for name, w in after.items() if torch.equal(w.float(), before[name])}
    assert kept == {name for name in before if "visual" in name}


STEPS: dict[str, Any] = {
    **{"model__name": "auto", "eval__size": 0, "small": False, "lr_scheduler__warmup_steps": 1},
    **{"training__global_batch_size": 8, "training__steps": 4, "optimizer__lr": 3e-3, "lr_scheduler__decay_ratio": 0},
}
TP: dict[str, Any] = {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1}


def steps(run: Run) -> torch.Tensor:
    return torch.tensor(
        [(line["loss"], line["grad_norm"]) for line in run.lines("metrics.jsonl", "fit") if "loss" in line]
    )


def test_steps_are_those_of_two_ranks(runs: Runs, tmp_path: Path) -> None:
    keys = {**STEPS, "model__hf_assets_path": make_model(tmp_path / "model", drawn(2, ranks=2))}
    usual = steps(runs.finish(tmp_path / "usual", "sft_llama", **keys))
    assert len(usual) == 4
    torch.testing.assert_close(steps(runs.finish(tmp_path / "tp", "sft_llama", **keys, **TP)), usual, rtol=5e-4, atol=0)


@pytest.mark.slow
def test_it_learns(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**STEPS, "training__steps": 80, "training__global_batch_size": 64}
    keys["model__hf_assets_path"] = make_model(tmp_path / "model", drawn(3))
    losses = steps(runs.finish(tmp_path / "run", "sft_llama", **keys))[:, 0]
    assert losses[-1] < 0.5 * losses[0]


def test_a_folder_with_a_tower_is_evaluated(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", drawn(1), tower=True)
    command = [sys.executable, "-m", "titan_rl", "eval", str(folder), "--config", "grpo_llama", "--size", "4", "--json"]
    assert "heldout" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
