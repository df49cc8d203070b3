"""What `python -m titan_rl.run` does with its folder before it starts anything."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from titan_rl import run as program
from titan_rl.preflight.plan import Setup
from titan_rl.record.run_lock import LOCK, RunLock
from titan_rl.wire.checkpoint_sums import RUN_ID


class NoServers:
    def keep(self, kinds: object) -> None: ...


def start(*flags: str, dry: bool = False) -> int:
    servers: Any = None if dry else NoServers()
    return program.check_and_run(["--config", "grpo_llama", *flags, *(["--dry-run"] if dry else [])], servers)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Setup, list[str]]]:
    """The runs that were started, with the files in their folders."""
    runs: list[tuple[Setup, list[str]]] = []

    def run(setup: Setup, terminal: object) -> int:
        runs.append((setup, sorted(path.name for path in setup.folder.iterdir())))
        return 0

    monkeypatch.setattr(program, "run", run)
    return runs


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder of an earlier run."""
    folder = tmp_path / "run"
    (folder / "checkpoint/step-3").mkdir(parents=True)
    (folder / "checkpoint/step-3/.metadata").write_bytes(pickle.dumps("whole"))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("old")
    return folder


def rows(path: Path, last: str) -> str:
    good = [json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) for i in range(300)]
    path.write_text("\n".join([*good, last]))
    return str(path)


def test_a_fresh_run_moves_the_old_one_aside(begun: list[tuple[Setup, list[str]]], old: Path) -> None:
    assert start("--job.dump_folder", str(old), "--job.fresh") == 0
    ((setup, files),) = begun
    assert files == [RUN_ID, LOCK, "model"]
    assert setup.model_folder == setup.tokenizer.folder == old / "model"
    assert setup.resume.nothing
    moved = old.with_name("run.1")
    assert (moved / "model/config.json").read_text() == "old"
    assert (moved / "checkpoint/step-3/.metadata").exists()
    assert not (moved / LOCK).exists()


def test_a_fresh_run_that_cannot_start_leaves_the_old_one_where_it_is(
    begun: list[tuple[Setup, list[str]]], old: Path, tmp_path: Path
) -> None:
    """Neither a refused config nor a row that is found to be bad while the data set is loaded."""
    before = sorted(path for path in old.rglob("*"))
    task = ["--task.name", "jsonl", "--task.path", rows(tmp_path / "rows.jsonl", last='{"question": 1}')]
    for bad in (["--training.steps", "-1"], task):
        with pytest.raises((SystemExit, Exception)):
            start("--job.dump_folder", str(old), "--job.fresh", *bad)
        assert sorted(path for path in old.rglob("*")) == before
        assert (old / "model/config.json").read_text() == "old"
        assert not old.with_name("run.1").exists()
    assert not begun


def test_a_folder_with_a_live_run_is_refused_and_a_dry_run_may_look(
    begun: list[tuple[Setup, list[str]]], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLock(old):
        for flags in ([], ["--job.fresh"]):
            with pytest.raises(SystemExit) as stop:
                start("--job.dump_folder", str(old), *flags)
            assert stop.value.code == 2
            err = capsys.readouterr().err
            assert err.count("job.dump_folder: expected a folder without a live run, found") == 1
            assert "Traceback" not in err
        assert start("--job.dump_folder", str(old), dry=True) == 0
    assert not begun
    assert not old.with_name("run.1").exists()
    assert start("--job.dump_folder", str(old)) == 0
    assert begun[0][0].resume.rl == 3
    assert not (old / LOCK).exists()


def test_an_empty_name_is_refused_before_anything_is_looked_at(
    begun: list[tuple[Setup, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    for flags in (["--job.fresh"], []):
        for dry in (False, True):
            with pytest.raises(SystemExit) as stop:
                start("--job.dump_folder=", *flags, dry=dry)
            assert stop.value.code == 2
            assert 'job.dump_folder: expected the name of a folder on this machine, found ""' in capsys.readouterr().err
    assert not begun
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_damaged_checkpoints_only_end_with_1_and_a_damaged_one_is_in_the_plan(
    begun: list[tuple[Setup, list[str]]], old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old / "checkpoint/step-3/.metadata").write_text("")
    for dry in (True, False):
        assert start("--job.dump_folder", str(old), dry=dry) == 1
        err = " ".join(capsys.readouterr().err.split())
        assert "every checkpoint in" in err
        assert "is damaged" in err
    assert not begun
    (old / "checkpoint/step-2").mkdir()
    (old / "checkpoint/step-2/.metadata").write_bytes(pickle.dumps("whole"))
    assert start("--job.dump_folder", str(old)) == 0
    assert begun[0][0].resume.rl == 2
    assert "the checkpoint of step 3 is damaged, and the checkpoint of step 2 is used" in " ".join(
        capsys.readouterr().out.split()
    )
    assert sorted(path.name for path in (old / "checkpoint").iterdir()) == ["damaged-3.1", "step-2"]
