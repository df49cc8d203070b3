"""transformers, trainers and an engine compute the same after images."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.forked_programs import IMPORTS, results_of
from support.gloo_ranks import on_ranks
from support.images import as_smolvlm, draw_image, transformers_logprobs, transformers_model
from support.seeing import FIRST, TEXT, cases, images_of, score
from support.slow_cases import slow_except
from titan_rl.ext.vision import tiny_folder
from titan_rl.wire.types import IMAGES

ENGINE = (
    IMPORTS
    + """
import json
from pathlib import Path
from support.seeing import sample
run, *folders = map(Path, sys.argv[1:])
print("FOUND", json.dumps(sample(run, folders, *json.loads(sys.stdin.read()))))
"""
)


FROZEN = {
    "frozen": ("model.vision_model.", "model.connector."),
    "projection": ("model.vision_model.",),
    "all": ("model.vision_model.embeddings.",),
}
"""Beginnings of the names of tensors that stay as they are, by model.vision."""


@pytest.mark.parametrize(
    ("family", "vision", "mesh"),
    slow_except(
        [
            *(("idefics3", "frozen", mesh) for mesh in [(1, 1), (2, 1), (1, 2)]),
            *((family, "projection", mesh) for family, mesh in [("idefics3", (1, 2)), ("smolvlm", (2, 1))]),
            *(("smolvlm", "all", mesh) for mesh in [(2, 1), (1, 2), (1, 1)]),
        ],
        *(0, 5),
    ),
)
def test_log_probs_and_gradients_after_images_are_equal_on_three_sides(
    family: str, vision: str, mesh: tuple[int, int], tmp_path: Path
) -> None:
    """After two syncs; the trained tensors of the second have other values."""
    first = tiny_folder.write_folder(tmp_path / "first", text=TEXT)
    if family == "smolvlm":
        as_smolvlm(first)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    tensors = load_file(first / "model.safetensors")
    changed = {
        name: w if name.startswith(FROZEN[vision]) else w + 0.1 * torch.randn_like(w) for name, w in tensors.items()
    }
    save_file(changed, second / "model.safetensors", {"format": "pt"})
    images = [draw_image(tmp_path / IMAGES, seed) for seed in range(2)]
    prompts = cases(first, images)
    given = json.dumps([vision, prompts])
    (engine,) = results_of("generator", ENGINE, tmp_path, first, second, given=given)
    expected = "expected 1 runs of 16 placeholders from token"
    assert all(expected in each for each in engine["refused"])
    before, answers = (sorted(each, key=lambda answer: len(answer["images"])) for each in engine["answers"])
    trainer = on_ranks(mesh[0] * mesh[1], score, str(tmp_path), str(second), vision, mesh, answers)
    assert engine["pixels"] == trainer["pixels"]
    expected = logprobs_of(second, tmp_path / IMAGES, answers)
    for found, wanted in ((before, logprobs_of(first, tmp_path / IMAGES, before)), (answers, expected)):
        np.testing.assert_allclose([each["logprobs"] for each in found], wanted, atol=1e-5)
    np.testing.assert_allclose(trainer["logprobs"], expected, atol=1e-5)
    gradients = gradients_of(second, tmp_path / IMAGES, answers[:FIRST])
    assert len(trainer["gradients"]) == {"frozen": 1, "projection": 2, "all": 4}[vision]
    for name, found in trainer["gradients"].items():
        wanted = gradients[name]
        np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=name)
    exported = tmp_path / "export"
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(second / name, exported)
    np.testing.assert_array_equal(logprobs_of(exported, tmp_path / IMAGES, answers), expected)
    written = {name: w for file in exported.glob("*.safetensors") for name, w in load_file(file).items()}
    assert written.keys() == changed.keys()
    assert all(torch.equal(w, changed[name]) for name, w in written.items())
    one, other = (
        logprobs_of(
            second, tmp_path / IMAGES, [each | {"images": [(name, each["images"][0][1])]} for each in answers[2:4]]
        )
        for name in images
    )
    assert np.abs(np.subtract(one, other)).max() > 1e-2


def gradients_of(folder: Path, images: Path, answers: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    model = transformers_model(folder)
    for each in answers:
        transformers_logprobs(model, folder, images, each["tokens"], each["answer"], images_of(each)).sum().backward()
    return {name: p.grad.flatten().numpy() for name, p in model.named_parameters() if p.grad is not None}


def logprobs_of(folder: Path, images: Path, answers: list[dict[str, Any]]) -> list[list[float]]:
    model = transformers_model(folder)
    with torch.no_grad():
        found = [
            transformers_logprobs(model, folder, images, each["tokens"], each["answer"], images_of(each))
            for each in answers
        ]
    return [each.tolist() for each in found]
