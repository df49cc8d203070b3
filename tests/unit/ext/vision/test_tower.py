"""The trainer's log-probs after images are transformers'."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.images import as_smolvlm, draw_image, places_of, prompt_of, transformers_logprobs, transformers_model
from support.whole_model import whole_model
from titan_rl.actors.titan.shard_reader import other_tensors, read_shards
from titan_rl.actors.titan.spec import adapter, build_spec, hf_names
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config, JobSection, ModelSection, TrainingSection
from titan_rl.ext.vision import tiny_folder
from titan_rl.ext.vision.pixels import placeholders_of
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.types import IMAGES, ImagePlace, Rows, Sample

SEQ_LEN = 160
TEXT: dict[str, Any] = tiny_folder.TEXT | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TRAINING = TrainingSection(seq_len=SEQ_LEN, mixed_precision_param="float32")
PACKED: dict[str, Any] = {"shards": 1, "seq_len": SEQ_LEN, "rows_per_microbatch": 1, "pad_id": 0}


@pytest.mark.parametrize(
    ("model_type", "tied", "vision"),
    [
        ("idefics3", False, "frozen"),
        ("smolvlm", True, "projection"),
        ("smolvlm", False, "all"),
        ("idefics3", True, "all"),
    ],
)
def test_log_probs_gradients_and_export_are_transformers(
    model_type: str, tied: bool, vision: Any, tmp_path: Path
) -> None:
    """Of prompts with no image, one and two, some of which differ in their images only."""
    folder = tiny_folder.write_folder(tmp_path / "model", text=TEXT, tied=tied)
    if model_type == "smolvlm":
        as_smolvlm(folder)
    section = ModelSection(hf_assets_path=str(folder), vision=vision)
    config = Config(job=JobSection(dump_folder=str(tmp_path)), model=section, training=TRAINING)
    shape = shape_of(section)
    assert shape.family == model_type
    model, built = whole_model(shape, config), build_spec(shape, seq_len=SEQ_LEN)
    parameters = dict(model.model.named_parameters())
    read_shards(folder, parameters, hf_names(built, list(parameters)), shape.folder_rows())
    model._tower = model._frozen_tower()
    one, other = (draw_image(tmp_path / IMAGES, seed) for seed in range(2))
    placeholder = placeholders_of(str(folder)).token
    rows, expected, theirs = list[Rows](), list[Any](), transformers_model(folder)
    for images in [(), (one,), (other,), (one, other), (other, one)]:
        tokens = prompt_of(folder, ["how many?", *["more"] * len(images)])
        answer = [9, placeholder, 12, 2]  # a sampled placeholder is a token like others
        sample = Sample(tokens + answer, [0] * len(tokens) + [1] * len(answer), {}, len(tokens))
        (batch,) = pack([sample], **PACKED)
        seen = places_of(folder, tokens, images)
        rows.append(replace(batch.microbatches[0], images=[seen]))
        expected.append(transformers_logprobs(theirs, folder, tmp_path / IMAGES, tokens, answer, seen))
    with pytest.raises(ValueError, match="expected 1 runs of 16 placeholders from token 90 on for the image"):
        model.score(replace(rows[1], images=[(ImagePlace(one, 90),)]))
    scores = [model.score(each)[0] for each in rows]
    found = [scored[each.mask[0] > 0] for scored, each in zip(scores, rows, strict=True)]
    for ours, logprobs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, logprobs.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in pairwise(found))
    torch.stack(expected).sum().backward()
    for each in rows:
        placed = model.placed(each)
        (model.logprobs(placed, temperature=1.0)[0] * placed.mask).sum().backward()
    named = {name: p.grad for name, p in model.model.named_parameters() if name != "lm_head.weight" or not tied}
    ours = adapter(built, None).to_hf(named)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if name in ours}
    assert ours.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert (ours[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, key  # zero for the biases of keys
    assert all(p.grad is None and not p.requires_grad for p in model._tower.model.parameters())
    written = adapter(built, None).to_hf(model.model.state_dict())
    tensors = load_file(folder / "model.safetensors")
    others = other_tensors(folder, shape.folder_tensors())
    assert any("embeddings" in name for name in others)
    assert any("connector" in name for name in others) == (vision == "frozen")
    assert any("encoder" in name for name in others) == (vision != "all")
    assert {name for name in written if not (tied and name == "lm_head.weight")} | others.keys() == tensors.keys()
