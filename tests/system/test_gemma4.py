"""Gemma 4 in whole runs, by its folder alone: it learns, and engines compute with the trainers' weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.gemma4 import drawn, make_model
from support.running import Runs

PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "two ranks of trainer and engine, keys as values": (
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


@pytest.mark.parametrize("pair", PAIRS)
def test_engines_sample_with_the_trainers_weights(runs: Runs, tmp_path: Path, pair: str) -> None:
    keys, most = PAIRS[pair]
    model = drawn(7, ranks=2) | {"attention_k_eq_v": "as values" in pair, "final_logit_softcapping": 20.0}
    folder = make_model(tmp_path / "model", model)
    keys |= {"model__name": "auto", "model__hf_assets_path": folder}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=2, training__steps=3)
    gaps = [line["logprob_gap/mean"] for line in run.lines("metrics.jsonl") if "logprob_gap/mean" in line]
    assert len(gaps) == 3
    assert max(gaps) < most
    (file,) = (run.folder / "hf").glob("*.safetensors")
    before, after = load_file(folder / "model.safetensors"), load_file(file)
    assert after.keys() == before.keys()
    kept = {name for name, w in after.items() if torch.equal(w.float(), before[name])}
    assert {name for name in before if "layer_scalar" in name} <= kept


def test_it_learns(runs: Runs, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", drawn(3))
    keys: dict[str, Any] = {"model__name": "auto", "model__hf_assets_path": folder, "eval__size": 0, "small": False}
    keys |= {"training__steps": 80, "training__global_batch_size": 64, "optimizer__lr": 3e-3}
    run = runs.finish(tmp_path / "run", "sft_llama", **keys)
    losses = [line["loss"] for line in run.lines("metrics.jsonl", "fit") if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
