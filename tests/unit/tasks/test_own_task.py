"""A user's task by name."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.checked_configs import config
from titan_rl.config.sections import TaskSection
from titan_rl.preflight.checks import problems
from titan_rl.tasks.task import load_task

TASK = """
def squares(seed, eval_size):
    rows = [{"question": f"{seed}:{n}*{n}=", "answer": str(n * n), "n": n} for n in range(8)]
    return rows[eval_size:], rows[:eval_size]

def without_arguments():
    return [{"prompt": "a", "label": 1}], [{"prompt": "b", "label": 2}] * 4

def one_list(seed):
    return [{"question": "a", "answer": "b"}]

def texts(seed):
    return ["a"], ["b"]

def unknown(rng):
    return [], []

def raises(seed):
    raise KeyError("no such column")

def unanswered(seed):
    return [{"question": "a", "answer": "b"}, {"question": "c"}], [{"question": "a", "answer": "b"}] * 4

def few(seed):
    return [{"question": "a", "answer": "b"}], [{"question": "a", "answer": "b"}] * 3
"""


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tasks_of_a_test.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loaded: ModuleType | None = sys.modules.pop("own_tasks_of_a_test", None)
    assert loaded is None or loaded.__file__ != str(tmp_path / "own_tasks_of_a_test.py")
    return "own_tasks_of_a_test"


def test_its_rows_are_read_like_those_of_a_file(own_tasks: str) -> None:
    task = load_task(TaskSection(name=f"{own_tasks}:squares"), seed=7, eval_size=2)
    assert [example.prompt for example in task.heldout] == ["7:0*0=", "7:1*1="]
    assert [example.answer for example in task.train] == ["4", "9", "16", "25", "36", "49"]
    assert task.train[0].row == {"question": "7:2*2=", "answer": "4", "n": 2}
    slime = load_task(TaskSection(name=f"{own_tasks}:without_arguments"), seed=7, eval_size=4)
    assert [example.answer for example in (*slime.train, *slime.heldout)] == ["1", "2", "2", "2", "2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squares", ""),
        ("one_list", "expected two lists, rows to train on and to evaluate on, found list"),
        ("texts", "expected rows as tables of columns, found str"),
        ("unknown", "expected to require no arguments but seed, eval_size, found rng"),
        ("raises", "KeyError: 'no such column'"),
        ("unanswered", "training row 2 of own_tasks_of_a_test:unanswered: expected task.answer_key = 'answer', found"),
        ("few", "expected at least one row to train on, and eval.size = 4 to evaluate on, found 1 and 3"),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_a_wrong_one_is_named_before_the_run(tmp_path: Path, own_tasks: str, name: str, message: str) -> None:
    found = problems(config(tmp_path, f'[task]\nname = "{own_tasks}:{name}"\n[eval]\nsize = 4'))
    if message:
        (problem,) = found
        assert message in problem
    else:
        assert found == []
