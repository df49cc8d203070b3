"""Exact mode: log-probs of sampling and training that are equal to the last bit, in engines, ranks and whole runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.running import Run, Runs
from support.tiny import perturbed, tiny_model
from support.told_programs import told
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.wire.failpoints import FOLDER, FaultOrder, give

# Prompts enter while others are decoded, one begins like another, the KV cache is too small for all of them, and the
# weights change while samples are unfinished.
ENGINE = """
import json, sys
import torch
from safetensors.torch import load_file
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Request, Sampling
before, after, dtype, temperature, truncated = *sys.argv[1:4], float(sys.argv[4]), sys.argv[5] == "True"
truncation = {"top_p": 0.9, "top_k": 12, "min_p": 0.02} if truncated else {}
settings = {"max_model_len": 192, "kv_cache_memory_mb": 1, "load_format": "auto", "max_num_seqs": 64}
engine = Engine(EngineSettings(model_dir=before, dtype=dtype, exact=True, records_kept=truncated, **settings))
scheduler = engine._core._scheduler
preempt, preempted = scheduler._preempt_request, []
scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request.request_id), preempt(request, *a, **k))
engine.set_version(0)
g = torch.Generator().manual_seed(0)
prompts = [torch.randint(3, 60, (20 + 13 * i,), generator=g).tolist() for i in range(5)]
prompts.append(prompts[4][:64] + [5, 6])
seeds, done = list(range(6)), []
requests = [Request(str(i), p, seeds, Sampling(60, temperature, **truncation)) for i, p in enumerate(prompts)]
engine.add(requests[:2])
for _ in range(9):
    done += engine.step()
engine.add(requests[2:])
for _ in range(20):
    done += engine.step()
engine.suspend()
state = load_file(after + "/model.safetensors")
for name, parameter in engine.params().items():
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    key = name.split(".")[-2]
    whole = torch.cat([state[name.replace(key, part)] for part in fused.get(key, (key,))])
    parameter[: len(whole)].copy_(whole)  # a vocabulary is padded
swapped = len(preempted)
engine.set_version(1)
while engine.busy:
    done += engine.step()
stats = engine.stats()
sets = lambda c: [kept.hex() for kept in c.kept]
samples = [
    (requests[int(d.id)].tokens, c.tokens, c.logprobs, c.versions, sets(c)) for d in done for c in d.completions
]
told = {"preempted": len(preempted) - swapped, "cached": stats.cached_tokens, "recomputed": stats.recomputed}
print("FOUND", json.dumps({**told, "samples": samples}))
"""

TRAINER = """
import json, os, socket, sys
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import numpy as np, torch
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.packing import pack, unpack
from titan_rl.config import sections as c
from titan_rl.wire.kept_sets import KeptSets
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Sample
folder, dump, dtype, temperature = *sys.argv[1:4], float(sys.argv[4])
sampled = json.load(sys.stdin)
config = c.Config(
    job=c.JobSection(dump_folder=dump),
    model=c.ModelSection(hf_assets_path=folder),
    training=c.TrainingSection(seq_len=331, mixed_precision_param=dtype),
    debug=c.DebugSection(exact=True),
)
trainer = RoleModel("trainer", config, shape_of_folder(folder, "model.hf_assets_path"), config.parallelism)
kept = [KeptSets.of([b""] * len(p) + [bytes.fromhex(each) for each in sets]) for p, *_, sets in sampled]
masks = [[0] * len(p) + [1] * len(t) for p, t, *_ in sampled]
samples = [
    Sample(p + t, mask, {}, prompt=len(p), kept=own if own and len(own) == len(mask) else None)
    for (p, t, *_), mask, own in zip(sampled, masks, kept)
]
theirs = np.concatenate([np.array(logprobs, np.float32) for _, _, logprobs, *_ in sampled])
fresh = np.concatenate([np.array(versions) == 1 for *_, versions, _ in sampled])

