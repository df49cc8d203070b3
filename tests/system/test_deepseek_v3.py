"""DeepSeek V3 with experts in whole runs, by its folder alone: engines compute with the trainers' weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.deepseek_v3 import drawn, make_model
from support.outputs import logprob_gaps, losses_of_examples
from support.running import Runs
from support.slow_cases import slow_except
from titan_rl.wire.model_shape import ROUTE_BIAS

GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
IN_16_BITS = {"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16", "optimizer__lr": 1e-5}
PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "two ranks of trainer and engine": (
        {
            **{"generator__tensor_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2},
            **{"parallelism__data_parallel_shard_degree": 1, "optimizer__lr": 1e-2},
        },
        1e-4,
    ),
    "experts dealt to ranks": ({"parallelism__expert_parallel_degree": 2, "optimizer__lr": 1e-2}, 1e-4),
    "16 bits, a lag, and the engine's experts": (
        {**IN_16_BITS, "rollout__max_staleness_steps": 1, "algorithm__routing_replay": True},
        5e-2,
    ),
}


@pytest.mark.parametrize("pair", slow_except(PAIRS, 0, 2))
def test_engines_sample_with_the_trainers_weights(runs: Runs, tmp_path: Path, pair: str) -> None:
    keys, most = PAIRS[pair]
    model = drawn(2) | GROUPS | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 48}
    folder = make_model(tmp_path / "model", model)
    keys |= {"model__name": "auto", "model__hf_assets_path": folder}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=2, training__steps=3)
    gaps = logprob_gaps(run)
    assert len(gaps) == 3
    assert max(gaps) < most
    (file,) = (run.folder / "hf").glob("*.safetensors")
    before, after = load_file(folder / "model.safetensors"), load_file(file)
    assert after.keys() == before.keys()
    biases = [name for name in before if name.endswith(ROUTE_BIAS)]
    assert biases, "two layers have experts"
    assert all(torch.equal(after[name], before[name]) for name in biases)
    moved = [name for name, w in after.items() if not torch.equal(w.float(), before[name])]
    assert any(".mlp.experts.0." in name for name in moved)
    assert json.loads((run.folder / "hf" / "config.json").read_text())["n_group"] == model["n_group"]


def test_adapters_beside_experts_are_merged(runs: Runs, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", drawn(2) | GROUPS | {"num_hidden_layers": 3, "first_k_dense_replace": 1})
    keys = {"model__name": "auto", "model__hf_assets_path": folder, "lora__rank": 8}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=0, training__steps=3, optimizer__lr=1e-2)
    assert max(logprob_gaps(run)) < 1e-4
    (file,) = (run.folder / "hf").glob("*.safetensors")
    before, after = load_file(folder / "model.safetensors"), load_file(file)
    moved = [name for name, w in after.items() if not torch.equal(w, before[name])]
    assert moved
    assert all(".self_attn." in name for name in moved)


MESHES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    "experts dealt to tensor-parallel ranks": {
        **{"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
        "parallelism__expert_parallel_degree": 2,
    },
    "experts dealt to ranks": {"parallelism__expert_parallel_degree": 2},
}


def test_steps_are_those_of_two_ranks(runs: Runs, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", drawn(5))
    keys: dict[str, Any] = {"model__name": "auto", "model__hf_assets_path": folder, "eval__size": 0, "small": False}
    keys |= {"training__steps": 3, "training__global_batch_size": 8, "optimizer__lr": 3e-3}

    def steps(name: str, **mesh: Any) -> torch.Tensor:
        run = runs.finish(tmp_path / name, "sft_llama", **keys, **mesh)
        lines = [line for line in run.lines("metrics.jsonl", "fit") if "loss" in line]
        assert len(lines) == 3
        return torch.tensor([(line["loss"], line["grad_norm"], line["router/imbalance"]) for line in lines])

    usual = steps("usual")
    for name, mesh in MESHES.items():
        torch.testing.assert_close(steps(name, **mesh), usual, rtol=5e-4, atol=0, msg=name)


@pytest.mark.slow
def test_it_learns(runs: Runs, tmp_path: Path) -> None:
    found = losses_of_examples(runs, tmp_path, make_model(tmp_path / "model", drawn(3)))
    assert found[-1] < 0.5 * found[0]
