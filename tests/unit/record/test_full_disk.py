"""Files of a run folder that cannot be written: essential ones end the run by name and stay whole, others do without.

The limit on the size of a file (RLIMIT_FSIZE) stands for a full disk: a write that crosses it writes a part, and the
next one fails.
"""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from support.written_runs import WrittenRun, config
from titan_rl.config.sections import Config, FaultSection, MetricsSection
from titan_rl.record.incidents import Incidents
from titan_rl.record.ledger import Ledger
from titan_rl.record.lines import LineFile, Unwritable, whole_lines
from titan_rl.record.metric_docs import DOCS
from titan_rl.record.run_log import RunLog
from titan_rl.record.run_names import LEDGER
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.wire.errors import RankFailed, RunError


@contextmanager
def full_at(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_whole_lines_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    with LineFile(path) as file:
        file.append([b"x" * 9] * 3)
        with full_at(45), pytest.raises(Unwritable) as failed:
            file.append([b"y" * 9] * 3)
        assert path.read_bytes() == b"xxxxxxxxx\n" * 3
        assert str(failed.value) == f"{path} cannot be written: File too large"
        assert "free space (df)" in failed.value.details
        for verb in (lambda: file.append([b"z"]), file.flush, file.to_disk):
            with pytest.raises(Unwritable):  # it would leave a gap
                verb()
    assert path.read_bytes() == b"xxxxxxxxx\n" * 3


def test_a_full_disk_is_named_with_the_bytes_that_are_free(tmp_path: Path) -> None:
    free = r"No space left on device \([\d,]+ bytes free\)"
    for path in (tmp_path, tmp_path / "file.jsonl"):
        error = Unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert re.fullmatch(f"{re.escape(str(path))} cannot be written: {free}", str(error))
    assert "bytes free" not in str(Unwritable(tmp_path, OSError(errno.EACCES, os.strerror(errno.EACCES))))
    rank = RankFailed("trainer[dp=0 tp=0] failed in save", "Traceback\nOSError: [Errno 28] No space left on device")
    found = Unwritable.of_rank(tmp_path, rank)
    assert found is not None
    assert re.search(free, str(found))
    assert not found.rank, "a new rank would meet it too"
    assert Unwritable.of_rank(tmp_path, RankFailed("trainer[dp=0 tp=0] failed in save", "ValueError: 28")) is None


def test_a_large_write_that_fails_leaves_none_of_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.record.lines.PIECE", 15)
    path = tmp_path / "file.jsonl"
    with LineFile(path) as file:
        file.append([b"x" * 9])
        file.append([b"y" * 9] * 7)
        assert path.read_bytes() == b"xxxxxxxxx\n" + b"yyyyyyyyy\n" * 7
        with full_at(135), pytest.raises(Unwritable):
            file.append([b"z" * 9] * 7)  # two pieces fit
    assert path.read_bytes() == b"xxxxxxxxx\n" + b"yyyyyyyyy\n" * 7


@pytest.mark.parametrize("name", [LEDGER, "metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_run_whose_log_is_full_ends_by_name_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    """The nth write to this file meets the limit, after a part of a line."""
    flush, writes = LineFile.flush, 0

    def limited(self: LineFile) -> None:
        nonlocal writes
        writes += self._path.name == name and bool(self._pending)
        with full_at(self._size + 20) if self._path.name == name and writes == nth else nullcontext():
            flush(self)

    run = WrittenRun(tmp_path)
    monkeypatch.setattr(LineFile, "flush", limited)
    with pytest.raises(RunError, match=rf"{name} cannot be written: File too large"):
        run.life(config(max_staleness_steps=1))
    for each in (LEDGER, "metrics.jsonl", "rollouts.jsonl"):
        path = tmp_path / each
        assert not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    if (tmp_path / LEDGER).exists() and (name, nth) != (LEDGER, 1):
        assert audit(tmp_path)[0] == []
    monkeypatch.setattr(LineFile, "flush", flush)
    run.life(config(max_staleness_steps=1))
    problems, checked = audit(tmp_path)
    assert problems == []
    assert "16 trained on in 8 steps" in checked
    assert run.warnings == []


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "rollouts.jsonl", "summary.json"])
def test_a_name_that_cannot_be_opened_ends_the_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "in the way").mkdir(parents=True)
    with pytest.raises(RunError, match=f"{name} cannot be written: "):  # noqa: SIM117
        with RunLog(tmp_path, "tiny", Config()) as log:
            log.summary({})
    if name == "metrics.jsonl":
        (tmp_path / LEDGER).mkdir()
        with pytest.raises(RunError, match=f"{LEDGER} cannot be written: Is a directory"):
            Ledger(tmp_path)


def test_a_loss_is_told_though_the_file_of_faults_cannot_be_written(tmp_path: Path) -> None:
    path, said = tmp_path / "faults.jsonl", list[str]()
    path.mkdir()
    incidents = Incidents(tmp_path, FaultSection(), said.append)
    first = incidents.lost("generator0", RunError("generator0 died"))
    incidents.back(first, "it serves version 3")
    assert [line.split(" after")[0] for line in said] == [
        f"{path} cannot be written: Is a directory; its lines are kept until they can be",
        "generator0 died",
        "generator0 is back",
    ]
    path.rmdir()
    incidents.lost("trainer", RunError("trainer died"))
    kept = [json.loads(line) for line in whole_lines(path)]
    assert [(line["who"], line["outcome"]) for line in kept] == [
        ("generator0", ""),
        ("generator0", "back"),
        ("trainer", ""),
    ]


def test_curves_that_cannot_be_written_end_with_one_warning(tmp_path: Path) -> None:
    said = list[str]()
    (tmp_path / "tb").write_text("in the way")
    with RunLog(tmp_path, "tiny", Config(), warn=said.append) as log:
        for step in (1, 2):
            log.fit(step, {"loss": 0.5})
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'tb'} cannot be written: ")
    assert len(list(whole_lines(tmp_path / "metrics.jsonl"))) == 2


def test_curves_on_a_full_disk_end_with_one_warning(tmp_path: Path) -> None:
    said = list[str]()
    with RunLog(tmp_path, "tiny", Config(metrics=MetricsSection()), warn=said.append) as log:
        log.fit(1, {"loss": 0.5})
        with full_at(900):  # the curves' descriptions do not fit
            for step in (2, 3):
                log.fit(step, dict.fromkeys(list(DOCS)[:8], 0.5))
    assert [line.split("; ")[0] for line in said] == [f"{tmp_path / 'tb'} cannot be written: File too large"]
    assert len(list(whole_lines(tmp_path / "metrics.jsonl"))) == 3


def test_the_lines_of_a_step_are_on_disk_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of metrics and rollouts too: a power cut after the save loses none of its steps' lines."""
    synced = list[str]()

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    with RunLog(tmp_path, "tiny", Config()) as log:
        log.startup(0, 1.0)
        monkeypatch.setattr("os.fsync", fsync)
        log.to_disk()
        assert synced == ["rollouts.jsonl", "evaluation_answers.jsonl", "evaluations.jsonl", "metrics.jsonl"]


def test_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from titan_rl.config.sections import *\n"
        "from titan_rl.record.run_log import RunLog; from titan_rl.config.toml import load\n"
        "folder = Path(sys.argv[1]); config = Config(job=JobSection(description='\\u6570 \\u00e9'))\n"
        "with RunLog(folder, 'tiny', config) as log: log.summary({'text': '\\u6570'})\n"
        "assert load(folder / 'config.toml') == config"
    )
    where = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, **where},
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert 'description = "数 é"' in (tmp_path / "config.toml").read_text(encoding="utf-8")