def compared(share):
    batches = pack(samples, shards=1, seq_len=331, rows_per_microbatch=2, pad_id=0, share=share)
    scored = unpack(batches, [trainer.scores(batch, temperature)[0] for batch in batches], samples)
    ours = np.concatenate([each[len(p):] for each, (p, *_) in zip(scored, sampled)])
    return [int((ours == theirs)[fresh].sum()), int((ours == theirs)[~fresh].sum())]

found = {"fresh": int(fresh.sum()), "old": int((~fresh).sum()), "plain": compared(False), "shared": compared(True)}
weight = trainer.model.layers["0"].attention.wo.weight
with torch.no_grad():
    weight[0, 0] *= 1.02
trainer.reshard()
print("FOUND", json.dumps({**found, "planted": compared(False)}))
"""


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("float32", {"num_key_value_heads": 2, "rope_scaling": LLAMA3}),
    "qwen2": ("bfloat16", {"num_key_value_heads": 2}),
    "qwen3": ("bfloat16", {"num_key_value_heads": 2, "hidden_size": 48, "tie_word_embeddings": True}),
    "mistral": ("float32", {"sliding_window": 37}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_log_prob_of_the_newest_weights_has_the_trainers_bits(tmp_path: Path, family: str) -> None:
    dtype, sizes = FAMILIES[family]
    model = tiny_model(family, max_position_embeddings=331, intermediate_size=89, vocab_size=61, **sizes)
    model.save_pretrained(tmp_path / "before")
    perturbed(model).save_pretrained(tmp_path / "after")
    truncated = family in ("llama", "qwen3")
    folders, env = (tmp_path / "before", tmp_path / "after"), {**ENV, **vllm_cpu.ENV}
    engine = told(ENGINE, *folders, dtype, 0.7, truncated, env=env)
    assert all(len(sets) == len(tokens) * truncated for _, tokens, _, _, sets in engine["samples"])
    assert engine["preempted"] > 0
    assert engine["cached"] > 0 or family == "mistral"  # vLLM drops what has left the window
    assert engine["recomputed"] > 0
    trainer = told(TRAINER, tmp_path / "after", tmp_path, dtype, 0.7, given=json.dumps(engine["samples"]))
    assert trainer["fresh"] > 500
    assert trainer["old"] > 100
    for packed in ("plain", "shared"):
        fresh, old = trainer[packed]
        assert fresh == trainer["fresh"]
        assert old < trainer["old"]
    assert trainer["planted"][0] < trainer["fresh"]


EXACT: dict[str, Any] = {"debug__exact": True, "eval__interval": 100, "checkpoint__interval": 100}


def exact_steps(run: Run) -> list[dict[str, Any]]:
    """Return the steps of a run, after checking what holds in every exact run."""
    lines = run.lines("metrics.jsonl")
    assert lines
    assert [line["exact/gap_max"] for line in lines] == [0.0] * len(lines)
    assert run.summary()["exact"] is True
    return lines


def assert_on_policy(lines: list[dict[str, Any]]) -> None:
    """Check the first minibatch of every step."""
    for line in lines:
        assert line["policy_age/max"] == 0
        assert (line["logprob_gap/mean"], line["logprob_gap/max"]) == (0, 0)
        for mean_of_ones in ("exact/compared", "logprob_gap/mult"):  # their weights add up to 1 but for rounding
            assert line[mean_of_ones] == pytest.approx(1, abs=1e-12)
        assert (line["exact/ratio_min"], line["exact/ratio_max"], line["exact/clipped"]) == (1, 1, 0)


def test_a_run_on_policy_has_ratios_of_one_and_says_so(runs: Runs, tmp_path: Path) -> None:
    """grpo_llama's shape: two FSDP2 ranks, shared prompts, another temperature."""
    run = runs.start(tmp_path / "run", **EXACT, rollout__temperature=0.7, optimizer__lr=1e-2)
    out = run.finish()
    assert run.code == 0, out
    lines = exact_steps(run)
    assert len(lines) == 4
    assert_on_policy(lines)
    assert "trainer and generator compute equal log-probs, or the run ends" in out  # the plan
    assert "exact: 0.0 on every trained token" in out  # the end
    assert len(re.findall(r" exact +0\.0e\+00 ", out)) == 4  # the lines of the steps


