"""An RL step is reported by a thread: the loop continues, and the lines are written before anything counts them."""

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.rollout_streams import Echo, source, stream
from support.written_runs import tokenizer
from titan_rl.config.sections import Config, MetricsSection
from titan_rl.record import report as reporting
from titan_rl.record.lines import LineFile, Unwritable, whole_lines
from titan_rl.record.report import Report
from titan_rl.record.run_log import RunLog, checksum
from titan_rl.record.terminal import Terminal
from titan_rl.tools.inspect.last_samples import SAMPLE_LINES
from titan_rl.wire.reports import Backlog, StepStats, SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Group

GAPS = {"logprob_gap/mean": 0.0, "logprob_gap/max": 0.0, "logprob_gap/mult": 1.0}
STATS = StepStats(0.5, 1.0, 0.1, 8, 1.0, metrics={**GAPS, "entropy": 1.0})
FILES = ("metrics.jsonl", "rollouts.jsonl")
CONFIG = Config(metrics=MetricsSection(trackers=[]))


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    async def sampled() -> list[Group]:
        async with aclosing(stream(Echo([0]), source(tokenizer()), tokenizer())) as rollouts:
            rollouts.admit(2)
            return await rollouts.take(2, 1)

    return asyncio.run(sampled())


def report_of(folder: Path, log: RunLog) -> Report:
    return Report("tiny", CONFIG, folder, Terminal(), log, Clock(), heldout=0)


def say(report: Report, step: int, groups: list[Group]) -> None:
    report.step(step, groups, STATS, SyncStats(step), [], dropped=[], backlog=Backlog(0, 0))


def written_to(folder: Path) -> list[int]:
    return [checksum([line.rstrip(b"\n") for line in whole_lines(folder / name)]) for name in FILES]


async def test_the_loop_goes_on_while_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Group]
) -> None:
    began, may_write, append = threading.Event(), threading.Event(), LineFile.append

    def slow(self: LineFile, lines: Any, **how: Any) -> None:
        began.set()
        assert may_write.wait(60)
        append(self, lines, **how)

    with RunLog(tmp_path, "tiny", CONFIG) as log, report_of(tmp_path, log) as report:
        monkeypatch.setattr(LineFile, "append", slow)
        say(report, 1, groups)
        assert not began.is_set()  # calls that begin the next step are sent first
        async with asyncio.timeout(60):
            while not began.is_set():
                await asyncio.sleep(0.001)
        assert not (tmp_path / "rollouts.jsonl").read_bytes()
        may_write.set()
        assert report.written() == (1, *written_to(tmp_path))
        assert report.written() is None


@pytest.mark.parametrize("end", [Report.to_disk, Report.close])
async def test_what_was_reported_is_written_before_a_checkpoint_and_at_the_end(
    tmp_path: Path, end: Any, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "SOON", 3600)

    with RunLog(tmp_path, "tiny", CONFIG) as log, report_of(tmp_path, log) as report:
        say(report, 1, groups)
        assert not (tmp_path / "rollouts.jsonl").read_bytes()
        end(report)
        samples = sum(len(group.rollouts) for group in groups)
        assert [len(list(whole_lines(tmp_path / name))) for name in FILES] == [1, samples]
        assert report.written() == (1, *written_to(tmp_path))  # the ledger still gets its checksums


async def test_a_step_that_cannot_be_written_fails_the_next_call_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Group]
) -> None:
    def full(self: LineFile) -> None:
        raise Unwritable(self._path, OSError(28, "No space left on device"))

    log = RunLog(tmp_path, "tiny", CONFIG)
    with report_of(tmp_path, log) as report, monkeypatch.context() as patch:
        patch.setattr(LineFile, "flush", full)
        say(report, 1, groups)
        for call in (report.to_disk, report.written):
            with pytest.raises(Unwritable, match=r"rollouts.jsonl cannot be written: No space left on device"):
                call()
        say(report, 2, groups)
        report.close()  # as at the end of a run that has failed: its own error is the one to tell


async def test_the_end_shows_a_good_and_a_bad_sample_of_the_last_step(
    tmp_path: Path, groups: list[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = groups[0].rollouts[:2]
    pair = [replace(good, reward=1.0), replace(bad, reward=-0.0, text="line\n" * 40 + "end")]
    with RunLog(tmp_path, "tiny", CONFIG) as log, report_of(tmp_path, log) as report:
        report.done(finished=True)
        assert "samples" not in capsys.readouterr().out
        say(report, 1, [Group(groups[0].prompt, pair)])
        report.to_disk()
        report.done(finished=True)
    out = capsys.readouterr().out
    shown = out[out.index("samples") :].partition("all of them: ")[0].splitlines()
    assert len(shown) <= 2 * SAMPLE_LINES + 2
    assert ["reward 1.00" in line for line in shown].count(True) == 1
    assert ["reward 0.00" in line for line in shown].count(True) == 1
    assert any(line.split() == ["end"] for line in shown)
    assert f"python -m titan_rl look {tmp_path}" in " ".join(out.split())
