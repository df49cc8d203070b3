"""Adapters on real meshes: the same numbers as in one process, and published weights that have them added."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from support.gloo_ranks import on_ranks
from support.lora_ranks import STEPS, trained
from support.outputs import same
from support.rank_programs import MESHES
from support.running import Run, Runs
from support.slow_cases import slow_except
from support.tiny import tiny_llama
from titan_rl.record.checkpoints import Checkpoints

LORA: dict[str, Any] = {
    "lora__rank": 4,
    "optimizer__lr": 1e-2,
    "cold_start__lr": 1e-2,
    "training__steps": 8,
    "fault__snapshot_interval": 2,
    "parallelism__data_parallel_shard_degree": 2,
}
TARGETS = 7
LAYERS = 2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights")
    tiny_llama(num_key_value_heads=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(weights: str) -> dict[str, Any]:
    return on_ranks(1, trained, "one", weights)


def test_one_process_trains_adapters_alone(one: dict[str, Any]) -> None:
    assert len(one["trained"]) == 2 * 7 * 2
    assert all("lora_" in name for name in one["trained"])
    assert len(set(one["losses"])) == STEPS
    assert one["moved"] > 1e-2
    assert one["base_kept"]
    assert one["reference"] == 0
    assert one["separate_reference"] == 0
    assert one["published"] == 0
    assert one["changed"] == 7 * 2
    assert one["merged_scores"] <= 1e-5


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "fsdp2_tp2", "hsdp", "hsdp_2x2"])
def test_a_mesh_does_not_show_in_the_numbers(layout: str, one: dict[str, Any], weights: str) -> None:
    found = on_ranks(MESHES[layout].world_size, trained, layout, weights)
    assert found["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert found["base_kept"]
    assert found["reference"] == 0
    assert found["separate_reference"] == 0
    assert found["published"] <= 1e-6
    assert found["merged_scores"] <= 1e-5


@pytest.mark.parametrize(
    ("family", "layout", "adapted"),
    slow_except(
        [
            ("qwen3_moe", "fsdp2_tp2_ep2", 4),
            ("glm4_moe", "fsdp2_tp2_ep2", 4),
            ("gpt_oss", "fsdp2_ep2", 4),
            ("qwen2", "tp2", TARGETS),
        ],
        2,
        3,
    ),
)
def test_other_families(family: str, layout: str, adapted: int) -> None:
    """Experts stay whole, as do sinks and biases."""
    one, mesh = (on_ranks(MESHES[name].world_size, trained, name, "", family) for name in ("one", layout))
    assert len(one["trained"]) == 2 * adapted * LAYERS
    assert mesh["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert one["base_kept"]
    assert mesh["published"] <= 1e-6


def test_a_base_in_bfloat16(weights: str) -> None:
    """Forward, merged weights and reference have the rounded base."""
    found = on_ranks(1, trained, "one", weights, "llama3", "bfloat16")
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["base_kept"]
    assert found["reference"] == 0
    assert found["published"] == 0
    assert found["merged_scores"] <= 1e-5


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from random weights: base from the seed, adapters trained by a cold start, then against a reference."""
    return runs.finish(tmp_path_factory.mktemp("whole") / "run", **LORA)


def test_a_run_samples_from_the_merged_weights(whole: Run) -> None:
    lines = whole.lines("metrics.jsonl")
    gaps = [line["logprob_gap/mean"] for line in lines]
    assert max(gaps) <= 1e-5
    assert lines[0]["kl/k3"] == 0
    assert lines[-1]["kl/k3"] > 1e-4


def test_a_checkpoint_has_the_adapters_alone(whole: Run) -> None:
    from titan_rl.actors.titan.summed_writer import PlainMetadata

    folder = whole.folder / "checkpoint"
    newest = max(Checkpoints((folder,)).whole_steps())
    keys = PlainMetadata(folder / f"step-{newest}").read_metadata().state_dict_metadata
    tensors = {key for key in keys if key.startswith("layers.") or "tok_embeddings" in key or "lm_head" in key}
    assert len(tensors) == 2 * TARGETS * LAYERS
    assert all(".lora_" in key for key in tensors)


def test_a_run_goes_on_to_the_last_bit(runs: Runs, whole: Run, tmp_path: Path) -> None:
    """A trainer rank dies, and is restored from a snapshot; then the whole run is killed, and resumed."""
    run = runs.start(tmp_path / "killed", **LORA)
    run.wait_for_step(3)
    os.kill(run.workers()["trainer[dp=0 tp=0]"], signal.SIGKILL)
    run.wait_for_step(7)
    assert run.written("faults.jsonl")[-1]["outcome"] == "back"
    run.process.kill()
    run.finish(60)
    resumed = runs.finish(tmp_path / "killed", **LORA)
    assert same(resumed, whole)


def test_adapters_are_not_resumed_under_another_base_or_scale(runs: Runs, whole: Run) -> None:
    other: dict[str, Any] = {"lora__alpha": 64, "lora__rank": 8, "debug__seed": 5}
    run = runs.start(whole.folder, **LORA | other)
    out = run.finish()
    assert run.code == 2
    for line in ("lora.rank: expected 4", "lora.alpha: expected 32", "debug.seed: expected"):
        assert line in out


def test_both_kinds_of_export_are_proven(whole: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_rl", "export", str(whole.folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "adapter/ has the adapters for PEFT" in done.stdout
    with safe_open(tmp_path / "out" / "adapter" / "adapter_model.safetensors", "pt") as adapters:
        names = list(adapters.keys())
    assert len(names) == 2 * TARGETS * LAYERS
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
