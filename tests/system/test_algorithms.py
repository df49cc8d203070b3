"""Every preset as a user runs it: real meshes for every role, a few steps each."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.forked_programs import output_of
from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.tasks.prompts import judged
from titan_rl.tasks.task import addition
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.why import main as why
from titan_rl.wire.types import Prompt

STEPS: dict[str, Any] = {"training__steps": 3, "eval__interval": 3, "checkpoint__interval": 100}
DENSE: dict[str, Any] = {
    "task__reward": "dense_reward:digits",
    "task__eval_reward": "exact",
    "optimizer__lr": 1e-3,
    "parallelism__data_parallel_shard_degree": 1,  # test_trainer_mesh.py compares meshes
}
TIGHT = 1e-5  # mean log-prob gap between trainer and generator

RL: dict[str, dict[str, Any]] = {
    "dr_grpo": {"parallelism__data_parallel_shard_degree": 2},
    "rloo": {},
    "reinforce_pp": {"rollout__group_size": 1},
    "reinforce_pp_baseline": {"reference__mesh": "own"},
    "ppo": {"critic__data_parallel_shard_degree": 2},
    "dapo": {"algorithm__max_refills": 1},
    "gspo": {"algorithm__epochs": 2, "parallelism__tensor_parallel_degree": 2},
    "sapo": {"algorithm__top_entropy_share": 0.5, "algorithm__minibatches": 2},
    "m2po": {"algorithm__entropy_target": 4.1, "rollout__max_staleness_steps": 0},
    "cispo": {"algorithm__rejection": "geometric", "algorithm__entropy_coef": 0.01},
    "gdpo": {"task__reward": "exact", "task__rewards": '{"dense_reward:digits" = 1.0, exact = 1.0}'},
    "remax": {"rollout__groups_per_step": 16},
    "otb": {"parallelism__tensor_parallel_degree": 2, "training__stream_groups": 2},
}
TELLS: dict[str, list[str]] = {
    "rloo": ["time/judge"],
    "reinforce_pp_baseline": ["kl/k2"],
    "ppo": ["value/loss", "value/explained_variance", "value/grad_norm", "return/mean", "off_policy/ess"],
    "sapo": ["entropy/top", "entropy/top_share"],
    "m2po": ["entropy_coef", "off_policy/masked"],
    "dapo": ["dropped/groups", "dropped/tokens", "dropped/truncated"],
    "gdpo": ["reward_part/digits", "reward_part/exact", "reward/penalty"],
    "remax": ["reward/greedy"],
    "otb": ["time/judge"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def language_model(runs: Runs, folder: Path) -> Run:
    """The export of an sft run: a teacher for others."""
    return runs.finish(folder / "sft", "sft_llama", cold_start__steps=0, training__global_batch_size=8, **STEPS)


@pytest.fixture(scope="module")
def reward_model(runs: Runs, folder: Path, language_model: Run) -> Run:
    """Trained from the sft run's policy, as the config has it, on two FSDP2 ranks."""
    keys: dict[str, Any] = STEPS | {"training__steps": 4, "eval__interval": 2, "checkpoint__interval": 2}
    start: dict[str, Any] = {
        "model__hf_assets_path": language_model.folder / "hf",
        "parallelism__data_parallel_shard_degree": 2,
    }
    batch: dict[str, Any] = {"cold_start__steps": 0, "training__global_batch_size": 16}
    return runs.finish(folder / "reward", "reward_model_llama", **keys, **start, **batch)


def steps(run: Run, kind: str = "rl") -> list[dict[str, Any]]:
    found = [line for line in run.lines("metrics.jsonl", kind) if "loss" in line]
    for line in found:
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, int | float)), line
    return found


