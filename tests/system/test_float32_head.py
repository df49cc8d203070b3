"""model.head_dtype = "float32" in bfloat16: vLLM and the trainer keep the float32 sums of their heads' products."""

import json
from pathlib import Path

import numpy as np

from support.forked_programs import results_of
from support.tiny import tiny_llama

ENGINE = """
import json, sys
import torch
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Request, Sampling
settings = {"max_model_len": 128, "kv_cache_memory_mb": 32, "load_format": "auto", "dtype": "bfloat16"}
engine = Engine(EngineSettings(model_dir=sys.argv[1], head_dtype="float32", **settings))
from vllm.model_executor.layers.logits_processor import LogitsProcessor
apply, logits = LogitsProcessor._apply_head, []

def compare(self, head, hidden, bias):
    found, exact = apply(self, head, hidden, bias), hidden.float() @ head.weight.float().T
    logits.append((str(found.dtype), str(hidden.dtype), float((found - exact).abs().max())))
    return found

LogitsProcessor._apply_head = compare
engine.set_version(0)
engine.add([Request("a", [1, 5, 6, 7], list(range(32)), Sampling(24))])
done = []
while engine.busy:
    done += engine.step()
samples = [([1, 5, 6, 7, *c.tokens], c.logprobs) for c in done[0].completions]
print("FOUND", json.dumps([sorted({kinds[:2] for kinds in logits}), max(kinds[2] for kinds in logits), samples]))
"""

TRAINER = """
import json, os, socket, sys
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
from dataclasses import replace
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.packing import pack, unpack
from titan_rl.config import sections as c
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Sample
samples = [Sample(tokens, [0] * 4 + [1] * (len(tokens) - 4), {}) for tokens in json.load(sys.stdin)]
model = c.ModelSection(hf_assets_path=sys.argv[1])
config = c.Config(
    job=c.JobSection(dump_folder=sys.argv[2]),
    model=model,
    training=c.TrainingSection(seq_len=64, local_batch_size=4, mixed_precision_param="bfloat16"),
)
trainer = RoleModel("trainer", config, shape_of_folder(sys.argv[1], "model.hf_assets_path"), config.parallelism)
batches = pack(samples, shards=1, seq_len=64, rows_per_microbatch=4, pad_id=0)
found = []
for dtype in ("model", "float32"):
    trainer.config = replace(config, model=replace(model, head_dtype=dtype))
    scored = unpack(batches, [trainer.scores(batch, 1.0)[0] for batch in batches], samples)
    found.append([scores[4:].tolist() for scores in scored])
print("FOUND", json.dumps(found))
"""


def test_both_sides_keep_float32_logits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama(max_position_embeddings=128).bfloat16().save_pretrained(folder)
    ((kinds, error, samples),) = results_of("generator", ENGINE, folder)
    assert kinds == [["torch.float32", "torch.bfloat16"]]  # logits, hidden states
    assert error < 1e-5

    tokens, sampled = [tokens for tokens, _ in samples], np.concatenate([logprobs for _, logprobs in samples])
    (scored,) = results_of("model", TRAINER, folder, tmp_path, given=json.dumps(tokens))
    rounded, float32 = map(np.concatenate, scored)
    assert 1e-4 < np.abs(rounded - float32).mean() < 0.02  # that is what the key changes
    assert np.abs(float32 - sampled).mean() < 0.02  # the hidden states still differ
