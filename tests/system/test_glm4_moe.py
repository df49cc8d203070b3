"""GLM-4.5's routers: their biases reach the engine's parameters, the export and the next start in all 32 bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.family_folders import make_folder
from support.forked_programs import IMPORTS, results_of
from support.gloo_ranks import on_ranks
from support.rank_programs import MESHES
from support.running import Runs
from support.slow_cases import slow_except
from support.tiny import tiny_model
from support.trainer_cases import config as trainer_config
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.text.tokenizer import build
from titan_rl.wire.model_shape import ROUTE_BIAS

ENGINE = (
    IMPORTS
    + """
import json
from pathlib import Path
import torch
from support.synced_engine import SyncedEngine
from titan_rl.wire.model_shape import OF_ROUTER

dtype, *folders = sys.argv[1:]
folders = [Path(folder) for folder in folders]
synced = SyncedEngine(folders[0], folders[0], dtype)
for completions in synced.sampled(folders):
    (live,) = synced.engine._llm.apply_model(lambda model: dict(model.named_parameters()))
    routers = {name: w for name, w in synced.weights.items() if name.endswith(OF_ROUTER)}
    assert len(routers) == 2 * synced.shape.routed_layers
    assert all(live[name].dtype == torch.float32 for name in routers)
    sent = {name: w if "bias" in name else w.to(getattr(torch, dtype)).float() for name, w in routers.items()}
    exact = [torch.equal(live[name], w) for name, w in sent.items()]
    print("FOUND", json.dumps([exact, [[c.tokens, c.logprobs] for c in completions]]))
"""
)


def logprobs_of(folder: Path, dtype: str, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model.eval()(ids).logits[0, 3:-1].float().log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0].numpy()


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], 1))
def test_an_engine_routes_by_the_synced_biases(tmp_path: Path, dtype: str) -> None:
    """No tensor of the second version is the first's. Engines of 16 bits get weights in 16 bits, and biases in 32."""
    folders = [tmp_path / "first", tmp_path / "second"]
    make_folder("GLM-4.5", folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                tensor += 0.5 * tensor.std() * torch.randn_like(tensor)
    model.save_pretrained(folders[1])
    for folder, (exact, found) in zip(folders, results_of("generator", ENGINE, dtype, *folders), strict=True):
        assert all(exact)
        texts = [[1, 5, 6, 7, *tokens] for tokens, _ in found]
        exactly, rounded = (np.stack([logprobs_of(folder, d, text) for text in texts]) for d in ("float32", dtype))
        gap = np.abs(np.array([logprobs for _, logprobs in found]) - rounded).mean()
        assert gap < max(5e-6, 1.5 * np.abs(rounded - exactly).mean()), "rounding of 16 bits changes some routes"


def biased_folder(folder: Path, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Write a model with a tokenizer; return its routers' biases, which have more than 16 bits."""
    routed: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder.mkdir()
    tiny_model(
        "glm4_moe", max_position_embeddings=256, num_hidden_layers=3, num_key_value_heads=2, **routed
    ).save_pretrained(folder)
    build(folder)
    tensors = {name: factor * w for name, w in load_file(folder / "model.safetensors").items()}
    biases = {name: 5 + 0.1 * factor * torch.randn(len(w)) for name, w in tensors.items() if name.endswith(ROUTE_BIAS)}
    save_file(tensors | biases, folder / "model.safetensors", metadata={"format": "pt"})
    return biases


@pytest.mark.parametrize("lora", slow_except([0, 4], 1))
def test_a_run_by_its_folder_alone_keeps_the_biases(runs: Runs, tmp_path: Path, lora: int) -> None:
    """In 16 bits, with the engine's experts and samples that continue over a sync, and resumed from a checkpoint."""
    biases = biased_folder(tmp_path / "model")
    keys: dict[str, Any] = {
        **{"model__name": "auto", "model__hf_assets_path": str(tmp_path / "model"), "lora__rank": lora},
        **{"generator__dtype": "bfloat16", "training__mixed_precision_param": "bfloat16"},
        **{"rollout__max_staleness_steps": 1, "cold_start__steps": 0, "checkpoint__interval": 1},
        **{"algorithm__routing_replay": True, "optimizer__lr": 1e-5},
    }
    runs.finish(tmp_path / "run", **keys, training__steps=1)
    run = runs.finish(tmp_path / "run", **keys, training__steps=3)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["logprob_gap/mean"] for line in lines) < 2e-2
    assert min(line["routing/agreement"] for line in lines if "routing/agreement" in line) > 0.95
    (file,) = (tmp_path / "run" / "hf").glob("*.safetensors")
    exported = load_file(file)
    assert biases, "two layers have experts"
    for name, bias in biases.items():
        assert torch.equal(exported[name], bias)
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config["model_type"] == "glm4_moe"


def rounded_and_swapped(folder: Path, source: str, other: str) -> dict[str, Any]:
    """Be a rank that exports in 16 bits, and that scores with the frozen weights of another folder in between."""
    from torch import distributed

    from titan_rl.actors.titan.model import FrozenWeights, TitanModel

    config = replace(trainer_config(folder, MESHES["fsdp2_tp2_ep2"]), model=ModelSection(hf_assets_path=source))
    model = TitanModel(config, shape_of(config.model), config.parallelism)
    model.read(source)
    own = model.checksum()
    frozen = FrozenWeights(model, other)
    with frozen.swapped_in():
        theirs = model.checksum()
        model.write(folder / "theirs")
    assert own != theirs
    assert model.checksum() == own
    model.write(folder / "rounded", torch.bfloat16)
    distributed.barrier()
    rounded, swapped = (
        {n: w for f in (folder / name).glob("*.safetensors") for n, w in load_file(f).items()}
        for name in ("rounded", "theirs")
    )
    given, theirs = (load_file(Path(path) / "model.safetensors") for path in (source, other))
    biases = [name for name in given if name.endswith(ROUTE_BIAS)]
    return {
        "names": rounded.keys() == given.keys(),
        "biases": [torch.equal(rounded[name], given[name]) for name in biases],
        "weights": all(torch.equal(rounded[n], w.bfloat16()) for n, w in given.items() if n not in biases),
        "frozen": all(torch.equal(swapped[name], w) for name, w in theirs.items()),
    }


def test_exports_in_16_bits_and_frozen_weights_have_their_own_biases(tmp_path: Path) -> None:
    biased_folder(tmp_path / "own")
    biased_folder(tmp_path / "other", factor=1.1)
    found = on_ranks(4, rounded_and_swapped, str(tmp_path / "own"), str(tmp_path / "other"))
    assert found == {"names": True, "biases": [True, True], "weights": True, "frozen": True}
