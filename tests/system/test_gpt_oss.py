"""After each sync, vLLM computes with all of gpt-oss's weights: sinks, biases and experts, of which it packs some."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.family_folders import make_folder
from support.forked_programs import results_of

ENGINE = f"""
import sys
sys.path.append({str(Path(__file__).parents[2] / "scripts")!r})
"""
ENGINE += """
import asyncio, json
from pathlib import Path
import torch
from bench.family_ranks import tensors_of
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.vllm_params import verify_complete
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Request, Sampling
from titan_rl.wire.weight_plan import Shard, plan
from titan_rl.wire.weight_source import Source

quantized, *folders = [Path(folder) for folder in sys.argv[1:]]
shape = shape_of_folder(str(quantized), "folder")
engine = Engine(EngineSettings(model_dir=str(quantized), max_model_len=128, kv_cache_memory_mb=32, shape=shape))
verify_complete(engine.info.shapes, engine.layout.shapes)
weights = {name: w.clone() for name, w in tensors_of(folders[0], shape).items()}
shards = [Shard(name, 0, len(w), 0, w[0].numel()) for name, w in weights.items()]
copies = plan([shards], [engine.layout.pieces]).outgoing(0)
staging = Staging(weights, copies, torch.float32, block_bytes=1 << 14)
landing = Landing(engine.params(), [Source(0, staging.offer(remote=False)[0], copies[0], "float32", 1 << 14)])

async def sync(version):
    await landing.fetch_weights([staging.pack(version, version % 2, version + 1)[0]], 30)
    engine.suspend()
    await landing.write_weights(30)
    engine.set_version(version)

for version, folder in enumerate(folders):
    for name, w in tensors_of(folder, shape).items():
        weights[name].copy_(w)
    asyncio.run(sync(version))
    engine.add([Request("r", [1, 5, 6, 7], list(range(4)), Sampling(40, 1.0))])
    completions = []
    while engine.busy:
        completions += [c for done in engine.step() for c in done.completions]
    print("FOUND", json.dumps([[c.tokens, c.logprobs] for c in completions]))
"""


def test_all_weights_of_a_version_are_computed_with(tmp_path: Path) -> None:
    """No parameter of the second version is the first's. By the engine's config.json, experts have 4 bits."""
    folders = [tmp_path / "first", tmp_path / "second"]
    make_folder("gpt-oss, window 16", folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folders[1])
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((folders[0] / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    for folder, found in zip(folders, results_of("generator", ENGINE, quantized, *folders), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for tokens, logprobs in found:
            ids = torch.tensor([[1, 5, 6, 7, *tokens]])
            with torch.no_grad():
                expected = model(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
            assert np.abs(np.array(logprobs) - expected.numpy()).mean() < 5e-6
