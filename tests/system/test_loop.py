"""The loop as a user runs it: real Monarch meshes, a real TorchTitan trainer, a real vLLM generator, real weights."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled, shared_memory, socket_folders
from support.running import Run, Runs
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks import tokenizer as characters

TIGHT = {"float32": 1e-5, "bfloat16": 1e-2}  # mean log-prob gap between trainer and generator


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps, uninterrupted."""
    return runs.finish(tmp_path_factory.mktemp("whole") / "run", training__steps=8)


def test_every_file_is_there(whole: Run) -> None:
    names = {path.name for path in whole.folder.iterdir()}
    assert names >= {
        "config.toml",
        "metrics.jsonl",
        "rollouts.jsonl",
        "summary.json",
        "tb",
        "checkpoint",
        "hf",
        "model",
    }
    assert {p.name for p in (whole.folder / "checkpoint").iterdir()} >= {"step-6", "step-8"}
    summary = whole.summary()
    assert summary["config_name"] == "grpo_llama"
    assert summary["steps"] == 8
    assert summary["seed"] == 0
    assert summary["versions"]["torchtitan"] == "0.3.0"
    assert 0 <= summary["final_eval"] <= 1
    parts = sum(summary["seconds"].values())
    assert parts == pytest.approx(summary["wall_seconds"], rel=0.05)


def test_versions_advance_with_the_steps(whole: Run) -> None:
    for rollout in whole.lines("rollouts.jsonl"):
        assert set(rollout["versions"]) == {rollout["step"] - 1}
    assert {line["policy_age/max"] for line in whole.lines("metrics.jsonl")} == {0}


def test_tokens_masks_and_log_probs_line_up(whole: Run) -> None:
    eos = 2
    for r in whole.lines("rollouts.jsonl"):
        prompt = len(r["tokens"]) - len(r["versions"])
        assert r["mask"] == [0] * prompt + [1] * len(r["versions"])
        assert all(p == 0 for p in r["logprobs"][:prompt])
        assert all(p < 0 for p in r["logprobs"][prompt:])
        assert r["tokens"][prompt:].count(eos) == (r["finish"] == "stop")
        assert eos not in r["tokens"][prompt:-1]


