"""The audit of a run that is still writing: each file is read at another moment."""

from pathlib import Path

import pytest

from support.written_runs import WrittenRun, config
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_lock import RunLock
from titan_rl.record.run_names import LEDGER, METRICS, ROLLOUTS
from titan_rl.tools.audit import main

STEPS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = WrittenRun(tmp_path)
    run.life(config(), last=STEPS)
    return run.folder


def keep(path: Path, count: int) -> None:
    path.write_bytes(b"".join(list(whole_lines(path))[:count]))


def behind(folder: Path, lines: int, rollouts: int) -> None:
    """As if metrics.jsonl and rollouts.jsonl had been read some lines before the ledger was."""
    keep(folder / METRICS, len(list(whole_lines(folder / METRICS))) - lines)
    keep(folder / ROLLOUTS, len(list(whole_lines(folder / ROLLOUTS))) - rollouts)


@pytest.mark.parametrize(("lines", "rollouts"), [(0, 0), (1, 0), (1, 1), (2, 3), (STEPS, 0)])
def test_no_file_of_an_active_run_is_ahead_of_another(
    folder: Path, capsys: pytest.CaptureFixture[str], lines: int, rollouts: int
) -> None:
    behind(folder, lines, rollouts)
    with RunLock(folder):
        assert main([str(folder)]) == 0, capsys.readouterr().out
        output = capsys.readouterr().out
        assert f"the run is active: compared up to step {STEPS - lines}, without its checkpoints" in output
        assert "nothing lost, nothing twice, nothing stale" in output
    if lines:
        assert main([str(folder)]) == 1, "the same files of a run that has ended are not all there"


def test_a_change_in_an_active_run_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = (folder / LEDGER).read_bytes()
    (folder / ROLLOUTS).write_bytes((folder / ROLLOUTS).read_bytes().replace(b'"sample":0', b'"sample":1', 1))
    with RunLock(folder):
        assert main([str(folder)]) == 1
    assert "is there twice" in capsys.readouterr().out
    assert (folder / LEDGER).read_bytes() == ledger
