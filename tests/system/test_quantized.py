"""An engine whose weights are quantized as they land computes what another makes of the same rounded weights."""

from pathlib import Path
from typing import Any

import pytest

from support import gemma4, muse_glimmer
from support.forked_programs import results_of
from support.slow_cases import slow_except
from support.tiny import tiny_llama

ENGINE = """
import json, sys
import torch
from safetensors.torch import load_file
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.types import Request, Sampling

folder, quantization, dtype, how = sys.argv[1:]
shape = shape_of_folder(folder, "folder")
loads = {"load_format": "auto"} if how == "loaded" else {}
settings = EngineSettings(
    model_dir=folder,
    max_model_len=128,
    kv_cache_memory_mb=32,
    dtype=dtype,
    quantization=quantization,
    shape=shape,
    **loads,
)
engine = Engine(settings)
if how == "landed":
    import asyncio
    from titan_rl.actors.sync.landing import Landing
    from titan_rl.actors.sync.staging import Staging
    from titan_rl.actors.vllm.vllm_params import verify_complete
    from titan_rl.wire.weight_plan import Shard, plan
    from titan_rl.wire.weight_source import Source

    layout = engine.layout
    verify_complete(engine.info.shapes, layout.shapes, quantization)
    weights = load_file(folder + "/model.safetensors")
    weights = {name: w.clone() for name, w in weights.items() if name in shape.hf_tensors()}
    shards = [Shard(name, 0, len(w), 0, w[0].numel()) for name, w in weights.items()]
    copies = plan([shards], [layout.pieces]).outgoing(0)
    staging = Staging(weights, copies, getattr(torch, dtype), block_bytes=1 << 14)
    source = Source(0, staging.offer(remote=False)[0], copies[0], dtype, 1 << 14)
    landing = Landing(engine.params(), [source], quantization=quantization)

    async def sync(version):
        await landing.fetch_weights([staging.pack(version, version % 2, version + 1)[0]], 30)
        engine.suspend()
        await landing.write_weights(30)
        engine.set_version(version)

    right = {name: w.clone() for name, w in weights.items()}
    for w in weights.values():
        w.mul_(1.25)
    asyncio.run(sync(0))
    for name, w in weights.items():
        w.copy_(right[name])
    asyncio.run(sync(1))
else:
    engine.set_version(1)
engine.add([Request("r", [1, 5, 6, 7], list(range(4)), Sampling(24, 1.0))])
completions = []
while engine.busy:
    completions += [c for done in engine.step() for c in done.completions]
print("FOUND", json.dumps([engine.fingerprint(), [[c.tokens, c.logprobs] for c in completions]]))
"""


def engine(folder: Path, quantization: str, dtype: str, how: str) -> Any:
    (found,) = results_of("generator", ENGINE, folder, quantization, dtype, how)
    return found


def gemma(folder: Path) -> Path:
    keys = {"num_hidden_layers": 2, "layer_types": [gemma4.WINDOW, gemma4.FULL], "attention_k_eq_v": True}
    return gemma4.make_folder(folder, gemma4.drawn(7) | keys)


OTHER_MODELS = {"Gemma 4, keys as values in a layer": gemma, "Muse Glimmer": muse_glimmer.make_folder}


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], 1))
def test_int8_rows_compute_as_a_folder_with_the_rounded_weights(dtype: str, tmp_path: Path) -> None:
    import torch

    from titan_rl.ext.quantization.ranks.quantize_rows import dequantize_rows, quantize_rows

    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    landed = engine(tmp_path / "model", "int8", dtype, "landed")
    compute = getattr(torch, dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(dequantize_rows(*quantize_rows(weight.to(compute), "int8"), compute))
    model.save_pretrained(tmp_path / "rounded")
    assert landed == engine(tmp_path / "rounded", "none", dtype, "loaded")


def test_fp8_rows_are_those_of_vllms_own_loader(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    landed = engine(tmp_path / "model", "fp8", "bfloat16", "landed")
    assert any(name.endswith("qkv_proj.weight_scale") for name in landed[0])
    assert landed == engine(tmp_path / "model", "fp8", "bfloat16", "loaded")


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("model", slow_except(OTHER_MODELS, 0))
def test_other_models_land_as_vllm_loads_them(model: str, quantization: str, tmp_path: Path) -> None:
    """Fp8 rows equal the rows that vLLM's loader makes. For int8 the folder has the rounded weights."""
    folder = OTHER_MODELS[model](tmp_path / "model")
    landed = engine(folder, quantization, "bfloat16", "landed")
    if quantization == "int8":
        round_matrices(folder / "model.safetensors")
    loaded = engine(folder, "none" if quantization == "int8" else "fp8", "bfloat16", "loaded")
    kept = {name for name in landed[0] if name not in loaded[0]}  # a loaded engine keeps no sums of buffers
    assert all("layer_scalar" in name for name in kept)
    assert all(landed[0][name] == loaded[0][name] for name in landed[0].keys() - kept)
    assert landed[1] == loaded[1]


def round_matrices(file: Path) -> None:
    """Round the linear layers of the language model's blocks."""
    import torch
    from safetensors.torch import load_file, save_file

    from titan_rl.ext.quantization.ranks.quantize_rows import dequantize_rows, quantize_rows

    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("_proj.weight") and "vision" not in name:
            weights[name] = dequantize_rows(*quantize_rows(weight.bfloat16(), "int8"), torch.bfloat16)
    save_file(weights, file, {"format": "pt"})
