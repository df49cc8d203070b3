"""Models that huggingface_hub fetches from a hub on loopback: their files, their commit, and refusals."""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.folders import write_hf
from support.loopback_hub import HubRepository, LoopbackHub
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.tools.fetch.hub import INDEX, WEIGHTS
from titan_rl.tools.fetch.models import COMPLETE

NEEDED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "vocab.json")
NEEDED += ("additional_chat_templates/tool_use.jinja",)
NEVER = ("pytorch_model.bin", "optimizer.pt", "modeling_own.py", "README.md", "original/model.safetensors", "x.gguf")
NEVER += ("consolidated.safetensors", "onnx/model.onnx", "additional_chat_templates/../own.py", ".gitattributes")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    shape = shape_of(ModelSection(name="llama3", dim=64, n_layers=1))
    folder = write_hf(tmp_path_factory.mktemp("tiny") / "model", shape)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub().serving() as hub:
        yield hub


def drawn(draw: random.Random, tiny: Mapping[str, bytes], *, sharded: bool) -> tuple[dict[str, bytes], set[str]]:
    """Return a repository's files, and the names of the ones that a run needs."""
    files = {"config.json": tiny["config.json"]}
    shards = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)] if sharded else []
    if shards:
        files[INDEX] = json.dumps({"weight_map": {f"tensor.{i}": name for i, name in enumerate(shards)}}).encode()
    files |= dict.fromkeys(shards or [WEIGHTS], draw.randbytes(200_000))
    files |= {name: draw.randbytes(100) for name in NEEDED if draw.random() < 0.7}
    needed = set(files)
    files |= {name: draw.randbytes(100) for name in NEVER if draw.random() < 0.7}
    return files, needed


def test_folders_have_the_needed_files_of_their_commit(
    hub: LoopbackHub, tmp_path: Path, tiny: Mapping[str, bytes]
) -> None:
    draw, cases = random.Random(7), dict[str, tuple[dict[str, bytes], set[str]]]()
    for i in range(4):
        files, needed = drawn(draw, tiny, sharded=i % 2 == 0)
        made = hub.repositories[f"own/model-{i}"] = HubRepository(
            private=draw.random() < 0.5, gated=draw.random() < 0.5
        )
        cases[f"own/model-{i}@{made.commit(files)}"] = files, needed
        changed = {draw.choice(sorted(needed - {"config.json", INDEX})): b"changed"}
        made.commit(changed)
        cases[f"own/model-{i}"] = {**files, **changed}, needed
    hub.cut = {WEIGHTS, "model-00002-of-00003.safetensors"}  # connections that break are taken up again
    folders = dict[str, str]()
    with hub.client(tmp_path) as call:
        for name, (files, needed) in cases.items():
            code, out, errors = call("fetch", name)
            assert code == 0, errors
            folders[name], folder = out, Path(out.strip())
            repo, _, commit = name.partition("@")
            commit = commit or hub.repositories[repo].head
            there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
            assert there == needed | {COMPLETE}
            assert all((folder / path).read_bytes() == files[path] for path in needed)
            assert (folder / COMPLETE).read_text() == f"{repo}@{commit}\n"
            assert folder.name == f"{repo.replace('/', '--')}--{commit}"
    assert not hub.cut
    assert not list(tmp_path.rglob("*.unfinished"))

    hub.requests.clear()
    with hub.client(tmp_path, HF_HUB_OFFLINE="1") as call:
        for name, out in folders.items():
            found = f"of a fetched model, because HF_HUB_OFFLINE is set, found {name}\n"
            refusal = (2, "", f"titan_rl: NAME: expected OWNER/NAME@COMMIT {found}")
            assert call("fetch", name) == ((0, out, "") if "@" in name else refusal)
    assert not hub.requests


