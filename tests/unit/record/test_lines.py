"""Append-only files after a crash, and files that are written whole."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config.sections import FaultSection
from titan_rl.record.incidents import Incidents
from titan_rl.record.lines import LineFile, superseded, whole_lines, write_whole
from titan_rl.record.run_names import FAULTS
from titan_rl.tools.inspect.run_files import RunFiles
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


def test_lines_after_the_first_that_does_not_stay_move_to_another_file(tmp_path: Path) -> None:
    path, aside = tmp_path / "file.jsonl", tmp_path / "file.superseded.jsonl"
    aside.write_bytes(b"zero\nto")  # a crash tore it: those lines are still in the file, and move again
    path.write_bytes(WHOLE[:-2])
    with LineFile(path, stays=lambda line: line != b"two\n") as file:
        assert file.kept == 1
    assert (path.read_bytes(), aside.read_bytes()) == (b"one\n", b"zero\ntwo\nthre\n")


@given(data=st.data(), size=st.integers(1, 12))
def test_no_line_is_lost_whichever_are_damaged_torn_or_late(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    kinds = data.draw(st.lists(st.sampled_from(["sound", "damaged"]), min_size=size, max_size=size))
    late, torn = data.draw(st.integers(0, size)), data.draw(st.booleans())
    lines = [b"%s %d\n" % (b"damaged" if kind == "damaged" else b"sound", k) for k, kind in enumerate(kinds)]
    whole = b"".join(lines)[: -1 if torn else None]
    path.write_bytes(whole)
    said = list[str]()
    with LineFile(
        path, sound=lambda line: line.startswith(b"sound"), stays=lambda line: int(line.split()[1]) < late,
        warn=said.append,
    ) as file:  # fmt: skip
        file.append([b"next"])
    first_late = next((k for k, kind in enumerate(kinds) if kind == "sound" and k >= late), size)
    last = first_late if not torn else min(first_late, size - 1)
    kept = [k for k, kind in enumerate(kinds) if kind == "sound" and k < last]
    assert path.read_bytes() == b"".join(lines[k] for k in kept) + b"next\n"
    assert file.kept == len(kept)
    aside = superseded(path).read_bytes() if superseded(path).exists() else b""
    assert sorted(aside.splitlines()) == sorted(line.strip() for k, line in enumerate(lines) if k not in kept)
    damaged = [k + 1 for k, kind in enumerate(kinds[:last]) if kind == "damaged"]
    assert [message.split(": ")[0] for message in said] == [
        f"{path}, line {', '.join(map(str, damaged[:8]))}" + ", ..." * (len(damaged) > 8)
    ] * bool(damaged)


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
    (tmp_path / FAULTS).write_bytes(b'{"who": "gener')
    incidents = Incidents(tmp_path, FaultSection(), said.append)
    lost = incidents.lost("trainer", RunError("trainer died", "traceback"))
    incidents.back(lost, "all is well", redone=2)
    lines = [json.loads(line) for line in whole_lines(tmp_path / FAULTS)]
    assert lines[0] == {
        "who": "trainer", "why": "trainer died", "time": lost.time, "outcome": "", "seconds": 0.0, "redone": 0,
        "anew": 0, "details": "traceback",
    }  # fmt: skip
    assert lines[1] == lost.record()
    assert list(RunFiles(tmp_path).faults())[1] == lost
    assert said == ["trainer died", f"trainer is back after {lost.seconds:.1f} s: all is well; 2 steps to repeat"]


def test_no_role_is_respawned_without_the_folder_that_it_reads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    incidents = Incidents(tmp_path, FaultSection(max_restarts=5), lambda text: None, model)
    assert incidents.may_respawn("generator")
    model.rmdir()
    assert not incidents.may_respawn("generator")
    error = incidents.over_budget("generator", RunError("generator died", ""))
    assert str(error) == f"generator died; {model}, from which it would start again, was removed"
