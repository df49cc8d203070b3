"""What is noticed about a checkpoint's files, by their sizes and by their bytes."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from titan_rl.wire.checkpoint_sums import SUMS, SummedFile, damage, write_sums


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights = [b"weights of ", bytearray(b"__n_0.distcp"), memoryview(b"123456").cast("H")]
    write(tmp_path, {"__0_0.distcp": weights, "__1_0.distcp": weights, ".metadata": [pickle.dumps("names of weights")]})
    return tmp_path


def write(folder: Path, files: Mapping[str, Sequence[Any]]) -> None:
    sums = {}
    for name, parts in files.items():
        with (folder / name).open("wb") as file:
            summed = SummedFile(file)
            for part in parts:
                summed.write(part)
        sums[name] = summed.sum
    write_sums(folder, sums)


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
