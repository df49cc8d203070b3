"""TorchTitan's Muse Glimmer in whole runs: it learns, equally on every mesh, and its export is a folder like the one it
began from."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.folders import tensors_of
from support.muse_glimmer import make_model, transformers_model
from support.running import Run, Runs
from support.slow_cases import slow_except

STEPS = 4
KEYS: dict[str, Any] = {
    **{"model__name": "auto", "eval__size": 0, "training__global_batch_size": 8, "training__steps": STEPS},
    **{"checkpoint__interval": 2, "optimizer__lr": 3e-3, "small": False},
    **{
        "lr_scheduler__warmup_steps": 1,
        "lr_scheduler__decay_ratio": 0,
        "cold_start__stop_at": 0,
        "cold_start__steps": 0,
    },
}
MESHES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    "context parallel": {"parallelism__context_parallel_degree": 2, "parallelism__data_parallel_shard_degree": 1},
    "recomputed in bfloat16": {"training__mixed_precision_param": "bfloat16", "activation_checkpoint__mode": "full"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("muse") / "model")


@pytest.fixture(scope="module")
def usual(runs: Runs, folder: Path) -> Run:
    """On two FSDP2 ranks."""
    return trained(runs, folder, "usual")


def trained(runs: Runs, folder: Path, name: str, config: str = "sft_llama", **keys: Any) -> Run:
    return runs.finish(folder.parent / name, config, model__hf_assets_path=folder, **(KEYS | keys))


def steps(run: Run) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in run.lines("metrics.jsonl", "fit") if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_those_of_two_ranks(runs: Runs, folder: Path, usual: Run, mesh: str) -> None:
    found, expected = torch.tensor(steps(trained(runs, folder, mesh, **MESHES[mesh]))), torch.tensor(steps(usual))
    assert len(found) == STEPS
    if "bfloat16" in mesh:  # Adam magnifies the rounding of a step in later ones
        torch.testing.assert_close(found[0], expected[0], rtol=5e-2, atol=0)
    else:
        torch.testing.assert_close(found, expected, rtol=5e-4, atol=0)


@pytest.mark.slow
def test_a_run_resumes(runs: Runs, folder: Path, usual: Run) -> None:
    trained(runs, folder, "resumed", training__steps=2)
    assert steps(trained(runs, folder, "resumed")) == steps(usual)


@pytest.mark.slow
def test_it_learns_and_exports(runs: Runs, folder: Path) -> None:
    run = trained(runs, folder, "learns", training__steps=120, training__global_batch_size=64)
    losses = [loss for loss, _ in steps(run)]
    assert losses[-1] < 0.5 * losses[0]
    before, after = tensors_of(folder), tensors_of(run.folder / "hf")
    assert {name: w.shape for name, w in after.items()} == {name: w.shape for name, w in before.items()}
    kept = {name for name, w in after.items() if torch.equal(w, before[name])}
    assert kept == {name for name in before if "vision" in name}
    theirs = transformers_model(run.folder / "hf")
    assert all(torch.equal(w, after[name]) for name, w in theirs.state_dict().items())


@pytest.mark.slow
def test_a_checkpoint_is_exported(folder: Path, usual: Run) -> None:
    """The command proves the export's log-probs by transformers."""
    out = folder.parent / "exported"
    command = [sys.executable, "-m", "titan_rl", "export", str(usual.folder), "--out", str(out)]
    subprocess.run(command, check=True)
    exported, at_end = tensors_of(out), tensors_of(usual.folder / "hf")
    assert exported.keys() == tensors_of(folder).keys()
    assert all(torch.equal(w, at_end[name]) for name, w in exported.items())


@pytest.mark.slow
def test_pairs_are_learned(runs: Runs, folder: Path) -> None:
    run = trained(runs, folder, "pairs", "dpo_llama")
    assert steps(run)[-1][0] < steps(run)[0][0]


SAMPLED: dict[str, Any] = {
    **{"cold_start__steps": 4, "training__steps": 3, "eval__size": 8, "small": True, "config": "grpo_llama"},
    **{"rollout__max_new_tokens": 6, "generator__replicas": 1},
}
PAIRS: dict[str, tuple[dict[str, Any], float]] = {  # keys, and the most that log-probs of trainer and engine differ
    "two engine ranks, and a tower in the folder": ({"generator__tensor_parallel_degree": 2}, 1e-4),
    "16 bits, a lag and trainers with tensor parallelism": (
        {
            **{"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
            **{"rollout__max_staleness_steps": 1, "parallelism__tensor_parallel_degree": 2},
            **{"parallelism__data_parallel_shard_degree": 1, "optimizer__lr": 1e-5},  # a lag adds a step's change
        },
        5e-2,
    ),
}


@pytest.mark.parametrize("pair", slow_except(PAIRS, 1))
def test_engines_sample_with_the_trainers_weights(runs: Runs, folder: Path, pair: str) -> None:
    keys, most = PAIRS[pair]
    run = trained(runs, folder, pair, **(SAMPLED | keys))
    gaps = [line["logprob_gap/mean"] for line in run.lines("metrics.jsonl", "rl") if "logprob_gap/mean" in line]
    assert len(gaps) == 3
    assert max(gaps) < most


def test_a_folder_with_a_tower_is_evaluated(folder: Path) -> None:
    command = [sys.executable, "-m", "titan_rl", "eval", str(folder), "--config", "grpo_llama", "--size", "4", "--json"]
    assert "heldout" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
