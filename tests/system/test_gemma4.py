"""Gemma 4 in whole runs, by its folder alone: it learns, and engines compute with the trainers' weights."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.folders import tensors_of
from support.gemma4 import add_unused, drawn, drawn_small, gradient_gaps, make_model
from support.gloo_ranks import on_ranks
from support.outputs import logprob_gaps, losses_of_examples
from support.running import Runs
from support.slow_cases import slow_except

LAG: dict[str, Any] = {
    **{"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
    **{"rollout__max_staleness_steps": 1, "optimizer__lr": 1e-5},
}
TWO_RANKS: dict[str, Any] = {
    **{"generator__tensor_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2},
    **{"parallelism__data_parallel_shard_degree": 1, "optimizer__lr": 1e-2},
}
VALUES = {"attention_k_eq_v": True, "final_logit_softcapping": 20.0}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any], float]] = {
    # keys of config.json, towers, keys of the run, and the most that log-probs of trainer and engine differ
    "two ranks of trainer and engine, keys as values": (drawn(7, ranks=2) | VALUES, (), TWO_RANKS, 1e-4),
    "16 bits and a lag": (drawn(7, ranks=2), (), LAG, 5e-2),
    "two ranks of both, small, with towers": (drawn_small(3, ranks=2), ("vision", "audio"), TWO_RANKS, 1e-4),
    "16 bits and a lag, small": (drawn_small(5), (), LAG, 5e-2),
    "16 bits and a lag, with a tower": (drawn(7) | VALUES, ("vision",), LAG, 5e-2),
}


@pytest.mark.parametrize("pair", slow_except(PAIRS, 4))
def test_engines_sample_with_the_trainers_weights(runs: Runs, tmp_path: Path, pair: str) -> None:
    model, towers, keys, most = PAIRS[pair]
    folder = make_model(tmp_path / "model", model, towers=towers)
    if towers and model.get("num_kv_shared_layers"):
        add_unused(folder)
    keys = keys | {"model__name": "auto", "model__hf_assets_path": folder}
    run = runs.finish(tmp_path / "run", **keys, cold_start__steps=2, training__steps=3)
    gaps = logprob_gaps(run)
    assert len(gaps) == 3
    assert max(gaps) < most
    before, after = tensors_of(folder), tensors_of(run.folder / "hf")
    assert {name: w.shape for name, w in after.items()} == {name: w.shape for name, w in before.items()}
    kept = {name for name, w in after.items() if torch.equal(w.float(), before[name])}
    frozen = {name for name in before if re.search("layer_scalar|tower|embed_vision|embed_audio", name)}
    assert frozen <= kept
    assert any(w.dim() == 0 for w in after.values()) == ("audio" in towers)
    theirs: Any = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    _, loading = theirs.from_pretrained(run.folder / "hf", output_loading_info=True)
    assert not any(loading.values())


@pytest.mark.slow
def test_it_learns(runs: Runs, tmp_path: Path) -> None:
    found = losses_of_examples(runs, tmp_path, make_model(tmp_path / "model", drawn(3)))
    assert found[-1] < 0.5 * found[0]


MESHES = {"tensor parallel": (2, 1, "none"), "context parallel": (1, 2, "none"), "recomputed": (2, 1, "full")}


@pytest.mark.parametrize("mesh", slow_except(MESHES, 1))
def test_gradients_of_ranks_are_transformers(tmp_path: Path, mesh: str) -> None:
    folder = make_model(tmp_path / "model", drawn_small(3, ranks=2), towers=("vision",))
    gaps = on_ranks(2, gradient_gaps, str(folder), *MESHES[mesh])
    assert sum("per_layer" in name for name in gaps) == 3 + 3 * 5
    assert max(gaps.values()) < 3e-4  # transformers' own in float32 and float64 differ by 5e-4


def test_folders_on_the_hub_are_evaluated(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", drawn_small(3), towers=("vision", "audio"))
    add_unused(folder)
    command = [sys.executable, "-m", "titan_rl", "eval", str(folder), "--config", "grpo_llama", "--size", "4", "--json"]
    assert "heldout" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
