"""The tables [eval.sets.NAME]."""

from pathlib import Path

import pytest

from titan_rl.config.eval_sets import EvalSet, eval_sets, problems_of
from titan_rl.config.toml import ConfigError, load, to_toml

TEXT = """
[eval]
size = 8

[eval.sets.hard]
path = "hard.jsonl"
samples = 4
temperature = 1

[eval.sets.again]
"""


def test_sets_are_read_in_order_and_written_back(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    config = load(tmp_path / "run.toml")
    hard, again = eval_sets(config.eval.sets)
    assert hard == EvalSet(name="hard", path="hard.jsonl", samples=4, temperature=1.0)
    assert again == EvalSet(name="again")
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml") == config


def test_a_flag_gives_sets_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    config = load(tmp_path / "run.toml", [("eval.sets", '{hard = {path = "a.jsonl", size = 3}}')])
    assert eval_sets(config.eval.sets) == [EvalSet(name="hard", path="a.jsonl", size=3)]


@pytest.mark.parametrize("value", ["[1]", "{a = 3}", "{a = {b = {c = 1}}}", "{a = {b = [1]}}", "text"])
def test_what_is_no_table_of_tables_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"--eval.sets: expected named tables of texts, numbers and booleans, found"):
        load(tmp_path / "run.toml", [("eval.sets", value)])


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"a": {"sample": 3}}, "eval.sets.a: there is no key \"sample\"; did you mean 'samples'?"),
        ({"a": {"samples": 0}}, "eval.sets.a.samples: expected an integer >= 1 and <= 4096, found 0"),
        ({"a": {"samples": True}}, "eval.sets.a.samples: expected an integer"),
        ({"a": {"size": -1}}, "eval.sets.a.size: expected an integer >= 0"),
        ({"a": {"temperature": 3}}, "eval.sets.a.temperature: expected a number >= 0 and <= 2, found 3"),
        ({"a": {"temperature": 0.001}}, "eval.sets.a.temperature: expected 0 or a value in [0.01, 2], found 0.001"),
        ({"a": {"path": 3}}, "eval.sets.a.path: expected a string, found 3"),
        (
            {"a": {"correct_at": 1e7}},
            "eval.sets.a.correct_at: expected a number >= -1e+06 and <= 1e+06, found 10000000.0",
        ),
        ({"a": {"samples": 4}}, "because samples = 4 greedy answers would be the same, found 0"),
        ({"a b": {}}, "eval.sets: expected a name of letters, digits"),
        ({"score": {}}, "eval.sets: expected a name"),
        ({"a/b": {}}, "eval.sets: expected a name"),
        ({"": {}}, "eval.sets: expected a name"),
    ],
)
def test_one_problem(table: dict[str, dict[str, object]], problem: str) -> None:
    (found,) = problems_of(table)
    assert problem in found


def test_sound_tables_have_no_problems() -> None:
    assert list(problems_of({"a.b-c_1": {}, "b": {"samples": 8, "temperature": 0.7, "correct_at": 1}})) == []
