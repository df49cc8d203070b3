"""`titan_rl export --push`: an exported folder goes to a hub on loopback by the real client, and comes back equal."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.folders import write_hf
from support.loopback_hub import LoopbackHub
from titan_rl.config.sections import Config, ModelSection
from titan_rl.config.toml import to_toml
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.model_card import CARD, model_card
from titan_rl.tools.export import main
from titan_rl.tools.fetch.models import COMPLETE
from titan_rl.train.hf_folder import COPIED
from titan_rl.wire.checkpoint_sums import sum_files


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub().serving() as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint, and hf/ as the end of the run has written it."""
    folder = tmp_path / "run"
    (folder / "checkpoint/step-2").mkdir(parents=True)
    (folder / "checkpoint/step-2/.metadata").touch()
    (folder / "config.toml").write_text(to_toml(Config()))
    write_hf(folder / "hf", shape_of(ModelSection(name="llama3", dim=64, n_layers=1)))
    (folder / "hf/adapter").mkdir()
    (folder / "hf/adapter/adapter_model.safetensors").write_bytes(random.Random(3).randbytes(1000))
    sum_files(folder / "hf")
    (folder / "hf" / CARD).write_text(model_card(folder, Config(), {}))
    return folder


def test_a_pushed_model_is_private_and_is_fetched_as_it_was(hub: LoopbackHub, run: Path, tmp_path: Path) -> None:
    files = {path.relative_to(run / "hf").as_posix(): path.read_bytes() for path in run.glob("hf/**/*.*")}
    total, place = f"{len(files)} files of {sum(map(len, files.values())):,} bytes", f"{hub.url}/own/new"
    push = ("export", run, "--out", run / "hf", "--push", "own/new")
    with hub.client(tmp_path) as call:
        code, out, errors = call(*push)
        assert (code, errors, hub.requests) == (0, "", [])
        first, *rows, last = out.splitlines()
        assert first == f"{run / 'hf'} is there already: it is pushed as it is"
        assert [row.split() for row in rows] == [[f"{len(files[name]):,}", name] for name in sorted(files)]
        assert last.startswith(f"nothing was uploaded: {total} would go to {place}, which is made private if it is new")

        code, out, errors = call(*push, "--yes")
        assert code == 0, errors
        made = hub.repositories["own/new"]
        whole = made.commits[made.head]
        assert made.private
        assert {name: whole[name] for name in files} == files
        assert out.splitlines()[-1] == f"{total} are at {place}, which is private, as commit {made.head}"
        assert sum(line.startswith("PUT") for line in hub.requests) == 2  # only weights are large files

        # A card with the user's words is one more commit, and a reader fetches what the run wrote.
        (run / "hf" / CARD).write_bytes(files[CARD] + b"\nMine.\n")
        assert call(*push, "--yes")[0] == 0
        assert made.commits[made.head] == {**whole, CARD: files[CARD] + b"\nMine.\n"}
        assert len(made.commits) == 3  # one made the repository
        code, out, errors = call("fetch", "own/new")
        assert code == 0, errors
        there = {path.name: path.read_bytes() for path in Path(out.strip()).iterdir()}
        assert there.pop(COMPLETE) == f"own/new@{made.head}\n".encode()
        needed = {*COPIED, "tokenizer.json", "generation_config.json", "model.safetensors"}
        assert there == {name: content for name, content in files.items() if name in needed}

        before = made.commit({"model-00002-of-00002.safetensors": b"of an earlier upload"})
        code, _, errors = call(*push, "--yes")
        assert "expected no other weights in own/new, found model-00002-of-00002.safetensors: delete it" in errors
        assert (code, made.head) == (1, before)


def test_a_push_that_fails_leaves_the_folder_and_names_the_cause(hub: LoopbackHub, run: Path, tmp_path: Path) -> None:
    push = ("export", run, "--out", run / "hf", "--push", "own/new", "--yes")
    again = f"{run / 'hf'} is whole: the same command uploads it\n"
    with hub.client(tmp_path, HF_TOKEN="hf_wrong") as call:
        code, _, errors = call(*push)
    allowed = f"expected an HF_TOKEN that {hub.url} allows to do this to own/new, found one refused with status 401"
    assert (code, errors) == (1, f"titan_rl export: --push: {allowed}. {again}")
    with hub.client(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") as call:
        code, _, errors = call(*push)
    assert errors.startswith("titan_rl export: --push: expected answers of http://127.0.0.1:9 about own/new, found")
    assert (code, errors.endswith(again), hub.repositories) == (1, True, {})


def test_what_could_not_be_uploaded_is_refused_before_an_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))

    def refusal(*argv: object) -> tuple[int, str]:
        code = main([str(run), *map(str, argv)])
        out, errors = capsys.readouterr()
        assert not out
        return code, errors.removeprefix("titan_rl export: ")

    assert refusal("--yes") == (2, "--yes: expected --push OWNER/NAME with it, found none\n")
    for name in ("new", "own/new@v2", "own/new/more"):
        assert refusal("--push", name) == (2, f"--push: expected OWNER/NAME of a repository, found {name!r}\n")
    token = "--push: expected a token in HF_TOKEN, or one that `hf auth login` keeps, found none\n"
    assert refusal("--push", "own/new", "--yes") == (2, token)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/private.txt").touch()
    exported = f"--out: expected a new folder, or an exported one with its {CARD}, found {tmp_path / 'mine'}\n"
    assert refusal("--out", tmp_path / "mine", "--push", "own/new") == (2, exported)
    with (run / "hf/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    code, errors = refusal("--out", run / "hf", "--push", "own/new")
    assert (code, f"{run / 'hf'} is damaged: model.safetensors: expected the checksum" in errors) == (1, True)
