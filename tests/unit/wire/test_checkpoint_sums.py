"""What is noticed about a checkpoint's files, by their sizes and by their bytes."""

import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from titan_rl.wire.checkpoint_pickle import foreign_content
from titan_rl.wire.checkpoint_sums import (
    SUMS,
    SummedFile,
    changed,
    damage,
    export_damage,
    identify,
    sum_files,
    write_sums,
)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights = [b"weights of ", bytearray(b"__n_0.distcp"), memoryview(b"123456").cast("H")]
    write(tmp_path, {"__0_0.distcp": weights, "__1_0.distcp": weights, ".metadata": [pickle.dumps("names of weights")]})
    return tmp_path


def write(folder: Path, files: Mapping[str, Sequence[Any]], written_as: str = "") -> None:
    sums = {}
    for name, parts in files.items():
        with (folder / name).open("wb") as file:
            summed = SummedFile(file)
            for part in parts:
                summed.write(part)
        sums[name] = summed.sum
    write_sums(folder, sums, written_as)


def test_what_was_written_is_what_is_read(checkpoint: Path) -> None:
    assert damage(checkpoint) == damage(checkpoint, read=True) == ""


@pytest.mark.parametrize(
    ("name", "harm", "found"),
    [
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", lambda path: path.write_bytes(b""), ".metadata: expected 31 bytes, found 0"),
        ("__1_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-1]), "expected 29 bytes, found 28"),
        (SUMS, lambda path: path.write_text('{"files": '), f"{SUMS} cannot be read: JSONDecodeError"),
        (SUMS, lambda path: path.write_text("[]"), f"{SUMS} cannot be read: TypeError"),
        (SUMS, lambda path: path.write_text('{"files": [1]}'), f"{SUMS} cannot be read: "),
        (SUMS, lambda path: path.write_text("[" * 100_000), f"{SUMS} cannot be read: RecursionError"),
        (SUMS, lambda path: path.write_text('{"algorithm": "md5", "files": {}}'), "expected sums of the kind xxh3_128"),
        (
            SUMS,
            lambda path: path.write_text('{"algorithm": "xxh3_128", "files": {}}'),
            f"{SUMS} has no sum of .metadata",
        ),
        (SUMS, lambda path: (path.unlink(), os.mkfifo(path)), f"{SUMS} is no file"),
        (".metadata", lambda path: (path.unlink(), os.mkfifo(path)), ".metadata is missing"),
        ("__2_0.distcp", lambda path: path.write_bytes(b"of another rank"), f"{SUMS} has no sum of __2_0.distcp"),
    ],
)
def test_a_harmed_file_is_named_without_reading_any_bytes(
    checkpoint: Path, name: str, harm: Callable[[Path], object], found: str
) -> None:
    harm(checkpoint / name)
    assert found in damage(checkpoint)
    assert found in damage(checkpoint, read=True)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_flipped_bit_is_found_by_reading(checkpoint: Path, name: str) -> None:
    flip(checkpoint / name)
    assert damage(checkpoint) == ""
    assert damage(checkpoint, read=True).startswith(f"{name}: expected the checksum ")


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_compare(checkpoint: Path) -> None:
    (checkpoint / SUMS).unlink()
    flip(checkpoint / "__0_0.distcp")
    assert damage(checkpoint, read=True) == ""
    (checkpoint / ".metadata").write_bytes(b"")
    assert damage(checkpoint) == ".metadata is empty"


class Called:
    """What an attacker pickles."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (pickle.dumps(Called(os.system, "touch planted")), "it would call posix.system"),
        (pickle.dumps({"a": [Called(eval, "1")]}, protocol=0), "it would call __builtin__.eval"),
        (pickle.dumps(Called(pickle.loads, b"")), "it would call _pickle.loads"),
        (b"cos\nsystem\n(S'touch planted'\ntR.", "it would call os.system"),
        (b"ctorch\nload\n(S'planted'\ntR.", "it would call torch.load"),
        (b"cbuiltins\ngetattr\n(cpathlib\nPath\nS'unlink'\ntR.", "it would read the attribute 'unlink'"),
        (pickle.dumps(Called(getattr, _MEM_FORMAT_ENCODING, "__class__")), "it would read the attribute '__class__'"),
        (b"whole", "invalid load key"),
        (b"", "Ran out of input"),
    ],
)
def test_a_metadata_that_would_call_something_is_refused_by_name(
    tmp_path: Path, content: bytes, found: str, with_sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"__0_0.distcp": [b"weights"], ".metadata": [content]})
    if not with_sums:
        (tmp_path / SUMS).unlink()
    assert f".metadata cannot be read: {found}" in damage(tmp_path, read=True) or not content
    assert damage(tmp_path, read=True)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_member_of_an_enum_is_read_however_python_pickles_it(tmp_path: Path, protocol: int) -> None:
    """Python 3.11.0 to 3.11.3 call getattr for it, others the enum."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    content = [member, Called(getattr, _MEM_FORMAT_ENCODING, member.name), Called(_MEM_FORMAT_ENCODING, member.value)]
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(content, protocol))
    assert pickle.loads(path.read_bytes()) == [member] * 3
    assert foreign_content(path) == ""


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "step-8"
    folder.mkdir()
    write(folder, {"__0_0.distcp": [b"weights"], ".metadata": [pickle.dumps("names")]}, "step-8")
    assert damage(folder) == ""
    folder.rename(moved := tmp_path / "step-10")
    assert damage(moved) == "it was written as step-8"


def test_a_checkpoint_or_model_of_another_run_does_not_count(tmp_path: Path) -> None:
    for run, own in (("a", True), ("b", True), ("old", False)):
        for part in ("checkpoint/step-8", "checkpoint/critic/step-8", "hf"):
            (tmp_path / run / part).mkdir(parents=True)
        if own:
            identify(tmp_path / run)
        for part in ("checkpoint/step-8", "checkpoint/critic/step-8"):
            write(tmp_path / run / part, {".metadata": [pickle.dumps("names")]}, written_as="step-8")
        (tmp_path / run / "hf" / "model.safetensors").write_bytes(b"same")
        sum_files(tmp_path / run / "hf")
    (tmp_path / "a").rename(tmp_path / "moved")
    identify(tmp_path / "moved")
    identify(tmp_path / "old")  # it is resumed: what an earlier version wrote counts
    for run in ("moved", "b", "old"):
        assert not damage(tmp_path / run / "checkpoint" / "step-8", read=True)
        assert not export_damage(tmp_path / run / "hf", read=True)
    for part in ("checkpoint/step-8", "checkpoint/critic/step-8", "hf"):
        shutil.copytree(tmp_path / "moved" / part, tmp_path / "b" / part, dirs_exist_ok=True)
        assert changed(tmp_path / "b" / part) == "another run wrote it"


def test_an_exported_model_is_compared_with_its_sums(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors", "templates/tool.jinja"):
        (tmp_path / name).write_text(name)
    assert export_damage(tmp_path, read=True) == "", "of an earlier version"
    sum_files(tmp_path)
    assert export_damage(tmp_path, read=True) == ""
    flip(tmp_path / "model-00001-of-00001.safetensors")
    assert export_damage(tmp_path) == ""
    assert "expected the checksum" in export_damage(tmp_path, read=True)
    (tmp_path / "config.json").unlink()
    assert export_damage(tmp_path) == "config.json is missing"
    (tmp_path / SUMS).unlink()
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert export_damage(tmp_path) == "it has no weights"
