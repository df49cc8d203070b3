"""Append-only files after a crash, and files that are written whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.sections import FaultSection
from titan_rl.record.incidents import NAME, Incident, Incidents
from titan_rl.record.lines import LineFile, whole_lines, write_whole
from titan_rl.wire.errors import RunError

WHOLE = b"one\ntwo\nthree\n"


@given(cut=st.integers(0, len(WHOLE)))
def test_a_torn_last_line_is_not_read_and_is_removed(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(WHOLE[:cut])
    whole = list(whole_lines(path))
    assert whole == WHOLE.splitlines(keepends=True)[: WHOLE[:cut].count(b"\n")]
    with LineFile(path) as file:
        assert file.kept == len(whole)
        file.append([b"four", b"five"])
    assert list(whole_lines(path)) == [*whole, b"four\n", b"five\n"]
    assert list(whole_lines(path, start=len(b"".join(whole)))) == [b"four\n", b"five\n"]


def test_lines_after_the_first_that_is_not_kept_move_to_another_file(tmp_path: Path) -> None:
    path, superseded = tmp_path / "file", tmp_path / "superseded"
    superseded.write_bytes(b"zero\nto")  # a crash tore it: those lines are still in the file, and move again
    path.write_bytes(WHOLE[:-2])
    with LineFile(path, keep=lambda line: line != b"two\n", superseded=superseded) as file:
        assert file.kept == 1
    assert (path.read_bytes(), superseded.read_bytes()) == (b"one\n", b"zero\ntwo\nthre\n")


def test_buffered_lines_are_in_the_file_after_a_flush(tmp_path: Path) -> None:
    with LineFile(tmp_path / "file") as file:
        file.append([b"one"], flush=False)
        file.flush()
        assert list(whole_lines(tmp_path / "file")) == [b"one\n"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        write_whole(tmp_path / "file", text)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", text)]


def test_incidents_follow_a_torn_line(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / NAME).write_bytes(b'{"who": "gener')
    incidents = Incidents(tmp_path, FaultSection(), said.append)
    lost = incidents.lost("trainer", RunError("trainer died", "traceback"))
    incidents.back(lost, "all is well", redone=2)
    lines = [json.loads(line) for line in whole_lines(tmp_path / NAME)]
    assert lines[0] == {
        "who": "trainer", "why": "trainer died", "time": lost.time, "outcome": "", "seconds": 0.0, "redone": 0,
        "anew": 0, "details": "traceback",
    }  # fmt: skip
    assert lines[1] == lost.record()
    assert Incident.of(lines[1]) == lost
    assert said == ["trainer died", f"trainer is back after {lost.seconds:.1f} s: all is well; 2 steps to repeat"]
