"""Layers of models that are not made of our blocks, which have adapters: as TorchTitan's converter gives them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import gemma4, muse_glimmer
from support.own_specs import make_mla_folder
from titan_rl.actors.titan.model import overridden_spec, titan_config
from titan_rl.actors.titan.spec import hf_names
from titan_rl.config.sections import Config, LoraSection, ParallelismSection
from titan_rl.ext.adapters.adapter_sync import check_adapter_sync
from titan_rl.ext.adapters.layers import adaptable, adapter_names, adapter_parameters, adapter_sizes, cut_of
from titan_rl.ext.adapters.live_adapters import live_adapters
from titan_rl.ext.adapters.ranks.lora import Adapters
from titan_rl.ext.adapters.sizes import AdapterSizes
from titan_rl.wire.model_shape import SpecShape, shape_of_folder
from titan_rl.wire.weight_plan import Piece

TESTS = Path(__file__).parents[3]
DENSE = ["o", "gate", "down", "up"]


def gemma(folder: Path) -> Path:
    keys = {"num_hidden_layers": 2, "layer_types": [gemma4.WINDOW, gemma4.FULL], "attention_k_eq_v": True}
    return gemma4.make_folder(folder, gemma4.drawn(7, ranks=2) | keys)


MODELS: dict[str, tuple[Callable[[Path], Path], str, list[str]]] = {
    "gemma4": (gemma, "", ["q", "k", "v", *DENSE]),
    "muse": (muse_glimmer.make_folder, "", ["q", "k", "v", "o", "self_attn.gate_proj", *DENSE[1:]]),
    "mla": (make_mla_folder, "support.own_specs:mla", ["self_attn.q_b_proj", "self_attn.kv_b_proj", *DENSE]),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SpecShape, list[str]]:
    make, spec, names = MODELS[request.param]
    folder = make(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        shape = shape_of_folder(str(folder), "folder", spec)
    assert isinstance(shape, SpecShape)
    return shape, names


@pytest.mark.parametrize("chosen", [[], ["o", "down"]])
def test_adapters_are_those_of_the_converted_model(model: tuple[SpecShape, list[str]], chosen: list[str]) -> None:
    shape, names = model
    config = Config(lora=LoraSection(rank=4, targets=chosen))
    spec = overridden_spec(shape, config, titan_config(config, ParallelismSection()), "cpu")
    with torch.device("meta"):
        built = spec.model.build()
    matrices = {name: tuple(p.shape) for name, p in built.named_parameters() if ".lora_" in name}
    by_hf = hf_names(spec, list(matrices), Adapters(config.lora))
    assert {by_hf[name]: size for name, size in matrices.items()} == adapter_sizes(config.lora, shape)
    assert adapter_parameters(config.lora, shape) == sum(a * b for a, b in matrices.values())
    if not chosen:
        assert sorted(adaptable(shape)) == sorted(names)


def test_tensor_parallelism_cuts_one_matrix_of_each(model: tuple[SpecShape, list[str]]) -> None:
    shape, lora = model[0], LoraSection(rank=4)
    sizes = adapter_sizes(lora, shape)
    cut = [adapter_names(name)[cut_of(name, shape) == "rows"] for name in shape.adaptable]
    halved = sum(math.prod(sizes[name]) for name in cut)
    assert adapter_parameters(lora, shape, 1) - adapter_parameters(lora, shape, 2) == halved // 2


def test_latent_attention_gets_merged_adapters(model: tuple[SpecShape, list[str]]) -> None:
    shape = model[0]
    config = Config(lora=LoraSection(rank=8, sync="adapter"))
    found = list(check_adapter_sync(config, shape, "cpu"))
    latent = "self_attn.kv_b_proj" in adaptable(shape)
    assert len(found) == latent
    assert all("in place of kv_b_proj vLLM computes with copies of its parts" in line for line in found)
    others = replace(config.lora, targets=["o", "gate"])
    assert not list(check_adapter_sync(replace(config, lora=others), shape, "cpu"))


def test_a_step_keeps_more_numbers_with_more_adapters(model: tuple[SpecShape, list[str]]) -> None:
    few, all_ = (AdapterSizes(LoraSection(rank=4, targets=names), model[0]) for names in (["o"], []))
    for recomputes in (True, False):
        assert 0 < few.kept_per_token(1, recomputes=recomputes) < all_.kept_per_token(1, recomputes=recomputes)


def test_keys_that_are_values_have_one_adapter_in_two_parts(model: tuple[SpecShape, list[str]]) -> None:
    shape = model[0]
    if json.loads(shape.hf).get("attention_k_eq_v") is not True:
        return
    at = "model.layers.1.self_attn."
    rows, cols = shape.tensors[f"{at}k_proj.weight"]
    parts = [Piece(f"{at}qkv_proj.weight", i * rows, 0, f"{at}k_proj.weight", 0, rows, 0, cols) for i in range(2)]
    found = {param: piece.name for param, _, piece in live_adapters(parts, LoraSection(rank=4), shape) if piece}
    assert found == {
        f"{at}qkv_proj.lora_{kind}.{i}": f"{at}k_proj.lora_{kind.upper()}.weight" for i in range(2) for kind in "ab"
    }
    strips = [parts[0], replace(parts[1], row0=8, rows=8)]
    with pytest.raises(ValueError, match="does not cut into strips"):
        list(live_adapters(strips, LoraSection(rank=4), shape))
