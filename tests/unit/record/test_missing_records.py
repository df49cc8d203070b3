"""Notes of a start on files that were lost or exchanged since the run wrote them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forging import Change, raw
from support.written_runs import WrittenRun, config
from titan_rl.record.missing_records import RunRecords
from titan_rl.record.run_folder import Resume
from titan_rl.record.run_names import LEDGER

pytestmark = pytest.mark.usefixtures("fast_disk")


def of_another_run(name: str) -> Change:
    def change(folder: Path) -> None:
        other = WrittenRun(folder.parent / "other")
        other.life(config(steps=8, max_staleness_steps=1))
        shutil.copy(other.folder / name, folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "resume", "note"),
    [
        (lambda folder: None, Resume(8, None), ""),
        (lambda folder: None, Resume(None, None), "the steps of the whole run are trained again"),
        (lambda folder: None, Resume(None, 4), "the steps after the cold start are trained again"),
        (lambda folder: None, Resume(6, None), "the steps after step 6 are trained again"),
        (of_another_run(LEDGER), Resume(8, None), "metrics.jsonl: the lines of step 8 are not those in ledger.jsonl"),
        (of_another_run("metrics.jsonl"), Resume(8, None), "metrics.jsonl: the lines of step 8 are not those"),
        (
            raw("rollouts.jsonl", lambda lines: lines.replace(b'"finish":"stop"', b'"finish":"full"')),
            Resume(8, None),
            "rollouts.jsonl: the lines of step 8 are not those in ledger.jsonl",
        ),
        (lambda folder: (folder / "config.toml").unlink(), Resume(8, None), "No such file or directory"),
        (raw("config.toml", lambda text: text + b"\0"), Resume(8, None), "the keys of the run cannot be compared"),
        (raw("metrics.jsonl", lambda lines: lines.replace(b'"step":', b'"step":-')), Resume(8, None), "ends at step 0"),
    ],
)
def test_what_was_lost_or_exchanged_is_named(
    finished: Path, tmp_path: Path, change: Callable[[Path], object], resume: Resume, note: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    change(folder)
    notes = RunRecords.of(folder).missing(config(), resume)
    assert any(note in each for each in notes) if note else notes == [], notes


def test_a_start_reads_the_ledger_once(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RunRecords.of(finished)
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("a file is read again"))
    assert recorded.missing(config(), Resume(8, None)) == recorded.missing(config(), Resume(8, None)) == []
