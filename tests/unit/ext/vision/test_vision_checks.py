"""What model.vision refuses before a process is spawned."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support.checked_configs import config
from titan_rl.config.auto import on_device
from titan_rl.ext.agents.checks import _check_sight
from titan_rl.ext.vision import checks, tiny_folder
from titan_rl.preflight import memory
from titan_rl.preflight.checks import problems
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.gpus import Gpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write_folder(tmp_path_factory.mktemp("folders") / "model")


def seeing(folder: Path, toml: str = "", vision: str = "frozen") -> str:
    return f'[model]\nhf_assets_path = "{folder}"\nvision = "{vision}"\n{toml}'


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("", ""),
        ("[generator]\nquantization = 'int8'", 'generator.quantization: expected "none", because it would round the'),
        ("[generator]\ndrafts = 'siblings'", 'generator.drafts: expected "none", because a draft does not tell'),
        ("[lora]\nrank = 8\nsync = 'adapter'", ""),
        (
            "[parallelism]\ncontext_parallel_degree = 2",
            "parallelism.context_parallel_degree: expected 1, as the places of images are in whole rows, found 2",
        ),
    ],
)
def test_features_that_do_not_know_images_are_refused(folder: Path, tmp_path: Path, toml: str, problem: str) -> None:
    found = problems(config(tmp_path, seeing(folder, toml)))
    assert len(found) == bool(problem)
    assert all(each.startswith(problem) for each in found)


@pytest.mark.parametrize("vision", ["projection", "all"])
@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("", ""),
        ("[algorithm]\nkl_coef = 0.01\n[generator]\ndtype = 'bfloat16'", ""),
        ("spec = 'titan_rl.actors.titan.idefics3:spec'", 'model.vision: expected "frozen" with model.spec, whose'),
        ("[lora]\nrank = 8", 'model.vision: expected "frozen" with lora.rank, as adapters leave all weights of'),
    ],
)
def test_a_trained_tower_needs_trained_weights(
    folder: Path, tmp_path: Path, toml: str, problem: str, vision: str
) -> None:
    found = problems(config(tmp_path, seeing(folder, toml, vision)))
    assert len(found) == bool(problem)
    assert all(each.startswith(problem) for each in found)


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[environment]\nname = 'calc'\n[task]\nname = 'calc'", ""),
        (
            "[environment]\nname = 'gymnasium:FrozenLake-v1'",
            "environment.name: expected a class or a function of yours",
        ),
        ("[task]\nagent = 'titan_rl.ext.agents.calc_agent:solve'", ""),
        ("[task]\nagent = 'x:y'\n[record]\nbatches = 2", "record.batches: expected a run"),
        (
            "[environment]\nname = 'x:y'\nseats = ['a', 'b']\n[environment.endpoints.b]\nurl = 'http://h/v1'",
            "none with",
        ),
        (
            "[environment]\nname = 'calc'\n[task]\nname = 'calc'\n[record]\nbatches = 2",
            "record.batches: expected a run",
        ),
    ],
)
def test_environments_that_do_not_know_images_are_refused(
    folder: Path, tmp_path: Path, toml: str, problem: str
) -> None:
    seen = config(tmp_path, seeing(folder, toml))
    found = [*_check_sight(seen), *checks.problems(seen, shape_of(seen.model), "cpu")]
    assert len(found) == bool(problem)
    assert all(problem in each for each in found)


def test_engines_on_gpus_keep_their_tower(folder: Path, tmp_path: Path) -> None:
    toml = seeing(folder, '[placement]\nkind = "colocated"\nsleep = {}\n')
    sleeping = [x for x in problems(config(tmp_path, toml.format("true")), gpus=Gpus(2)) if x.startswith("placement")]
    assert sleeping == [
        "placement.sleep: expected false, because an engine that sleeps loses its tower, which no sync writes, "
        "found true"
    ]
    assert not [x for x in problems(config(tmp_path, toml.format("false")), gpus=Gpus(2)) if x.startswith("placement")]


def test_a_folder_must_be_able_to_see(folder: Path, tmp_path: Path) -> None:
    (only_text,) = problems(config(tmp_path, '[model]\nvision = "frozen"'))
    expected = '"none", because only folders of idefics3 and smolvlm can see here'
    assert only_text == f'model.vision: expected {expected}, found "frozen"'
    processor = folder / "preprocessor_config.json"
    kept = processor.read_text()
    processor.unlink()
    assert problems(config(tmp_path, seeing(folder))) == [
        f"model.vision: expected a {processor.name} in {folder}, found none"
    ]
    processor.write_text(kept)


def test_memory_counts_the_tower_and_the_features(folder: Path, tmp_path: Path) -> None:
    """On every rank as a whole, in the dtype that it computes in."""
    seen = on_device(config(tmp_path, seeing(folder, "[parallelism]\ntensor_parallel_degree = 2")), "cpu")
    shape, blind = shape_of(seen.model), replace(seen, model=replace(seen.model, vision="none"))
    tower = sum(w.nbytes for name, w in load_file(folder / "model.safetensors").items() if "text_model" not in name)
    tower -= shape.vocab_size * shape.dim * 4  # the text model's head
    for estimate, more in (
        (partial(memory.trained, shape=shape, p=seen.parallelism), {"tower": tower, "features": 1 << 30}),
        (partial(memory.frozen, shape=shape, p=seen.parallelism), {"tower": tower, "features": 1 << 30}),
        (partial(memory.engine, shape=shape, cache=0), {"tower": tower}),
    ):
        found, without = estimate(seen).parts, estimate(blind).parts
        assert {name: part.nbytes for name, part in found.items() if name not in without} == more
        assert without.items() <= found.items()


def test_memory_counts_a_trained_encoder(folder: Path, tmp_path: Path) -> None:
    """Once, as the model's weights; with the activations of a microbatch full of images."""
    by_vision = {}
    for vision in ("frozen", "projection", "all"):
        seen = on_device(config(tmp_path, seeing(folder, "[training]\nseq_len = 128", vision)), "cpu")
        by_vision[vision] = memory.trained(seen, shape=shape_of(seen.model), p=seen.parallelism).parts
    frozen, projection, whole = by_vision.values()
    sizes = {name: w.size for name, w in load_file(folder / "model.safetensors").items()}
    moved = sum(size for name, size in sizes.items() if "connector" in name)
    assert frozen["tower"].nbytes - projection["tower"].nbytes == moved * 4
    moved = sum(size for name, size in sizes.items() if ".encoder." in name or "post_layernorm" in name)
    assert projection["tower"].nbytes - whole["tower"].nbytes == moved * 4
    assert "encoder" not in projection
    assert whole["encoder"].formula.endswith(" tiles x 64 patches x 1 layers")