def test_what_no_run_could_use_is_refused_in_one_line(
    hub: LoopbackHub, tmp_path: Path, tiny: Mapping[str, bytes]
) -> None:
    def made(name: str, files: Mapping[str, bytes], *, private: bool = False, gated: bool = False) -> None:
        hub.repositories[name] = HubRepository(private=private, gated=gated)
        hub.repositories[name].commit(files)

    listed = json.dumps({"weight_map": {"tensor": "pytorch_model-00001.bin"}}).encode()
    pickled = {"config.json": tiny["config.json"], "pytorch_model-00001.bin": b"", "tokenizer.json": b"{}"}
    other = json.dumps({**json.loads(tiny["config.json"]), "model_type": "mixtral"}).encode()
    made("own/pickled", pickled)
    made("own/listed", {**pickled, INDEX: listed})
    made("own/other", {**tiny, "config.json": other})
    made("own/bare", {"README.md": b"no model"})
    made("own/gated", tiny, gated=True)
    made("own/private", tiny, private=True)
    refused = {
        "own/pickled": f"expected {WEIGHTS} or {INDEX} in own/pickled, found pytorch_model-00001.bin, whose format can",
        "own/listed": f"expected safetensors files of own/listed in its {INDEX}, found pytorch_model-00001.bin",
        "own/other": "expected a usable config.json in own/other, found model_type: expected llama, ",
        "own/bare": "expected a config.json in own/bare, found none",
        "own/gated": "expected a repository that you may read, found own/gated gated: accept its terms at "
        f"{hub.url}/own/gated, and set HF_TOKEN to a token of that account",
        "own/private": f"expected a repository at {hub.url}, found no own/private (a private one needs the HF_TOKEN",
        "own/unknown": f"expected a repository at {hub.url}, found no own/unknown",
        "own/bare@v2": "expected a revision of own/bare, found none named 'v2'",
        "own--x/bare": "expected OWNER/NAME of a repository, found 'own--x/bare'",
        "own/model.gguf": 'expected a folder or "fetch:smollm2" or "fetch:tiny_vision", found "own/model.gguf"',
    }
    with hub.client(tmp_path, HF_TOKEN="") as call:
        for name, expected in refused.items():
            code, out, errors = call("fetch", name)
            assert (code, out) == (2, "")
            assert errors.startswith(f"titan_rl: NAME: {expected}")
            assert errors.count("\n") == 1
            if name == "own/other":
                assert 'found "mixtral", a mixture of experts of another kind' in errors
    assert not any(request.endswith((WEIGHTS, ".bin")) for request in hub.requests)
    left = [path for path in (tmp_path / "titan_rl").iterdir() if path.is_dir()]
    assert [path.name.rpartition("--")[0] for path in left] == ["own--gated"]
    assert left[0].name.endswith(".unfinished")  # which the next call continues


def test_a_hub_that_fails_is_named_and_finished_files_stay(
    hub: LoopbackHub, tmp_path: Path, tiny: Mapping[str, bytes]
) -> None:
    hub.repositories["own/tiny"] = HubRepository()
    commit = hub.repositories["own/tiny"].commit(tiny)
    with hub.client(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") as call:
        code, _, errors = call("fetch", "own/tiny")
    expected = "expected answers of http://127.0.0.1:9 about own/tiny, found ConnectError"
    assert (code, errors.count("\n"), errors.startswith(f"titan_rl: NAME: {expected}")) == (2, 1, True)
    with hub.client(tmp_path) as call:
        hub.refused = 500
        expected = f"expected answers of {hub.url} about own/tiny, found "
        assert call("fetch", "own/tiny")[2].startswith(f"titan_rl: NAME: {expected}")
        hub.refused, hub.lost = 0, {WEIGHTS}  # from the storage, though the commit lists it
        code, _, errors = call("fetch", "own/tiny")
        assert (code, f"titan_rl: NAME: {expected}" in errors) == (2, True)
        folders = [path.name for path in (tmp_path / "titan_rl").iterdir() if path.is_dir()]
        assert folders == [f"own--tiny--{commit}.unfinished"]
        hub.lost = set()
        hub.requests.clear()
        code, out, _ = call("fetch", "own/tiny")
    assert (code, {path.name for path in Path(out.strip()).iterdir()}) == (0, {*tiny, COMPLETE})
    taken = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert [request.rpartition("/")[2] for request in taken] == [WEIGHTS]
