"""Checks of [eval.sets] and eval.keep_best."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks.rollouts import check_evaluation
from titan_rl.preflight.plan import prepare
from titan_rl.tasks.judging import REWARD_ATTEMPTS

BASE = load(find("grpo_llama"))


def config(sets: dict[str, dict[str, Any]], **eval: Any) -> Config:
    return replace(BASE, eval=replace(BASE.eval, sets=sets, **eval))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps({"question": f"0{i}+07=", "answer": str(i + 7)}) + "\n" for i in range(3)))
    return str(path)


def test_a_sound_set_becomes_problems_with_their_own_settings(rows: str, tmp_path: Path) -> None:
    sets = {"hard": {"path": rows, "samples": 4, "temperature": 0.7, "reward": "last_number", "size": 2}, "again": {}}
    chosen = config(sets, size=8, keep_best="eval/hard/pass@4")
    assert list(check_evaluation(chosen)) == []
    chosen = replace(chosen, job=replace(chosen.job, dump_folder=str(tmp_path / "run")))
    setup = prepare("x", chosen, device="cpu", scratch=tmp_path / "model")
    hard, again = setup.eval_sets
    assert [prompt.text for prompt in hard.prompts] == ["00+07=", "01+07="]
    assert (hard.name, hard.samples, hard.temperature, hard.attempts) == ("hard", 4, 0.7, REWARD_ATTEMPTS)
    assert again.prompts == setup.heldout.prompts
    assert hard.seed != again.seed


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"path": "/no/such"}, "eval.sets.a.path: expected a JSONL or Parquet file, found none at '/no/such'"),
        ({"reward": "model"}, 'eval.sets.a.reward: expected a reward other than "model"'),
        ({"reward": "judge_group"}, "because it compares the answers of a group"),
        ({"reward": "no_such_module:f"}, "eval.sets.a.reward = 'no_such_module:f': No module named"),
        ({"path": "{rows}", "reward": "last_number", "size": 1}, ""),
        ({"path": "{bad}"}, "bad.jsonl:2"),
        ({"path": "{empty}"}, "eval.sets.a.path: expected at least one row in {empty}, found none"),
        ({"path": "{long}"}, "eval.sets.a: {long}:1: expected a prompt of at most"),
        ({"samples": 2}, "eval.sets.a.temperature: expected a number > 0"),
    ],
)
def test_one_problem(table: dict[str, Any], problem: str, rows: str, tmp_path: Path) -> None:
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("bad", "empty", "long")} | {"rows": rows}
    Path(files["bad"]).write_text('{"question": "1+1=", "answer": "2"}\n{"question": 3}\n')
    Path(files["empty"]).write_text("\n")
    Path(files["long"]).write_text(json.dumps({"question": "1" * 2000, "answer": "2"}) + "\n")
    table = {k: v.format(**files) if isinstance(v, str) else v for k, v in table.items()}
    found = list(check_evaluation(config({"a": table})))
    assert len(found) == bool(problem), found
    assert all(problem.format(**files) in each for each in found)


def test_a_set_of_held_out_problems_needs_some() -> None:
    (problem,) = check_evaluation(config({"a": {}}, size=0))
    why = "because eval.size = 0 leaves no held-out problems"
    assert problem == f"eval.sets.a.path: expected a JSONL or Parquet file, {why}, found none"


@pytest.mark.parametrize(
    ("metric", "size", "problem"),
    [
        (
            "eval/scor",
            8,
            "eval.keep_best: expected one of eval/score, eval/a/avg@2, eval/a/pass@1, eval/a/pass@2, "
            "found \"eval/scor\"; did you mean 'eval/score'?",
        ),
        ("eval/a/pass@4", 8, "did you mean 'eval/a/pass@2'?"),
        ("loss", 8, "eval.keep_best: expected one of"),
    ],
)
def test_the_metric_of_the_best_weights_must_be_measured(metric: str, size: int, problem: str) -> None:
    sets = {"a": {"samples": 2, "temperature": 1.0}}
    (found,) = check_evaluation(config(sets, size=size, keep_best=metric))
    assert problem in found


def test_nothing_is_best_without_an_evaluation() -> None:
    (found,) = check_evaluation(config({}, size=0, keep_best="eval/score"))
    assert (
        found == 'eval.keep_best: expected "", because nothing is evaluated (eval.size, eval.sets), found "eval/score"'
    )


def test_a_reward_model_has_no_sets() -> None:
    kind = replace(BASE, algorithm=replace(BASE.algorithm, name="reward_model"))
    (found,) = check_evaluation(replace(kind, eval=replace(BASE.eval, sets={"a": {}})))
    assert found == "eval.sets: expected none, because a reward model is evaluated on pairs, found 1"