@pytest.mark.parametrize("name", slow_except(RL, 0, 4, 5, 6, 8, 10, 12))
def test_a_preset_trains_on_rollouts(runs: Runs, tmp_path: Path, name: str) -> None:
    """From random weights, whose answers have rewards that differ."""
    keys: dict[str, Any] = {**STEPS, **DENSE, "cold_start__steps": 0, **RL[name]}
    run = runs.finish(tmp_path / "run", f"{name}_llama", **keys)
    lines = steps(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["logprob_gap/mean"] <= TIGHT
        assert sum(line["ratio/histogram"]) == line["tokens/trained"]
        assert not [key for key in TELLS.get(name, []) if key not in line]
    if name in ("gspo", "cispo", "ppo"):  # several updates a step: the later ones are off the policy that sampled
        assert max(line["ratio/max"] for line in lines) > 1.001
    assert run.summary()["final_eval"] is not None


@pytest.mark.parametrize("mesh", slow_except(["own", "trainer"], 1))
def test_distillation_follows_a_teacher(runs: Runs, language_model: Run, tmp_path: Path, mesh: str) -> None:
    teacher: dict[str, Any] = {"teacher__hf_assets_path": language_model.folder / "hf", "teacher__mesh": mesh}
    lines = steps(runs.finish(tmp_path / "run", "opd_llama", **STEPS, **teacher))
    assert len(lines) == 3
    assert all(line["advantage/min"] != line["advantage/max"] for line in lines)


@pytest.mark.parametrize("mesh", slow_except(["own", "trainer"], 0))
def test_a_divergence_from_a_teacher_falls(runs: Runs, language_model: Run, tmp_path: Path, mesh: str) -> None:
    """A step made again from its recorded batch is the same."""
    teacher: dict[str, Any] = {"teacher__hf_assets_path": language_model.folder / "hf", "teacher__mesh": mesh}
    keys: dict[str, Any] = {**STEPS, "training__steps": 8, "cold_start__steps": 0, "optimizer__lr": 3e-3}
    keys |= {"checkpoint__interval": 7, "algorithm__kl_coef": 0.0}
    run = runs.finish(tmp_path / "run", "gkd_llama", **keys, **teacher, record__batches=1)
    lines = steps(run)
    assert 0 < lines[-1]["distill/divergence"] < 0.8 * lines[0]["distill/divergence"]
    for line in lines:
        assert line["loss"] == pytest.approx(line["distill/divergence"], rel=1e-4)
        assert 0 < line["distill/teacher_mass"] < 1
    again = [sys.executable, "-m", "titan_rl", "replay", str(run.folder), "--step", "8"]
    assert subprocess.run(again, capture_output=True, text=True, timeout=300).returncode == 0


def test_ppo_learns_from_a_reward_model_and_is_judged_by_the_true_reward(
    runs: Runs, reward_model: Run, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        "reward_model__hf_assets_path": reward_model.folder / "hf",
        "critic__hf_assets_path": reward_model.folder / "hf",
        "critic__data_parallel_shard_degree": 2,
        "task__grader": "exact",
    }
    run = runs.finish(tmp_path / "run", "ppo_reward_model_llama", **STEPS, **keys)
    lines = run.lines("rollouts.jsonl")
    assert len({line["reward"] for line in lines}) > 10, "a reward model's scores are real numbers"
    assert all(line["rewards"]["grader"] == float(line["text"] == line["answer"]) for line in lines)
    assert 0 <= run.summary()["final_eval"] <= 1


@pytest.mark.parametrize("name", slow_except(["dpo", "ipo", "kto"], 0, 2))
def test_preferences_move_the_policy_apart_from_its_reference(runs: Runs, tmp_path: Path, name: str) -> None:
    """The reference on a separate mesh, and lent to the trainer: the same numbers."""
    keys: dict[str, Any] = STEPS | {"cold_start__steps": 8, "training__global_batch_size": 16, "optimizer__lr": 1e-3}
    own = steps(runs.finish(tmp_path / "own", f"{name}_llama", reference__mesh="own", **keys), "fit")
    first, *_, last = own
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/margins"] > 1e-3
    if name in ("dpo", "kto"):
        assert first["loss"] == pytest.approx(math.log(2) if name == "dpo" else 0.5, abs=1e-5)
        lent = steps(runs.finish(tmp_path / "lent", f"{name}_llama", reference__mesh="trainer", **keys), "fit")
        assert [line["loss"] for line in lent] == pytest.approx([line["loss"] for line in own], abs=1e-6)


ONLINE: dict[str, Any] = STEPS | {
    "algorithm__kl_coef": 0,
    "checkpoint__interval": 1,
    "optimizer__lr": 1e-3,
    "lr_scheduler__warmup_steps": 0,
}


def test_online_pairs_move_the_policy_apart_from_its_reference(runs: Runs, tmp_path: Path) -> None:
    """The reference on a separate mesh, and lent to the trainer: the same numbers. A resumed run ends with them too."""
    keys: dict[str, Any] = {**ONLINE, **DENSE, "algorithm__pair_loss": "dpo"}
    own = steps(runs.finish(tmp_path / "own", "online_dpo_llama", reference__mesh="own", **keys))
    assert own[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert own[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert own[-1]["rewards/margins"] > 1e-3
    for line in own:
        assert line["logprob_gap/mean"] <= TIGHT
        assert 0 < line["tokens/trained"] < line["tokens/sampled"], "of 4 samples of a group 2 are trained on"
        assert line["advantage/max"] == -line["advantage/min"] > 0
    keys |= {"reference__mesh": "trainer"}
    first_two: dict[str, Any] = keys | {"training__steps": 2, "eval__interval": 0}
    runs.finish(tmp_path / "lent", "online_dpo_llama", **first_two)
    lent = steps(runs.finish(tmp_path / "lent", "online_dpo_llama", **keys))
    assert [line["loss"] for line in lent] == pytest.approx([line["loss"] for line in own], abs=1e-6)


def test_online_pairs_are_rollouts_of_several_turns_on_two_ranks(runs: Runs, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"algorithm__name": "online_dpo", "algorithm__pair_loss": "ipo", "algorithm__minibatches": 2}
    keys |= {"algorithm__clip_high": 0.2, "rollout__group_size": 8, "cold_start__steps": 40}
    run = runs.finish(tmp_path / "run", "hunt_llama", **ONLINE, **keys)
    lines = steps(run)
    assert len(lines) == 3
    for line in lines:
        assert line["logprob_gap/mean"] <= TIGHT
        assert line["turns/mean"] > 1
        assert line["tokens/trained"] > 0
    assert any(line["rewards/margins"] != 0 for line in lines)
    rollouts = run.lines("rollouts.jsonl")
    assert {line["advantage"] > 0 for line in rollouts if line["advantage"]} == {False, True}


@pytest.mark.parametrize("name", slow_except(["simpo", "orpo"], 1))
def test_preferences_without_a_reference_widen_the_margin(runs: Runs, tmp_path: Path, name: str) -> None:
    keys: dict[str, Any] = STEPS | {"cold_start__steps": 8, "training__steps": 12, "optimizer__lr": 1e-3}
    run = runs.finish(tmp_path / "run", f"{name}_llama", **keys)
    first, *_, last = steps(run, "fit")
    assert last["loss"] < first["loss"]
    assert last["rewards/margins"] > first["rewards/margins"]
    assert not (run.folder / "start").exists(), "no reference is written"


def test_sft_learns(language_model: Run) -> None:
    first, *_, last = steps(language_model, "fit")
    assert last["loss"] < first["loss"]
    assert language_model.summary()["final_eval"] is not None
    assert (language_model.folder / "hf" / "config.json").exists()


def test_a_reward_model_is_a_transformers_model_with_the_same_scores(reward_model: Run) -> None:
    import torch
    from transformers import LlamaForSequenceClassification

    folder = reward_model.folder / "hf"
    tokenizer, model = TextTokenizer.load(folder), LlamaForSequenceClassification.from_pretrained(folder)
    task_seed = json.loads((reward_model.folder / "summary.json").read_text())["seed"]
    from titan_rl.wire.seeds import derive

    _, heldout = addition(derive(task_seed, "task"), 16)
    right = 0
    for example in heldout:
        prompt = Prompt(0, "", tokenizer.prompt(example.prompt, "plain"), example.answer, {}, example.rejected)
        chosen, rejected = (
            model(torch.tensor([sample.tokens[:-1]])).logits.item() for sample in judged(prompt, tokenizer)
        )
        right += chosen > rejected
    assert reward_model.summary()["final_eval"] == right / 16


def test_without_a_signal_a_run_stops_and_says_why(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.start(tmp_path / "run", training__steps=50, algorithm__max_dead_steps=3, cold_start__steps=0)
    out = run.finish()
    assert run.code == 3, out
    assert "3 steps in a row had no learning signal" in out
    assert "algorithm.max_dead_steps" in out
    assert "The answers are noise: entropy" in out  # its weights are random
    assert "cold_start.steps = 200 (now 0)" in out
    assert f"python -m titan_rl why {run.folder}" in out
    assert why([str(run.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cause"] == "noise_sampling"
    assert {effect["rule"] for effect in report["findings"][0]["effects"]} >= {"too_hard"}
    assert len([finding for finding in report["findings"] if finding["severity"] == "problem"]) == 1
    assert (run.folder / "checkpoint" / "step-3" / ".metadata").exists()
    assert not run.processes()


def test_a_reward_that_raises_ends_the_run_by_name(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", task__reward="dense_reward:broken", cold_start__steps=0, eval__size=0)
    out = run.finish()
    assert run.code == 1, out
    missing = (
        r"error: the reward failed on prompt 0: (\d+) of \1 answers have no reward; the first: dense_reward:broken: "
    )
    assert re.search(missing + "ZeroDivisionError: no such thing at ", out), out
    assert "dense_reward.py" in out
    assert not run.processes()


DRIFT = """
import os, sys, socket
import numpy as np
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.actors.titan.model import local
from titan_rl.config import sections as c
from titan_rl.preflight.shapes import shape_of
from titan_rl.batch.packing import pack
from titan_rl.wire.types import Sample

config = c.Config(
    job=c.JobSection(dump_folder=sys.argv[1]),
    checkpoint=c.CheckpointSection(enable=False),
    model=c.ModelSection(dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=96),
    training=c.TrainingSection(steps=8, seq_len=32),
    optimizer=c.OptimizerSection(lr=1e-2),
    algorithm=c.AlgorithmSection(kl_coef=0.1),
)
policy = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
policy.begin_phase("rl", 0)
policy.export(sys.argv[1] + "/start")
policy.load_weights(sys.argv[1] + "/start", "reference")
ones = [1.0] * 8
sample = Sample(list(range(3, 11)), [1] * 8, {"behaviour": [-4.0] * 8, "reference": [-4.0] * 8, "advantage": ones})
batches = pack([sample], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)
for how in ("sound", "planted"):
    if how == "planted":  # a reference that the optimizer moves: its tensors are the policy's
        policy._policy.frozen["reference"]._shards = [local(p) for p in policy.model.parameters()]
    for _ in range(3):
        (reference,), checksum = policy.scores(batches[0], 1.0, "reference")
        (own,), _ = policy.scores(batches[0], 1.0)
        print(how, checksum, float(reference.sum()), float(own.sum()))
        policy.step(batches)
"""


def test_a_reference_in_the_optimizer_is_seen_by_its_checksum(tmp_path: Path) -> None:
    lines = [line.split() for line in output_of("model", DRIFT, tmp_path).splitlines()]
    for how in ("sound", "planted"):
        saw = [columns for first, *columns in lines if first == how]
        assert len(saw) == 3
        checksums, references, own = zip(*saw, strict=True)
        assert len(set(own)) == 3, "the policy moves"
        assert (len(set(checksums)) == 1) == (how == "sound")
        assert (len(set(references)) == 1) == (how == "sound")
