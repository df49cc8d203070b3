"""Truncated sampling: the trainers' log-probs and gradients are of the tokens that the engines kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.forked_programs import results_of
from support.running import Runs
from support.tiny import tiny_llama
from titan_rl.ext.kept_sets.kept_sets import size_of

TRUNCATED: dict[str, Any] = {"rollout__top_p": 0.9, "rollout__top_k": 8, "rollout__min_p": 0.05}

ENGINE = """
import json, sys
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Request, Sampling
settings = {"max_model_len": 128, "kv_cache_memory_mb": 32, "load_format": "auto", "records": ("kept",)}
engine = Engine(EngineSettings(model_dir=sys.argv[1], **settings))
engine.set_version(0)
prompt = [1, 5, 6, 7]
kinds = {
    "all": Sampling(24, 0.7, 0.9, top_k=8, min_p=0.05),
    "top_p": Sampling(24, 1.0, 0.8),
    "top_k": Sampling(24, 1.3, top_k=20),
    "min_p": Sampling(24, 1.0, min_p=0.2),
    "whole": Sampling(24, 0.7),
    "greedy": Sampling(24, 0.0, 0.9, top_k=8, min_p=0.05),
}
engine.add([Request(name, prompt, list(range(6)), sampling) for name, sampling in kinds.items()])
found = []
for _ in range(9):
    found += engine.step()
(taken,) = engine.withdraw(["all"])  # its sets continue with it
engine.add([Request("rest", prompt, list(range(6)), kinds["all"], begun=taken.completions)])
while engine.busy:
    found += engine.step()
done = {done.id: done.completions for done in found}
done["all"] = done.pop("rest")
print("FOUND", json.dumps({
    name: [[c.tokens, c.logprobs, [s.hex() for s in c.extras["kept"]], kinds[name].temperature] for c in completions]
    for name, completions in done.items()
}))
"""

TRAINER = """
import json, os, socket, sys
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import numpy as np, torch
from transformers import AutoModelForCausalLM
from titan_rl.actors.titan.model import DeviceRows
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.packing import pack, unpack
from titan_rl.config import sections as c
from titan_rl.ext.kept_sets.kept_sets import KeptSets
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Sample
folder, dump = sys.argv[1:3]
sampled = json.load(sys.stdin)
temperature = sampled[0][3]
config = c.Config(
    job=c.JobSection(dump_folder=dump),
    model=c.ModelSection(hf_assets_path=folder),
    training=c.TrainingSection(seq_len=96, local_batch_size=2),
    rollout=c.RolloutSection(temperature=temperature),
    algorithm=c.AlgorithmSection(entropy_coef=0.1),
)
trainer = RoleModel("trainer", config, shape_of_folder(folder, "model.hf_assets_path"), config.parallelism)
samples = []
for i, (tokens, logprobs, kept, _) in enumerate(sampled):
    n = len(tokens)
    columns = {"behaviour": [0.0] * 4 + logprobs, "advantage": [0.0] * 4 + [(-1.0) ** i + 0.1 * i] * n}
    sets = KeptSets.of([b""] * 4 + [bytes.fromhex(each) for each in kept])
    samples.append(Sample([1, 5, 6, 7, *tokens], [0] * 4 + [1] * n, columns, 4, extras={"kept": sets}))
(batch,) = pack(samples, shards=1, seq_len=96, rows_per_microbatch=2, pad_id=0, share=True)
scored = unpack([batch], [trainer.scores(batch, temperature)[0]], samples)
forward = max(float(np.abs(s[4:] - np.array(lp)).max()) for s, (_, lp, *_) in zip(scored, sampled))

objective = Objectives(trainer, config).policy
for rows in batch.microbatches:
    loss, _ = objective(DeviceRows.of(rows, trainer.device), batch)
    loss.backward()