def test_a_run_with_a_lag_is_exact_on_the_tokens_of_the_trained_version(runs: Runs, tmp_path: Path) -> None:
    """grpo_qwen3's shape: bfloat16, tied embeddings; two replicas, whose weights are swapped under running requests."""
    long: dict[str, Any] = {"rollout__lag": 1, "generator__replicas": 2, "training__steps": 5, "rollout__pace": False}
    sizes: dict[str, Any] = {"model__head_dim": 32, "training__seq_len": 192, "rollout__max_new_tokens": 90}
    run = runs.finish(tmp_path / "run", "grpo_qwen3", **EXACT, **long, **sizes, cold_start__steps=0)
    lines = exact_steps(run)
    assert len(lines) == 5
    assert any(line["policy_age/max"] == 1 for line in lines)
    assert any(0 < line["exact/compared"] < 1 for line in lines)  # rollouts of both versions


def test_a_weight_that_differs_in_the_engine_ends_the_run_by_name(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv(FOLDER, str(orders))
    run = runs.start(tmp_path / "run", **EXACT, cold_start__steps=0, training__steps=500, weight_sync__verify="off")
    run.wait_for_step(1)
    give(orders, "generator0[tp=0]", "put", FaultOrder("damage"))
    out = run.finish()
    assert run.code == 1, out
    assert (orders / "hits.jsonl").exists()
    assert "in the trainer" in out
    assert "debug.exact expects equal log-probs" in out
    assert "Traceback" not in out
    *lines, last = run.lines("metrics.jsonl")
    assert f"step {last['step']} is not exact: rollout " in out
    assert last["exact/gap_max"] > 0
    assert lines
    assert {line["exact/gap_max"] for line in lines} == {0.0}


PRESETS: dict[str, dict[str, Any]] = {
    "grpo_llama": {},
    "grpo_llama_replicas": {},
    "grpo_llama_fsdp_tp": {"parallelism__tensor_parallel_degree": 1, "generator__tensor_parallel_degree": 1},
    "grpo_qwen3": {"model__head_dim": 32},
    "dr_grpo_llama": {},
    "rloo_llama": {},
    "reinforce_pp_llama": {},
    "reinforce_pp_baseline_llama": {},
    "ppo_llama": {},
    "dapo_llama": {"algorithm__max_refills": 1},
    "gspo_llama": {},
    "cispo_llama": {},
    "calc_llama": {"rollout__max_new_tokens": 10},
    "hunt_llama": {"rollout__max_new_tokens": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_exact_on_policy(runs: Runs, tmp_path: Path, preset: str) -> None:
    keys: dict[str, Any] = {**EXACT, "training__steps": 5, **PRESETS[preset]}
    lines = exact_steps(runs.finish(tmp_path / "run", preset, **keys))
    assert len(lines) == 5
    assert_on_policy(lines)


@pytest.fixture(scope="module")
def scorers(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A teacher, and a reward model trained from it."""
    folder = tmp_path_factory.mktemp("scorers")
    few: dict[str, Any] = {"training__steps": 2, "cold_start__steps": 0, "training__global_batch_size": 8}
    runs.finish(folder / "sft", "sft_llama", **few)
    start: dict[str, Any] = {"model__hf_assets_path": folder / "sft" / "hf"}
    runs.finish(folder / "reward", "reward_model_llama", **few, **start)
    return {"teacher": folder / "sft" / "hf", "reward_model": folder / "reward" / "hf"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["opd_llama", "ppo_reward_model_llama"])
def test_presets_with_other_models_are_exact_on_policy(
    runs: Runs, tmp_path: Path, scorers: dict[str, Path], preset: str
) -> None:
    teacher = {"teacher__hf_assets_path": scorers["teacher"]}
    model = scorers["reward_model"]
    keys: dict[str, Any] = (
        teacher if preset == "opd_llama" else {f"{role}__hf_assets_path": model for role in ("reward_model", "critic")}
    )
    lines = exact_steps(runs.finish(tmp_path / "run", preset, **EXACT, training__steps=5, **keys))
    assert len(lines) == 5
    assert_on_policy(lines)
