"""The summary of a run's metrics.jsonl."""

import json
import math
import time
from pathlib import Path

import pytest

from titan_rl.config.sections import Config
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.record.run_log import RunLog
from titan_rl.record.summary import summarize
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory

METRICS = {"tokens/trained": 4.0, "logprob_gap/mean": 1e-7, "logprob_gap/max": 2e-7}


def test_the_summary_adds_up_over_the_processes_of_a_run(tmp_path: Path) -> None:
    now = time.time()
    step = {
        "time/step": 4,
        "time/generate": 2.0,
        "time/judge": 0.25,
        "time/train": 1.0,
        "time/sync": 0.5,
        "time/wait": 0.25,
    }
    gap = {"tokens/trained": 10, "logprob_gap/mean": 1e-3, "logprob_gap/max": 0.01, "off_policy/ess": 1.0}
    lines = [  # a first process of 40 s, a break, and a second one of 30 s
        {"kind": "startup", "step": 0, "time": now - 90, "time/startup": 10},
        {"kind": "cold_start", "step": 0, "time": now - 88, "eval/score": 0.125},
        {"kind": "cold_start", "step": 1, "time": now - 80, "loss": 2.0},
        {"kind": "eval", "step": 0, "time": now - 78, "time/eval": 2, "eval/score": 0.25},
        {"kind": "rl", "step": 1, "time": now - 60, **step, **gap, "time/save": 5, "routing/agreement": 0.9},
        {"kind": "startup", "step": 1, "time": now - 20, "time/startup": 10},
        {
            "kind": "rl",
            "step": 2,
            "time": now - 10,
            **step,
            **gap,
            "tokens/trained": 30,
            "logprob_gap/max": 0.5,
            "off_policy/ess": 0.96,
            "routing/agreement": 0.98,
        },
        {"kind": "eval", "step": 2, "time": now, "time/eval": 1, "eval/score": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarize(tmp_path, "tiny", Config())
    assert summary["wall_seconds"] == pytest.approx(70, abs=1)
    assert summary["seconds"] == pytest.approx(
        {
            "startup": 20,
            "cold_start": 10,
            "generate": 4,
            "judge": 0.5,
            "train": 2,
            "sync": 1,
            "wait": 0.5,
            "eval": 3,
            "save": 5,
            "pause": 0.0,
            "other": 24,
        },
        abs=1,
    )
    assert summary["logprob_gap"] == pytest.approx({"mean": 1e-3, "max": 0.5})
    assert summary["effective_samples"] == pytest.approx(0.97)
    assert summary["routing_agreement"] == pytest.approx(0.94)
    assert [summary[key] for key in ("config_name", "seed", "steps")] == ["tiny", 0, 2]
    assert [summary[key] for key in ("cold_start_eval", "initial_eval", "final_eval")] == [0.125, 0.25, 0.75]
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"])


def test_the_summary_of_a_run_on_given_data(tmp_path: Path) -> None:
    now = time.time()
    step = {"time/judge": 1.0, "time/train": 2.0, "time/sync": 0.5, "time/wait": 0.25, "loss": 0.5}
    lines = [
        {"kind": "startup", "step": 0, "time": now - 30, "time/startup": 10},
        {"kind": "eval", "step": 0, "time": now - 28, "time/eval": 2, "eval/score": 0.25},
        {"kind": "fit", "step": 1, "time": now - 20, **step},
        {"kind": "fit", "step": 2, "time": now - 10, **step, "time/eval": 3, "time/save": 1, "eval/score": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarize(tmp_path, "tiny", Config())
    assert [summary[key] for key in ("steps", "cold_start_eval", "initial_eval", "final_eval")] == [2, None, 0.25, 0.75]
    assert summary["logprob_gap"] == {"mean": None, "max": None}
    expected = {"startup": 10, "cold_start": 0, "generate": 0, "judge": 2, "train": 4, "sync": 1, "wait": 0.5}
    expected |= {"eval": 5, "save": 1, "pause": 0.0, "other": 40 - 10 - 2 - 4 - 1 - 0.5 - 5 - 1}
    assert summary["seconds"] == pytest.approx(expected, abs=1)


def test_a_summary_is_written_whole_and_shows_a_gap_that_was_not_a_number(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.step(1, {**METRICS, "logprob_gap/max": math.nan}, {}, [])
        log.step(2, METRICS, {}, [])
        log.summary(summarize(tmp_path, "tiny", Config()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["logprob_gap"] == {"mean": pytest.approx(1e-7), "max": None}
    assert summary["final_eval"] is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_run_without_rl_steps_has_a_summary(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()):
        summary = summarize(tmp_path, "tiny", Config())
    assert (summary["steps"], summary["logprob_gap"]) == (0, {"mean": None, "max": None})
    assert summary["routing_agreement"] is None


def test_the_number_of_bad_rows_is_in_the_summary_and_in_the_ledger(tmp_path: Path) -> None:
    with RunLog(tmp_path, "test", Config()) as log:
        log.startup(0, 1.0, 3)
    assert summarize(tmp_path, "test", Config())["bad_rows"] == 3
    with RunLog(tmp_path, "test", Config(), resume_step=0) as log:  # the file has been mended
        log.startup(0, 1.0)
    assert summarize(tmp_path, "test", Config())["bad_rows"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("bad_rows") for line in lines] == [3, None]

    with Ledger(tmp_path) as ledger:
        ledger.begun(0, 0, (), bounds=bounds_of(Config()), bad_rows=3)
    (begun,) = RunFiles(tmp_path).ledger()
    assert begun["bad_rows"] == 3
    assert LedgerHistory.of(tmp_path).problems == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("time", "now"), ("time", None), ("time/train", "long"), ("step", "8"), ("step", -1), ("tokens/trained", [1])],
)
def test_a_line_with_impossible_values_is_left_out(tmp_path: Path, key: str, value: object) -> None:
    line = {"kind": "rl", "step": 1, "time": time.time(), **METRICS}
    lines = [{"kind": "startup", "step": 0, "time": time.time()}, line, line | {"step": 2, key: value}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(tmp_path, "tiny", Config())["steps"] == 1
