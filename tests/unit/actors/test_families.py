"""Every family from a folder that transformers made, against transformers itself, in one process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.family_folders import CASES, make_folder
from support.whole_model import whole_model
from titan_rl.actors.titan.model import joined, transposed
from titan_rl.actors.titan.shard_reader import read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names, rope
from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config, ModelSection, TrainingSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.hf_config import rope_of, scaling_of
from titan_rl.wire.model_families import BY_MODEL_TYPE
from titan_rl.wire.types import Sample

SEQ_LEN = 160
OURS = [name for name, (model_type, _) in CASES.items() if model_type in BY_MODEL_TYPE]  # models of our blocks
cases = pytest.mark.parametrize("name", OURS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def folder_of(name: str, folders: Path) -> Path:
    folder = folders / name
    if not folder.exists():
        make_folder(name, folder)
    return folder


@cases
def test_the_trainers_log_probs_are_transformers(name: str, folders: Path) -> None:
    """Packed rows of several documents, two of which share a prompt; one is longer than any window."""
    folder = folder_of(name, folders)
    shape = shape_of(ModelSection(hf_assets_path=str(folder)))
    model = whole_model(shape, Config(training=TrainingSection(seq_len=SEQ_LEN)))
    spec = build_spec(shape, seq_len=SEQ_LEN)
    tensors = load_file(folder / "model.safetensors")
    assert {key: tuple(w.shape) for key, w in tensors.items()} == shape.folder_tensors()
    parameters = dict(model.tensors)
    read_shards(folder, parameters, hf_names(spec, list(parameters)), shape.folder_rows())
    random = np.random.default_rng(0)
    prompt = random.integers(3, 128, 40).tolist()
    texts = [prompt + random.integers(3, 128, n).tolist() for n in (20, 30)]
    texts.append(random.integers(3, 128, 130).tolist())
    samples = [Sample(text, [0] + [1] * (len(text) - 1), {}, 40 if i < 2 else 0) for i, text in enumerate(texts)]
    batches = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=2, pad_id=0, share=True)
    scored = unpack(batches, [[model.score(rows) for rows in batch.microbatches] for batch in batches], samples)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for text, ours in zip(texts, scored, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            expected = theirs(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        assert np.abs(ours[1:] - expected).mean() < 5e-6
        np.testing.assert_allclose(ours[1:], expected, atol=5e-5)
    written = adapter(spec, None).to_hf(model.model.state_dict())
    for one, parts in shape.fused().items():
        written[one] = joined([written.pop(part) for part in parts])
    written |= {one: transposed(written[one]) for one in shape.stacked()}
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", [name for name in OURS if name.startswith("gpt-oss")])
def test_gradients_of_sinks_and_clamped_experts_are_transformers(name: str, folders: Path) -> None:
    """Of all parameters, at a length within the window and at one beyond it."""
    folder = folder_of(name, folders)
    shape = shape_of(ModelSection(hf_assets_path=str(folder)))
    model = whole_model(shape, Config(training=TrainingSection(seq_len=SEQ_LEN)))
    spec = build_spec(shape, seq_len=SEQ_LEN)
    parameters = dict(model.model.named_parameters())
    read_shards(folder, parameters, hf_names(spec, list(parameters)), shape.folder_rows())
    random = np.random.default_rng(0)
    texts = [random.integers(3, 128, n).tolist() for n in (12, 90)]
    samples = [Sample(text, [0] + [1] * (len(text) - 1), {}) for text in texts]
    (batch,) = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=1, pad_id=0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for rows in batch.microbatches:
        placed = model.placed(rows)
        (model.logprobs(placed, temperature=1.0)[0] * placed.mask).sum().backward()
    for text in texts:
        ids = torch.tensor([text])
        theirs(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum().backward()
    ours = adapter(spec, None).to_hf({name: p.grad for name, p in parameters.items()})
    ours |= {one: transposed(ours[one]) for one in shape.stacked()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient is not None
        assert (ours[key] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-5, key  # 0 where a token has one expert


@cases
def test_rotary_tables_are_transformers_to_the_last_bit(name: str, folders: Path) -> None:
    config = AutoConfig.from_pretrained(folder_of(name, folders))
    theirs: Any = AutoModelForCausalLM.from_config(config).model.rotary_emb
    shape = shape_of(ModelSection(hf_assets_path=str(folder_of(name, folders))))
    facts = json.loads((folder_of(name, folders) / "config.json").read_text())
    assert shape.rope_scaling == scaling_of(rope_of(facts))
    for layer in range(shape.n_layers):
        kind = [facts["layer_types"][layer]] if shape.parts.full_every and not shape.parts.one_rope else []
        cos, sin = theirs(torch.zeros(1), torch.arange(SEQ_LEN)[None], *kind)
        table = rope(shape, layer, SEQ_LEN).build().cache
        times = table.shape[-1] // 2 // cos.shape[-1]  # gpt-oss's has one half
        assert torch.equal(table, torch.cat([cos[0].repeat(1, times), sin[0].repeat(1, times)], dim=-1))
