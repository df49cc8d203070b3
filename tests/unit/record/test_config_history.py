"""A run that is resumed with other settings keeps the earlier ones, and every reader knows the cut."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from titan_rl.config.changes import changed
from titan_rl.config.sections import Config
from titan_rl.record.config_history import cuts
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.record.run_log import RunLog
from titan_rl.tools.audit import main as audit
from titan_rl.tools.diagnosis.diagnosed_run import DiagnosedRun
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory
from titan_rl.tools.view.page import page_data

SEED = 20261128
REWARD = {"task.reward": "number"}
RATE = {"optimizer.lr": 0.5}


def steps(folder: Path, config: Config, first: int, last: int, *, resumes: bool = True) -> None:
    """Write steps of a process that resumes before the first one."""
    with RunLog(folder, "tiny", config, resume_step=first - 1 if resumes else None) as log:
        log.startup(first - 1, 1.0)
        for step in range(first, last + 1):
            log.step(step, {"reward/mean": 0.5}, {}, [])


def test_settings_that_made_earlier_steps_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    steps(tmp_path, config, 1, 6, resumes=False)
    steps(tmp_path, config, 7, 8)
    assert not cuts(tmp_path), "it was resumed as it was"
    steps(tmp_path, changed(config, REWARD | RATE), 9, 10)
    steps(tmp_path, changed(config, REWARD), 11, 12)
    assert [(cut.step, set(cut.changed)) for cut in cuts(tmp_path)] == [(8, {*REWARD, *RATE}), (10, {*RATE})]
    assert str(cuts(tmp_path)[1]) == f"since step 10: optimizer.lr 0.5 -> {config.optimizer.lr}"
    assert RunFiles(tmp_path).reward_cut() == 8
    assert any("only the steps after step 8 are examined" in note for note in DiagnosedRun.of(tmp_path).notes)
    assert audit(["--rewards", str(tmp_path)]) == 0
    assert "only the steps after step 8 are compared" in capsys.readouterr().out
    texts = [event["text"] for event in page_data([tmp_path], sample_bytes=1000)["runs"][0]["events"]]
    assert sum(text.startswith("since step 8: ") for text in texts) == 1
    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, (), bounds=bounds_of(config), changed=cuts(tmp_path)[0].changed)
    assert not LedgerHistory.of(tmp_path).problems


def test_each_step_has_the_settings_that_made_it(tmp_path: Path) -> None:
    """Also after resumes from before an earlier cut, in any order."""
    draw = random.Random(SEED)
    for case in range(8):
        folder, last, made = tmp_path / str(case), 0, dict[int, float]()
        for process in range(5):
            begin, rate = draw.randint(0, last), draw.choice([0.1, 0.2, 0.3])
            last = begin + draw.randint(1, 4)
            made = {step: value for step, value in made.items() if step <= begin}
            made |= dict.fromkeys(range(begin + 1, last + 1), rate)
            steps(folder, changed(Config(), {"optimizer.lr": rate}), begin + 1, last, resumes=process > 0)
        found = cuts(folder)
        for step, rate in made.items():
            after = [cut for cut in found if cut.step >= step]
            known = float(after[0].changed["optimizer.lr"][0]) if after else rate_now(folder)
            assert known == rate, (case, step, found)


def rate_now(folder: Path) -> float:
    from titan_rl.config.toml import load_of_run

    return load_of_run(folder).optimizer.lr


def test_a_name_of_the_run_alone_is_no_change(tmp_path: Path) -> None:
    config = Config()
    steps(tmp_path, config, 1, 2, resumes=False)
    steps(tmp_path, replace(config, job=replace(config.job, description="again")), 3, 4)
    assert not cuts(tmp_path)
    assert not list(tmp_path.glob("config.*.toml"))
