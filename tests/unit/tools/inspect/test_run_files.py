"""What a run's folder is read back as: damaged and torn lines, absent files, files of earlier versions."""

import json
from pathlib import Path

import pytest

from titan_rl.tools.inspect.run_files import RunFiles

FAULT = {"who": "generator0", "why": "it died", "time": 5.0, "outcome": "back", "seconds": 1.5}
EVALUATION = {"kind": "eval", "step": 3, "set": "heldout", "rewards": {"0": [1.0, None]}}


def write(path: Path, *lines: object, torn: str = "") -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts) + torn)


def test_a_folder_without_files_has_nothing(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert [*files.faults(), *files.evaluations()] == []
    assert files.summary() == files.gaps(1) == {}
    assert files.config_or_why()[0] is None
    assert files.absence == f"found none in {tmp_path}"
    assert RunFiles(tmp_path / "no").absence == f"found no folder {tmp_path / 'no'}"
    for lines in (files.metrics, files.ledger):
        with pytest.raises(FileNotFoundError):
            next(lines())


def test_a_run_of_several_policies_names_their_folders(tmp_path: Path) -> None:
    own = [tmp_path / "policies" / name for name in ("first", "second")]
    for folder in own:
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
    (tmp_path / "policies" / "unused").mkdir()
    assert RunFiles(tmp_path).absence == f"found none in {tmp_path}; its policies have folders: {own[0]}, {own[1]}"


def test_faults_of_earlier_versions_have_no_counts(tmp_path: Path) -> None:
    whole = FAULT | {"outcome": "", "redone": 2, "anew": 3}
    write(tmp_path / "faults.jsonl", whole, FAULT, FAULT | {"time": None}, "not JSON", torn='{"who": "gen')
    opened, closed = RunFiles(tmp_path).faults()
    assert (opened.open, opened.redone, opened.resampled) == (True, 2, 3)
    assert (closed.role, closed.reason, closed.end, closed.redone, closed.resampled) == (
        ("generator0", "it died", 6.5, 0, 0)
    )  # fmt: skip


def test_evaluations_that_are_none_are_left_out(tmp_path: Path) -> None:
    damaged = [EVALUATION | {"rewards": {"0": 1.0}}, EVALUATION | {"set": 3}, [1], "{"]
    write(tmp_path / "evaluations.jsonl", *damaged, EVALUATION, torn=json.dumps(EVALUATION))
    assert list(RunFiles(tmp_path).evaluations()) == [EVALUATION]


def test_gaps_are_found_by_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "replays").mkdir()
    write(tmp_path / "replays" / "step-2.jsonl", {"tokens": [1, 2], "gaps": [0.0, 0.5]}, {"tokens": 1}, "{")
    assert RunFiles(tmp_path).gaps(2) == {(1, 2): [0.0, 0.5]}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"steps": '])
def test_a_damaged_summary_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert RunFiles(tmp_path).summary() == {}
