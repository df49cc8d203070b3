"""Refusals of what a model that is not made of our blocks cannot do."""

from pathlib import Path

import pytest

from support.checked_configs import config
from support.muse_glimmer import make_model
from titan_rl.config.sections import Config
from titan_rl.ext.tiny import shrink
from titan_rl.ext.tiny.shrink import shrunk
from titan_rl.preflight.checks import problems
from titan_rl.preflight.refusal import ConfigRefused, raising
from titan_rl.tools.deployed import alone

SFT = '[model]\nhf_assets_path = "{}"\n[eval]\nsize = 0\n[algorithm]\nname = '
NO_PLAN = "because generators have no weight plan for muse_glimmer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("muse") / "model")


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "orpo"])
def test_training_without_samples_is_sound(tmp_path: Path, folder: Path, algorithm: str) -> None:
    pairs = "" if algorithm == "sft" else f'[task]\npath = "{_pairs(tmp_path)}"\nname = "jsonl"\n'
    reference = '[reference]\nmesh = "trainer"\n' if algorithm == "dpo" else ""
    assert problems(config(tmp_path, SFT.format(folder) + f'"{algorithm}"\n{pairs}{reference}')) == []


def _pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 200)
    return path


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            '"grpo"',
            f'algorithm.name: expected an algorithm that samples nothing, such as sft or dpo, {NO_PLAN}, found "',
        ),
        (
            '"sft"\n[lora]\nrank = 8',
            "lora.rank: expected 0, because the layers of muse_glimmer have no adapters here, ",
        ),
        (
            '"sft"\n[parallelism]\ntensor_parallel_degree = 3',
            "parallelism.tensor_parallel_degree: expected a divisor of ",
        ),
        (
            '"sft"\n[parallelism]\nexpert_parallel_degree = 2',
            "parallelism.expert_parallel_degree: expected 1 for muse_gl",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path, folder: Path, keys: str, problem: str) -> None:
    found = problems(config(tmp_path, SFT.format(folder) + keys))
    assert any(line.startswith(problem) for line in found), found


def test_an_evaluation_needs_a_generator(tmp_path: Path, folder: Path) -> None:
    toml = SFT.format(folder).replace("size = 0", "size = 4") + '"sft"'
    assert problems(config(tmp_path, toml)) == [f"eval.size: expected 0, {NO_PLAN}, found 4"]


def test_a_family_name_of_another_model_is_refused(tmp_path: Path, folder: Path) -> None:
    toml = SFT.format(folder).replace("[eval]", 'name = "qwen3"\n[eval]') + '"sft"'
    assert problems(config(tmp_path, toml)) == [
        f'model.name: expected "muse_glimmer" or "auto", the family of {folder}, found "qwen3"'
    ]


def test_no_engine_serves_it(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a model .* weight plan for, found muse_glimmer$"):
        alone(Config(), folder, tmp_path)


def test_it_is_not_shrunk(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path, SFT.format(folder) + '"sft"')
    shrunk(given, (), tmp_path)
    monkeypatch.setattr(shrink, "TINY_PARAMETERS", 1000)
    with raising(), pytest.raises(ConfigRefused, match=r"--scale tiny: expected a family of .*, found muse_glimmer"):
        shrunk(given, (), tmp_path)