ours = trainer.model.lm_head.weight.grad
ours = getattr(ours, "full_tensor", lambda: ours)()
norms = trainer.model.norm.weight.grad
norms = getattr(norms, "full_tensor", lambda: norms)()

plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
total = sum(len(tokens) for tokens, *_ in sampled)
loss = 0
for sample, (tokens, logprobs, _, _) in zip(samples, sampled):
    logits = plain(torch.tensor([sample.tokens])).logits[0, 3:-1] / temperature
    counts, ids = sample.extras["kept"].ids()
    for row, own in enumerate(np.split(ids, counts.cumsum()[:-1])[4:]):
        mask = torch.full((logits.shape[1],), not len(own))
        mask[own] = True
        distribution = logits[row].masked_fill(~mask, -torch.inf).log_softmax(-1)
        ratio = (distribution[tokens[row]] - logprobs[row]).exp()
        advantage = sample.columns["advantage"][-1]
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(distribution.exp() * distribution.masked_fill(~mask, 0)).sum()
        loss = loss + (surrogate - 0.1 * entropy) / total
loss.backward()
theirs = plain.lm_head.weight.grad
print("FOUND", json.dumps({
    "forward": forward,
    "of_head": float((ours - theirs).abs().max() / theirs.abs().max()),
    "of_norm": float((norms - plain.model.norm.weight.grad).abs().max() / norms.abs().max()),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_llama(max_position_embeddings=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sampled(folder: Path) -> dict[str, Any]:
    (sampled,) = results_of("generator", ENGINE, folder)
    return sampled


@pytest.mark.parametrize("kind", ["all", "top_k"])
def test_log_probs_and_gradients_are_those_of_full_logits_with_explicit_masks(
    folder: Path, sampled: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    (found,) = results_of("model", TRAINER, folder, tmp_path, given=json.dumps(sampled[kind]))
    assert found["forward"] < 1e-5
    assert found["of_head"] < 1e-4
    assert found["of_norm"] < 1e-4


def test_the_engine_records_what_each_kind_of_truncation_keeps(sampled: dict[str, Any]) -> None:
    sizes = {
        name: [size_of(bytes.fromhex(kept)) for _, _, sets, _ in completions for kept in sets]
        for name, completions in sampled.items()
    }
    assert set(sizes["whole"]) == set(sizes["greedy"]) == {0}
    assert max(sizes["all"]) <= 8
    assert min(sizes["all"]) >= 1
    assert {len(each[2]) for each in sampled["all"]} == {24}  # also of the sample that moved
    assert set(sizes["top_k"]) == {20}
    for completions in (sampled["all"], sampled["top_p"], sampled["min_p"]):
        assert all(logprob <= 0 and math.isfinite(logprob) for _, logprobs, *_ in completions for logprob in logprobs)


def test_a_truncated_run_has_no_gap_but_rounding(runs: Runs, tmp_path: Path) -> None:
    """Two FSDP2 ranks, shared prompts, a frozen reference, an entropy bonus."""
    run = runs.finish(tmp_path / "run", **TRUNCATED, algorithm__entropy_coef=0.01, optimizer__lr=1e-3)
    lines = run.lines("metrics.jsonl")
    assert len(lines) == 4
    assert all(line["policy_age/max"] == 0 for line in lines)
    assert max(line["logprob_gap/max"] for line in lines) <= 1e-5
    assert all(abs(line[ratio] - 1) <= 1e-5 for line in lines for ratio in ("ratio/min", "ratio/max"))
    assert all(line["grad_norm"] > 0 for line in lines)
    rollouts = run.lines("rollouts.jsonl")
    assert all(len(line["kept"]) == sum(line["mask"]) for line in rollouts)
    sizes = [size for line in rollouts for size in line["kept"]]
    assert (min(sizes) >= 1, max(sizes) <= 8) == (True, True)
    assert len(set(sizes)) > 2
    assert all(line["kept/whole"] == 0 and 1 < line["kept/mean"] <= 8 for line in lines)
