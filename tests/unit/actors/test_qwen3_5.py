"""Qwen3.5 from folders that transformers made, with sizes that a seed draws, against transformers itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.qwen3_5 import FULL, drawn, make_folder, transformers_model
from support.whole_model import whole_model
from titan_rl.actors.titan.qwen3_5 import spec
from titan_rl.actors.titan.shard_reader import other_tensors, read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names
from titan_rl.actors.vllm.vllm_params import planned_layout
from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config, ModelSection, TrainingSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.types import Sample

SEQ_LEN = 160
PACKED: dict[str, Any] = {"shards": 1, "seq_len": SEQ_LEN, "rows_per_microbatch": 2, "pad_id": 0}
DRAWN = [(0, False), (1, True), (2, False), (3, True)]  # seed, and whether the folder has a vision tower


def shape_with(folder: Path) -> ModelShape:
    return shape_of(ModelSection(hf_assets_path=str(folder)))


@pytest.mark.parametrize(("seed", "tower"), DRAWN)
def test_log_probs_gradients_and_export_are_transformers(seed: int, tower: bool, tmp_path: Path) -> None:
    """Packed rows of several documents, one of which has several chunks."""
    folder = make_folder(tmp_path, drawn(seed), tower=tower)
    shape = shape_with(folder)
    model, built = whole_model(shape, Config(training=TrainingSection(seq_len=SEQ_LEN))), build_spec(shape, seq_len=160)
    parameters = dict(model.model.named_parameters())
    read_shards(folder, parameters, hf_names(built, list(parameters)), shape.folder_rows())
    random = np.random.default_rng(seed)
    texts = [random.integers(3, 60, n).tolist() for n in (61, 2, 30, 140)]
    samples = [Sample(text, [0] + [1] * (len(text) - 1), {}) for text in texts]
    batches = pack(samples, **PACKED)
    scored = unpack(batches, [[model.score(rows) for rows in batch.microbatches] for batch in batches], samples)
    theirs = transformers_model(folder)
    for text, ours in zip(texts, scored, strict=True):
        ids = torch.tensor([text])
        expected = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(ours[1:], expected.detach().numpy(), rtol=1e-5, atol=5e-5)
        expected.sum().backward()
    for rows in batches[0].microbatches:
        placed = model.placed(rows)
        (model.logprobs(placed, temperature=1.0)[0] * placed.mask).sum().backward()
    named = {name: p.grad for name, p in model.model.named_parameters() if name != "lm_head.weight" or not shape.tied}
    ours = joined(adapter(built, None).to_hf(named), shape)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if name in ours}
    assert ours.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert (ours[key] - gradient).norm() <= 2e-4 * gradient.norm(), key
    samples = [Sample(texts[0][:n], [0] * 40 + [1] * (n - 40), {}, 40) for n in (50, 61)]
    one_row: dict[str, Any] = PACKED | {"rows_per_microbatch": 1}
    (shared,) = pack(samples, **one_row, share=True)
    with pytest.raises(ValueError, match="expected whole documents for layers with a recurrent state"):
        model.score(shared.microbatches[0])
    written = joined(adapter(built, None).to_hf(model.model.state_dict()), shape)
    tensors = load_file(folder / "model.safetensors")
    others = other_tensors(folder, shape.folder_tensors().keys())
    assert all("visual" in name for name in others)
    assert (written | others).keys() == tensors.keys()
    assert all(torch.equal(value, tensors[key]) for key, value in (written | others).items())


def joined(tensors: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    for one, parts in shape.fused().items():
        tensors[one] = torch.cat([tensors.pop(part) for part in parts])
    return tensors


def test_the_shape_is_the_models(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, drawn(1), tower=True)
    shape, tensors = shape_with(folder), load_file(folder / "model.safetensors")
    assert isinstance(shape, SpecShape)
    assert shape.recurrent_heads == drawn(1)["linear_num_key_heads"]
    assert shape.folder_tensors() == {name: tuple(w.shape) for name, w in tensors.items() if "visual" not in name}
    in_16_bits = planned_layout(shape, tp=1, rank=0, dtype="bfloat16").shapes
    decays = {size for name, size in in_16_bits.items() if name.endswith("A_log")}
    assert decays == {(drawn(1)["linear_num_value_heads"], 2)}, "a sync moves float32 as two numbers"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, found true"),
        ({"output_gate_type": "sigmoid"}, 'output_gate_type: expected silu or swish, found "sigmoid"'),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected a layer with full_attention"),
        (
            {"layer_types": [FULL, FULL]},
            "layer_types: expected linear_attention or full_attention for each of 1 layers",
        ),
        ({"linear_num_value_heads": 5, "linear_num_key_heads": 2}, "linear_num_value_heads: expected a multiple of 2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: expected rope_type default"),
    ],
)
def test_what_it_cannot_compute_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    config = json.loads((make_folder(tmp_path, drawn(0)) / "config.json").read_text())
    layers = {"num_hidden_layers": 1} if "layer_types" in changes else {}
    with pytest.raises(ValueError, match=problem):
        spec(config | layers | changes)