def test_trainer_and_generator_agree_on_every_step(whole: Run) -> None:
    for line in whole.lines("metrics.jsonl"):
        assert line["logprob_gap/mean"] <= TIGHT["float32"]
        assert line["logprob_gap/mult"] == pytest.approx(1, abs=1e-4)
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_the_export_loads_in_transformers(whole: Run) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "hf")
    model: Any = LlamaForCausalLM.from_pretrained(whole.folder / "hf")
    prompt = tokenizer("12+34=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] >= prompt["input_ids"].shape[1] + 1


def test_the_same_seed_gives_the_same_rollouts_and_losses(runs: Runs, whole: Run, tmp_path: Path) -> None:
    again = runs.finish(tmp_path / "again", training__steps=4)
    assert losses(again) == losses(whole)[:4]
    assert sampled(again) == [r for r in sampled(whole) if r[0] <= 4]


def test_another_seed_gives_others(runs: Runs, whole: Run, tmp_path: Path) -> None:
    other = runs.finish(tmp_path / "other", training__steps=1, debug__seed=1)
    assert sampled(other) != [r for r in sampled(whole) if r[0] <= 1]


def test_ctrl_c_then_the_same_command_equals_an_uninterrupted_run(runs: Runs, whole: Run, tmp_path: Path) -> None:
    folder, shared = tmp_path / "interrupted", shared_memory()
    run = runs.start(folder, training__steps=8, checkpoint__interval=100)
    run.wait_for_step(2)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    out = run.finish(timeout=15)
    assert time.monotonic() - began < 10
    assert run.code == 130, out
    assert "the same command resumes from RL step" in out
    assert not run.processes()
    resumed = runs.finish(folder, training__steps=8, checkpoint__interval=100)
    assert losses(resumed) == losses(whole)
    assert sampled(resumed) == sampled(whole)
    assert shared_memory() <= shared


def test_a_kill_costs_the_steps_since_the_checkpoint_and_nothing_else(runs: Runs, whole: Run, tmp_path: Path) -> None:
    folder, shared = tmp_path / "killed", shared_memory()
    run = runs.start(folder, training__steps=8, checkpoint__interval=2)
    run.wait_for_step(3)
    run.process.kill()
    run.finish(timeout=15)
    deadline = time.monotonic() + 10
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not run.processes(), "workers outlive a killed controller"
    assert shared_memory() <= shared
    resumed = runs.finish(folder, training__steps=8, checkpoint__interval=2)
    assert losses(resumed) == losses(whole)
    assert sampled(resumed) == sampled(whole)


def test_resuming_on_another_mesh(runs: Runs, whole: Run, tmp_path: Path) -> None:
    """From two FSDP2 ranks to two tensor-parallel ones: the same training, up to rounding."""
    folder = tmp_path / "resharded"
    shutil.copytree(whole.folder / "checkpoint" / "step-6", folder / "checkpoint" / "step-6")
    shutil.copytree(whole.folder / "start", folder / "start")  # what the reference is made of
    resumed = runs.finish(
        folder, training__steps=8, parallelism__data_parallel_shard_degree=1, parallelism__tensor_parallel_degree=2
    )
    assert [line["step"] for line in resumed.lines("metrics.jsonl")] == [7, 8]
    assert losses(resumed)[0] == pytest.approx(losses(whole)[6], abs=1e-4)


def test_without_the_weights_it_began_with_a_reference_cannot_be(runs: Runs, whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole.folder / "checkpoint" / "step-6", folder / "checkpoint" / "step-6")
    run = runs.start(folder, training__steps=8)
    out = run.finish(timeout=120)
    assert run.code == 1, out
    assert f"{folder / 'start'} is missing" in out
    assert "Traceback" not in out
    assert not run.processes()


def test_a_finished_run_says_so_and_starts_nothing(runs: Runs, whole: Run) -> None:
    again = runs.start(whole.folder, training__steps=8)
    out = again.finish(timeout=30)
    assert again.code == 0
    assert "nothing is left to train" in out
    assert "vLLM engine" not in out


def test_an_interrupted_cold_start_goes_on_where_it_was(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"cold_start__steps": 60, "training__steps": 1}
    straight = runs.finish(tmp_path / "straight", **keys)
    run = runs.start(tmp_path / "cold", **keys)
    run.wait_for_step(3, "cold_start")
    run.process.send_signal(signal.SIGINT)
    out = run.finish(timeout=15)
    assert run.code == 130, out
    assert "resumes from cold start step" in out
    resumed = runs.finish(run.folder, **keys)
    for kind in ("cold_start", "rl"):
        assert losses(resumed, kind) == losses(straight, kind)


def test_fresh_moves_the_old_run_aside(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.finish(folder, training__steps=1, cold_start__steps=0)
    runs.finish(folder, training__steps=1, cold_start__steps=0, job__fresh=True)
    assert (tmp_path / "run.1" / "summary.json").exists()
    assert len(Run(folder, runs.started[-1].process).lines("metrics.jsonl")) == 1


@pytest.mark.parametrize("victim", ["trainer[dp=1 tp=0]", "generator0[tp=0]"])
def test_a_killed_rank_ends_a_run_that_may_not_respawn_it_by_name(runs: Runs, tmp_path: Path, victim: str) -> None:
    before, shared = socket_folders(), shared_memory()
    run = runs.start(tmp_path / "run", training__steps=1000, fault__max_restarts=0)
    run.wait_for_step(2)
    os.kill(run.workers()[victim], signal.SIGKILL)
    began = time.monotonic()
    out = run.finish(timeout=40)
    assert time.monotonic() - began < 30
    assert run.code == 1, out
    assert f"{victim} died: its process" in out, out  # killed by signal 9; on a busy machine Monarch may reap it unseen
    assert out.count("died: its process") == 1, out
    assert not run.processes()
    assert socket_folders() <= before
    assert shared_memory() <= shared


def test_an_exception_in_a_rank_is_shown_once_by_name(runs: Runs, tmp_path: Path) -> None:
    """Weights that are no safetensors: every check of the folder passes, and the trainer ranks fail to read them."""
    assets = tmp_path / "assets"
    characters.build(assets)
    shape = shape_of(ModelSection(dim=64, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=128))
    (assets / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
    (assets / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    run = runs.start(tmp_path / "run", model__hf_assets_path=assets)
    out = run.finish(timeout=120)
    assert run.code == 1, out
    assert "trainer[dp=" in out
    assert "failed in start" in out
    assert out.count("Traceback on the remote rank") == 1, out
    assert "titan/model.py" in out
    assert not run.processes()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [("grpo_llama_fsdp_tp", "float32"), ("grpo_llama_replicas", "float32"), ("grpo_qwen3", "bfloat16")],
)
def test_shipped_configs_agree_on_log_probs(runs: Runs, tmp_path: Path, config: str, dtype: str) -> None:
    """The configs' own models and meshes, a few steps of each."""
    run = runs.finish(
        tmp_path / "run", config, small=False, cold_start__steps=5, cold_start__stop_at=0, training__steps=3
    )
    for line in run.lines("metrics.jsonl"):
        assert line["logprob_gap/mean"] <= TIGHT[dtype]


def test_sft_alone(runs: Runs, tmp_path: Path) -> None:
    run = runs.finish(tmp_path / "run", "sft_llama", small=False, training__steps=12, eval__size=16)
    first, *_, last = (line["loss"] for line in run.lines("metrics.jsonl", "fit"))
    assert last < first
    assert run.summary()["final_eval"] is not None
    assert (run.folder / "hf" / "config.json").exists()


def test_learning_happens(runs: Runs, tmp_path: Path) -> None:
    """The README's promise, with fewer steps: random weights, a cold start to about 0.7, then RL improves on it.

    The bar is far below what was measured: docs/benchmarks/learning.csv has whole runs on emulated machines.
    """
    run = runs.start(tmp_path / "run", small=False, training__steps=40)
    out = run.finish(timeout=540)  # a cold start takes 250 to 600 steps and more, on a busy machine several minutes
    assert run.code == 0, out
    summary = run.summary()
    assert 0.5 <= summary["initial_eval"] <= 0.9
    assert summary["final_eval"] >= max(0.8, summary["initial_eval"] + 0.05)
    for line in run.lines("metrics.jsonl"):
        assert line["logprob_gap/mean"] <= TIGHT["float32"]
