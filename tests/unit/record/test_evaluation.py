"""An evaluation: its metrics, its line, and its failures."""

import json
import math
from pathlib import Path

import pytest

from titan_rl.config.sections import Config
from titan_rl.record.evaluation import Answer, Evaluation, metrics_of
from titan_rl.record.run_log import RunLog

FAILED = Answer(math.nan, "ZeroDivisionError: division by zero")
SET = Evaluation(
    "hard",
    {
        0: [Answer(1.0, tokens=4), Answer(0.0, tokens=6), Answer(0.5), Answer(1.0)],
        1: [Answer(0.0), Answer(0.0), FAILED, Answer(0.0, truncated=True)],
    },
)


def test_the_metrics_of_a_set() -> None:
    metrics = SET.metrics
    assert metrics["eval/hard/avg@4"] == pytest.approx((2.5 / 4 + 0) / 2)
    assert metrics["eval/hard/pass@1"] == pytest.approx((2 / 4 + 0) / 2)
    assert metrics["eval/hard/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert metrics["eval/hard/pass@4"] == 0.5
    assert metrics["eval/hard/failed"] == 1
    assert metrics["eval/hard/truncated"] == 1 / 8
    assert metrics["eval/hard/mean_length"] == 10 / 8
    for name in ("avg@4", "pass@1", "pass@2", "pass@4"):
        assert metrics[f"eval/hard/{name}/low"] <= metrics[f"eval/hard/{name}"] <= metrics[f"eval/hard/{name}/high"]


def test_the_held_out_problems_keep_their_metric() -> None:
    heldout = Evaluation("", {0: [Answer(1.0)], 1: [Answer(0.0)], 2: [FAILED], 3: [Answer(1.0)]})
    metrics = heldout.metrics
    assert list(metrics) == ["eval/score", "eval/low", "eval/high", "eval/failed"]
    assert (metrics["eval/score"], metrics["eval/failed"]) == (0.5, 1)
    assert metrics_of([heldout, SET]) == metrics | SET.metrics


def test_a_set_without_any_reward_has_no_score() -> None:
    """A judge that is down does not look like a policy that fails."""
    nothing = Evaluation("hard", {0: [FAILED], 1: [FAILED]})
    assert nothing.hopeless
    assert list(nothing.metrics) == ["eval/hard/failed", "eval/hard/truncated", "eval/hard/mean_length"]
    assert nothing.metrics["eval/hard/failed"] == 2
    assert str(nothing) == "no score: none of 2 answers has a reward"


def test_correct_is_what_reaches_the_threshold() -> None:
    graded = Evaluation("graded", {0: [Answer(0.5), Answer(0.4)]}, correct_at=0.5)
    assert graded.passes[1].value == 0.5
    assert Evaluation("lenient", {0: [FAILED]}, correct_at=-1.0).passes[1].value == 0  # it has no reward at all


def test_the_sentence_names_how_many_failed() -> None:
    assert str(SET).startswith("avg@4 0.312 [")
    assert str(SET).endswith(", 1 of 8 answers failed over 2 problems")


def test_every_failure_is_in_the_file_by_problem_and_reason(tmp_path: Path) -> None:
    def lines(name: str = "evaluations.jsonl") -> list[dict[str, object]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    with RunLog(tmp_path, "tiny", Config()) as log:
        log.evaluations(0, [SET])
        log.evaluations(20, [SET])
    first, second = lines()
    assert (first["kind"], first["step"], first["set"]) == ("eval", 0, "hard")
    assert first["rewards"] == {"0": [1.0, 0.0, 0.5, 1.0], "1": [0.0, 0.0, None, 0.0]}
    assert first["failures"] == [{"problem": 1, "sample": 2, "why": "ZeroDivisionError: division by zero"}]
    with RunLog(tmp_path, "tiny", Config(), resume_step=10):
        pass
    assert lines() == [first]
    assert lines("evaluations.superseded.jsonl") == [second]
