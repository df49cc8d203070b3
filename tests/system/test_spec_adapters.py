"""Adapters of models that are not made of our blocks, one of which sees: engines compute with the trainers' adapters,
which are merged into an export and resumed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import gemma4, muse_glimmer, seeing
from support.folders import tensors_of
from support.outputs import logprob_gaps
from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.ext.vision import tiny_folder

RANK, ALPHA = 8, 16.0
KEYS: dict[str, Any] = {
    **{"model__name": "auto", "lora__rank": RANK, "lora__alpha": ALPHA, "lora__sync": "adapter"},
    **{"cold_start__steps": 2, "training__steps": 4, "checkpoint__interval": 2, "optimizer__lr": 1e-2},
    **{"eval__size": 0, "generator__replicas": 1, "rollout__max_new_tokens": 6},
    **{"lr_scheduler__warmup_steps": 1, "lr_scheduler__decay_ratio": 0},  # equal steps in a shorter run
}
TENSOR_PARALLEL: dict[str, Any] = {
    **{"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    "generator__tensor_parallel_degree": 2,
}
BITS_16: dict[str, Any] = {"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"}
LAGGING: dict[str, Any] = {"rollout__max_staleness_steps": 1, "optimizer__lr": 1e-4}


def gemma(folder: Path) -> Path:
    keys = gemma4.drawn(7, ranks=2) | {"attention_k_eq_v": True, "final_logit_softcapping": 20.0}
    return gemma4.make_model(folder, keys | {"num_hidden_layers": 2, "layer_types": [gemma4.WINDOW, gemma4.FULL]})


def idefics(folder: Path) -> Path:
    return tiny_folder.write_folder(folder, text=seeing.TEXT)


Model = tuple[Callable[[Path], Path], int, dict[str, Any]]
"""Writes the folder; how many weights have an adapter; keys."""
MODELS: dict[str, Model] = {
    "Gemma 4, keys as values in a layer": (gemma, 6 + 7, {}),
    "Muse Glimmer, with a tower in the folder": (muse_glimmer.make_model, 6 * 8, {}),
    "Idefics 3, with images in prompts": (idefics, 7 * 2, seeing.KEYS),
}
Made = tuple[Path, int, dict[str, Any]]
PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "merged": ({"lora__sync": "merge"}, 1e-4),
    "tensor parallel": (TENSOR_PARALLEL, 1e-4),
    "16 bits and a lag": (BITS_16 | LAGGING, 5e-2),
}


@pytest.fixture(scope="module", params=slow_except(MODELS, 0))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    make, adapted, keys = MODELS[request.param]
    return make(tmp_path_factory.mktemp("adapted") / "model"), adapted, keys


@pytest.fixture(scope="module")
def whole(runs: Runs, model: Made) -> Run:
    """A run whose engines apply the adapters."""
    return adapted_run(runs, model, "whole")


def adapted_run(runs: Runs, model: Made, name: str, **keys: Any) -> Run:
    return runs.finish(model[0].parent / name, model__hf_assets_path=model[0], **(KEYS | model[2] | keys))


def test_engines_apply_the_adapters(whole: Run, model: Made) -> None:
    assert_sampled(whole, 1e-4)
    assert_merged(model, whole.folder / "hf", torch.float32)


@pytest.mark.parametrize("pair", slow_except(PAIRS, 2))
def test_engines_sample_with_the_adapters(runs: Runs, model: Made, pair: str) -> None:
    keys, most = PAIRS[pair]
    run = adapted_run(runs, model, pair, **keys)
    assert_sampled(run, most)
    assert_merged(model, run.folder / "hf", torch.bfloat16 if BITS_16.items() <= keys.items() else torch.float32)


def assert_sampled(run: Run, most: float) -> None:
    gaps = logprob_gaps(run)
    assert len(gaps) == KEYS["training__steps"]
    assert max(gaps) < most


def assert_merged(model: Made, export: Path, dtype: torch.dtype) -> None:
    """Assert that an export is the folder, which the trainer keeps in `dtype`, plus B A of each adapter beside it."""
    before, after = tensors_of(model[0]), tensors_of(export)
    adapters = load_file(export / "adapter" / "adapter_model.safetensors")
    changes = {name for name in adapters if name.endswith("lora_B.weight") and adapters[name].any()}
    assert len(changes) == model[1]
    for name in changes:
        weight = name.removeprefix("base_model.model.").replace("lora_B.", "")
        change = ALPHA / RANK * adapters[name] @ adapters[name.replace("lora_B", "lora_A")]
        torch.testing.assert_close(after.pop(weight), before.pop(weight).to(dtype) + change)
    assert after.keys() == before.keys()
    assert all(torch.equal(w, before[name]) or torch.equal(w, before[name].to(dtype)) for name, w in after.items())


@pytest.mark.slow
def test_a_run_goes_on_to_the_last_bit(runs: Runs, model: Made, whole: Run) -> None:
    adapted_run(runs, model, "parts", training__steps=2)
    parts = adapted_run(runs, model, "parts")
    one, other = (tensors_of(run.folder / "hf") for run in (whole, parts))
    assert all(torch.equal(w, other[name]) for name, w in one.items())


def test_both_kinds_of_export_are_proven(whole: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_rl", "export", str(whole.folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "adapter/ has the adapters for PEFT" in done.stdout, done.stderr


def test_clients_adapters_are_refused(model: Made, tmp_path: Path) -> None:
    keys = {"model.name": "auto", "model.hf_assets_path": model[0], "job.dump_folder": tmp_path / "served"}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "titan_rl", "serve", "--tinker", "--config", "tinker_llama", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2
    assert "model.spec: expected another model with --tinker" in done.stderr
