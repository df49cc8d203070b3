"""Refusals of what a model that is not made of our blocks cannot do."""

from pathlib import Path

import pytest

from support import qwen3_5
from support.checked_configs import config
from support.muse_glimmer import make_model
from titan_rl.ext.tiny import shrink
from titan_rl.ext.tiny.shrink import shrunk
from titan_rl.preflight.checks import problems
from titan_rl.preflight.refusal import ConfigRefused, raising

SFT = '[model]\nhf_assets_path = "{}"\n[eval]\nsize = 0\n[algorithm]\nname = '
FP8 = '[generator]\nquantization = "fp8"\ndtype = "bfloat16"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("muse") / "model")


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "orpo"])
def test_training_by_pairs_and_answers_is_sound(tmp_path: Path, folder: Path, algorithm: str) -> None:
    pairs = "" if algorithm == "sft" else f'[task]\npath = "{_pairs(tmp_path)}"\nname = "jsonl"\n'
    reference = '[reference]\nmesh = "trainer"\n' if algorithm == "dpo" else ""
    assert problems(config(tmp_path, SFT.format(folder) + f'"{algorithm}"\n{pairs}{reference}')) == []


def test_training_by_samples_is_sound(tmp_path: Path, folder: Path) -> None:
    assert problems(config(tmp_path, SFT.format(folder).replace("size = 0", "size = 4") + '"grpo"')) == []


@pytest.mark.parametrize("keys", ["[lora]\nrank = 8", '[generator]\nquantization = "int8"', FP8])
def test_adapters_and_quantized_engines_are_sound(tmp_path: Path, folder: Path, keys: str) -> None:
    toml = SFT.format(folder).replace("size = 0", "size = 4") + '"grpo"\n'
    assert problems(config(tmp_path, toml + keys)) == []


def _pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 200)
    return path


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('"ppo"', "algorithm.name: expected one without a critic, because muse_glimmer has no value head here, found "),
        (
            '"grpo"\n[generator]\nquantization = "fp8"\ndtype = "bfloat16"\ntensor_parallel_degree = 4',
            'generator.quantization: expected "none", because vLLM pads fp8 weights, a rank of which has 24 columns, ',
        ),
        (
            '"sft"\n[lora]\nrank = 8\ntargets = ["q", "self_attn.o_gate"]',
            "lora.targets: expected names of q, k, v, o, self_attn.gate_proj, gate, down, up, found self_attn.o_gate",
        ),
        (
            '"sft"\n[lora]\nrank = 8\ntargets = ["v"]',
            "lora.targets: expected k besides v: TorchTitan gives both an adapter or none",
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


def test_layers_with_a_state_are_shared_by_heads_and_not_by_rows(tmp_path: Path) -> None:
    """3 heads of keys, and of values."""
    folder = qwen3_5.make_model(tmp_path / "model", qwen3_5.drawn(1, ranks=1))
    toml = SFT.format(folder) + '"sft"\n[parallelism]\ntensor_parallel_degree = 2\ncontext_parallel_degree = 2'
    found = problems(config(tmp_path, toml))
    assert "parallelism.tensor_parallel_degree: expected a divisor of the model's recurrent_heads = 3, found 2" in found
    expected = "parallelism.context_parallel_degree: expected 1 for qwen3_5_text, whose state no rank hands on to the"
    assert any(line.startswith(expected) for line in found), found


def test_a_family_name_of_another_model_is_refused(tmp_path: Path, folder: Path) -> None:
    toml = SFT.format(folder).replace("[eval]", 'name = "qwen3"\n[eval]') + '"sft"'
    assert problems(config(tmp_path, toml)) == [
        f'model.name: expected "muse_glimmer" or "auto", the family of {folder}, found "qwen3"'
    ]


def test_it_is_not_shrunk(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(tmp_path, SFT.format(folder) + '"sft"')
    shrunk(given, (), tmp_path)
    monkeypatch.setattr(shrink, "TINY_PARAMETERS", 1000)
    with raising(), pytest.raises(ConfigRefused, match=r"--scale tiny: expected a family of .*, found muse_glimmer"):
        shrunk(given, (), tmp_path)
