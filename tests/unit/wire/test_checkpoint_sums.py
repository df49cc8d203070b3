"""What is noticed about a checkpoint's files, by their sizes and by their bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_rl.wire.checkpoint_sums import SUMS, SummedFile, damage, write_sums


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sums = {}
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        with (tmp_path / name).open("wb") as file:
            summed = SummedFile(file)
            for part in (b"weights of ", bytearray(name.encode()), memoryview(b"123456").cast("H")):
                summed.write(part)
        sums[name] = summed.sum
    write_sums(tmp_path, sums)
    return tmp_path


def test_what_was_written_is_what_is_read(checkpoint: Path) -> None:
    assert damage(checkpoint) == damage(checkpoint, read=True) == ""


@pytest.mark.parametrize(
    ("name", "harm", "found"),
    [
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", lambda path: path.write_bytes(b""), ".metadata: expected 26 bytes, found 0"),
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
