"""Muse Glimmer from a folder that transformers made, against transformers itself, in one process; and model.spec."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support import deepseek_v3, gemma4
from support.muse_glimmer import make_folder, transformers_model
from support.own_specs import make_mla_folder
from support.slow_cases import slow_except
from support.whole_model import whole_model
from titan_rl.actors.titan.gemma4 import spec as gemma4_spec
from titan_rl.actors.titan.muse_glimmer import spec
from titan_rl.actors.titan.shard_reader import other_tensors, read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names
from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config, ModelSection, TrainingSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.types import Sample

SEQ_LEN = 160
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("muse") / "model")


def shape_with(folder: Path, spec: str = "") -> ModelShape:
    return shape_of(ModelSection(hf_assets_path=str(folder), spec=spec))


def loaded(folder: Path, spec: str = "") -> tuple[Any, Any]:
    shape = shape_with(folder, spec)
    model, built = whole_model(shape, Config(training=TrainingSection(seq_len=SEQ_LEN))), build_spec(shape, seq_len=160)
    parameters = dict(model.tensors)
    read_shards(folder, parameters, hf_names(built, list(parameters)), shape.folder_rows())
    return model, built


MODELS = [
    "muse_glimmer",
    "a user's MLA",
    *(f"{family}, drawn {seed}" for family in ("gemma4", "deepseek_v3") for seed in range(3)),
    *(f"small gemma4, drawn {seed}" for seed in range(3)),
    *(f"small gemma4 with towers, drawn {seed}" for seed in (3, 4)),
]


@pytest.mark.parametrize("name", slow_except(MODELS, 0, 1, 2, 5, 8, 11))
def test_log_probs_gradients_and_export_are_transformers(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows of several documents, two of which share a prompt; one is longer than the window."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    own = "support.own_specs:mla" if name == "a user's MLA" else ""
    if own:
        folder = make_mla_folder(tmp_path)
    elif name != "muse_glimmer":
        if "deepseek_v3" in name:
            folder = deepseek_v3.make_folder(tmp_path, deepseek_v3.drawn(int(name[-1])))
        else:
            draw, towers = gemma4.drawn_small if "small" in name else gemma4.drawn, "towers" in name
            keys = draw(int(name[-1]))
            folder = gemma4.make_folder(tmp_path, keys, std=0.1, towers=("vision", "audio") if towers else ())
            if towers:
                gemma4.add_unused(folder)
    model, spec = loaded(folder, own)
    random = np.random.default_rng(0)
    prompt = random.integers(3, 60, 40).tolist()
    texts = [prompt + random.integers(3, 60, n).tolist() for n in (20, 30)]
    texts.append(random.integers(3, 60, 130).tolist())
    samples = [Sample(text, [0] + [1] * (len(text) - 1), {}, 40 if i < 2 else 0) for i, text in enumerate(texts)]
    batches = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=2, pad_id=0, share=True)
    scored = unpack(batches, [[model.score(rows) for rows in batch.microbatches] for batch in batches], samples)
    theirs = transformers_model(folder, vision=name == "muse_glimmer" or "towers" in name)
    for text, ours in zip(texts, scored, strict=True):
        ids = torch.tensor([text])
        expected = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(ours[1:], expected.detach().numpy(), atol=1e-4)
        expected.sum().backward()
    (batch,) = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=1, pad_id=0)
    for rows in batch.microbatches:
        placed = model.placed(rows)
        (model.logprobs(placed, temperature=1.0)[0] * placed.mask).sum().backward()
    ours = adapter(spec, None).to_hf({name: p.grad for name, p in model.model.named_parameters() if p.requires_grad})
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    gradients = deepseek_v3.of_each_expert(gradients) if "deepseek_v3" in name else gradients
    wanted = {name: gradient for name, gradient in gradients.items() if name in ours}
    assert ours.keys() == wanted.keys()
    most = 3e-4 if "small" in name else 5e-5  # transformers' own in float32 and float64 differ by 5e-4 there
    for key, gradient in wanted.items():
        assert (ours[key] - gradient).norm() <= most * gradient.norm(), key
    written, tensors = adapter(spec, None).to_hf(model.model.state_dict()), load_file(folder / "model.safetensors")
    others = other_tensors(folder, written.keys())
    assert all("vision" in name or "audio" in name or ".k_" in name or ".v_proj" in name for name in others)
    assert (written | others).keys() == tensors.keys()
    assert all(torch.equal(value, tensors[key]) for key, value in (written | others).items())


def test_the_shape_is_the_models(folder: Path) -> None:
    shape, tensors = shape_with(folder), load_file(folder / "model.safetensors")
    assert isinstance(shape, SpecShape)
    assert (shape.family, shape.n_layers, shape.hidden_dim, shape.max_seq_len) == ("muse_glimmer", 6, 96, 256)
    assert shape.folder_tensors() == {name: tuple(w.shape) for name, w in tensors.items() if "vision" not in name}
    assert shape.parameters == sum(w.numel() for name, w in tensors.items() if "vision" not in name)
    assert "lm_head.weight" not in shape.hf_tensors(head=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, found true"),
        ({"hidden_activation": "gelu"}, 'hidden_activation: expected silu, found "gelu"'),
        ({"qk_scale_factor": None}, ""),
    ],
)
def test_what_it_cannot_compute_is_refused(folder: Path, changes: dict[str, Any], problem: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in (config["text_config"] | changes).items() if value is not None}
    with pytest.raises((KeyError, ValueError), match=problem or "qk_scale_factor"):
        spec(config | {"text_config": text})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"enable_moe_block": True}, "enable_moe_block: expected False, found true"),
        ({"num_experts": 4}, "num_experts: expected None, found 4"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected weights that are not quantized"),
        (
            {"use_bidirectional_attention": "all"},
            'use_bidirectional_attention: expected null, or "vision", found "all"',
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: expected a full_attention layer before the shared ones"),
        ({"per_layer_config": {"3": {"head_dim": 64}}}, "per_layer_config: expected equal keys in all full_attention"),
        ({"vocab_size_per_layer_input": 32}, "vocab_size_per_layer_input: expected at least vocab_size = 64, found 32"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected one value"),
    ],
)
def test_what_gemma_4_cannot_compute_is_refused(changes: dict[str, Any], problem: str) -> None:
    types = [gemma4.WINDOW, gemma4.FULL] * 2
    text = gemma4.drawn_small(0) | {"num_hidden_layers": 4, "layer_types": types, "num_kv_shared_layers": 1}
    text |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    for config in (text | changes, {"text_config": text | changes}):
        if "text_config" in config or "one value" not in problem:
            with pytest.raises(ValueError, match=re.escape(problem)):
                gemma4_spec(config)


def test_a_users_function_builds_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    own, usual = shape_with(folder, "support.own_specs:own"), shape_with(folder)
    assert own.folder_tensors() == usual.folder_tensors()
    for name, problem in {
        "reordering": "expected an adapter that only renames tensors, found that it changes layers.0.attention",
        "flexible": "expected VarlenAttention in layer 0, found FlexAttention.Config",
        "empty": "expected support.own_specs:empty to return TorchTitan's ModelSpec with an adapter, found None",
        "absent": "model.spec = 'support.own_specs:absent': AttributeError",
    }.items():
        with pytest.raises(ValueError, match="expected a usable") as error:
            shape_with(folder, f"support.own_specs:{name}")
        assert problem in str(error.value)
    with pytest.raises(ValueError, match=r"required by model\.spec"):
        shape_of(ModelSection(spec="support.own_specs:own"))


def test_gemma_4s_layers_have_their_own_heads_in_a_deep_model(tmp_path: Path) -> None:
    """transformers writes their numbers with a zero in front, from ten layers on."""
    keys = gemma4.drawn(0) | {"num_hidden_layers": 11, "head_dim": 32, "global_head_dim": 64, "layer_types": None}
    folder = gemma4.make_folder(tmp_path, keys)
    assert "05" in json.loads((folder / "config.json").read_text())["per_layer_config"]
    tensors = load_file(folder / "model.safetensors")
    assert shape_with(folder).folder_tensors() == {name: tuple(w.shape) for name, w in tensors.items()}
