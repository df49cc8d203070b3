"""A folder of gpt-oss as OpenAI writes it, with experts in 4 bits, is read as transformers reads it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from bench.family_folders import make_folder
from support.whole_model import whole_model
from titan_rl.actors.titan.shard_reader import read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names
from titan_rl.config.sections import Config, ModelSection
from titan_rl.preflight.checks.model import check_weights
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import BLOCKS, SCALES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Random codes of all values, with exponents from 2^-9 to 2^-2."""
    make_folder("gpt-oss, window 16", tmp_path)
    whole = shape_of(ModelSection(hf_assets_path=str(tmp_path)))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: w for name, w in load_file(tmp_path / "model.safetensors").items() if name not in whole.stacked()}
    random = torch.Generator().manual_seed(0)
    for name, size in whole.folder_tensors(mxfp4=True).items():
        if name.endswith((BLOCKS, SCALES)):
            low, high = (0, 256) if name.endswith(BLOCKS) else (118, 126)
            tensors[name] = torch.randint(low, high, size, dtype=torch.uint8, generator=random)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_experts_in_4_bits_have_the_values_that_transformers_gives_them(folder: Path) -> None:
    shape = shape_of(ModelSection(hf_assets_path=str(folder)))
    assert shape.mxfp4
    assert shape == replace(shape, mxfp4=False), "a folder without quantization has the same model"
    assert list(check_weights(folder, "model.hf_assets_path", shape)) == []
    model = whole_model(shape, Config()).model
    spec, parameters = build_spec(shape, seq_len=8), dict(model.named_parameters())
    read_shards(folder, parameters, hf_names(spec, list(parameters)), shape.folder_rows())
    ours = adapter(spec, None).to_hf(parameters)
    whole = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=whole)
    expected = dict(theirs.named_parameters())
    assert ours.keys() == expected.keys()
    for name, parameter in expected.items():
        mine = ours[name].transpose(1, 2) if name in shape.stacked() else ours[name]
        assert torch.equal(mine, parameter), name


def test_a_missing_half_of_the_numbers_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    shape = shape_of(ModelSection(hf_assets_path=str(folder)))
    (problem,) = check_weights(folder, "model.hf_assets_path", shape)
    assert f"found no {lost}" in problem
