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
from support.images import draw_image, transformers_logprobs, transformers_model
from support.seeing import TEXT, cases, images_of, score
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
print("FOUND", json.dumps(sample(run, folders, json.loads(sys.stdin.read()))))
"""
)


@pytest.mark.parametrize("mesh", slow_except([((1, 1),), ((2, 1),), ((1, 2),)], 0))
def test_log_probs_after_images_are_equal_on_three_sides(mesh: tuple[int, int], tmp_path: Path) -> None:
    """After two syncs; the text model of the second has other weights."""
    first = tiny_folder.write_folder(tmp_path / "first", text=TEXT)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    tensors = load_file(first / "model.safetensors")
    changed = {name: w + 0.1 * torch.randn_like(w) if "text_model" in name else w for name, w in tensors.items()}
    save_file(changed, second / "model.safetensors", {"format": "pt"})
    images = [draw_image(tmp_path / IMAGES, seed) for seed in range(2)]
    prompts = cases(first, images)
    (engine,) = results_of("generator", ENGINE, tmp_path, first, second, given=json.dumps(prompts))
    expected = "expected 1 runs of 16 placeholders from token"
    assert all(expected in each for each in engine["refused"])
    trainer = on_ranks(mesh[0] * mesh[1], score, str(tmp_path), str(second), mesh, engine["answers"][1])
    assert engine["pixels"] == trainer["pixels"]
    before, answers = engine["answers"]
    expected = logprobs_of(second, tmp_path / IMAGES, answers)
    for found, wanted in ((before, logprobs_of(first, tmp_path / IMAGES, before)), (answers, expected)):
        np.testing.assert_allclose([each["logprobs"] for each in found], wanted, atol=1e-5)
    np.testing.assert_allclose(trainer["logprobs"], expected, atol=1e-5)
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


def logprobs_of(folder: Path, images: Path, answers: list[dict[str, Any]]) -> list[list[float]]:
    model = transformers_model(folder)
    with torch.no_grad():
        found = [
            transformers_logprobs(model, folder, images, each["tokens"], each["answer"], images_of(each))
            for each in answers
        ]
    return [each.tolist() for each in found]
