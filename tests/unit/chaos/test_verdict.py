"""Checks of the versions in a ledger written by hand."""

from pathlib import Path

from titan_rl.chaos.verdict import versions
from titan_rl.config.sections import Config, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.wire.types import Completion


def sampled(ledger: Ledger, prompt: int, version: int) -> None:
    ledger.admitted(prompt, 0)
    ledger.sampled(prompt, [Completion([1], [0.0], [version], "stop")])


def test_a_version_of_an_undone_history_is_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begun(0, 0, ())
    for step in (1, 2, 3):
        sampled(ledger, step, step - 1)
        ledger._append("trained", step=step, prompts=[step])
    ledger.begun(2, 3, ())
    sampled(ledger, 3, 3)
    ledger.close()
    assert list(versions(tmp_path, Config())) == ["history 2: prompt 3 was sampled from version 3 after step 2"]


def test_older_weights_after_newer_ones_are_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begun(0, 0, ())
    for step in (1, 2):
        ledger._append("trained", step=step, prompts=[])
    sampled(ledger, 1, 2)
    sampled(ledger, 2, 1)
    ledger.close()
    assert list(versions(tmp_path, Config())) == ["history 1: prompt 2 was sampled from version 1 after version 2"]
    assert list(versions(tmp_path, Config(rollout=RolloutSection(lag=1)))) == []
