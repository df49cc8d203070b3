import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config import sections as config
from titan_rl.tasks.task import Task, load_task, rejected_answer
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.seeds import shuffled


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def jsonl(tmp_path: Path, *lines: object, eval_size: int = 0, pairs: bool = False, **keys: Any) -> Task:
    path = write(tmp_path / "train.jsonl", *lines)
    return load_task(config.TaskSection(name="jsonl", path=path, **keys), seed=0, eval_size=eval_size, pairs=pairs)


@pytest.mark.parametrize("eval_size", [0, 256, 9999])
def test_addition_splits_all_two_digit_sums(eval_size: int) -> None:
    task = load_task(config.TaskSection(), seed=3, eval_size=eval_size)
    train, heldout = ({str(e.prompt) for e in part} for part in (task.train, task.heldout))
    assert len(task.heldout) == len(heldout) == eval_size
    assert not train & heldout
    assert train | heldout == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}


def test_addition_answers_backwards() -> None:
    task = load_task(config.TaskSection(), seed=0, eval_size=1)
    assert all(int(e.answer[::-1]) == e.row["a"] + e.row["b"] and len(e.answer) == 3 for e in task.train)
    assert {str(e.prompt): e.answer for e in (*task.train, *task.heldout)}["47+38="] == "580"


def test_addition_has_a_wrong_answer_to_every_sum() -> None:
    task = load_task(config.TaskSection(), seed=0, eval_size=256)
    examples = [*task.train, *task.heldout]
    assert all(e.rejected != e.answer and e.rejected.isdecimal() for e in examples)
    lengths = [len(e.rejected) for e in examples]
    assert {n: lengths.count(n) / len(lengths) for n in (2, 3, 4)} == pytest.approx(
        {2: 1 / 8, 3: 3 / 4, 4: 1 / 8}, abs=0.02
    )


@given(st.text("0123456789", min_size=3, max_size=3), st.integers(0, 2**64 - 1))
def test_a_rejected_answer_is_never_right_and_one_edit_away(answer: str, draw: int) -> None:
    got = rejected_answer(answer, draw)
    assert got != answer
    assert 2 <= len(got) <= 4
    if len(got) == 3:
        assert sum(a != b for a, b in zip(answer, got, strict=True)) == 1
    short, long = sorted((answer, got), key=len)
    assert len(short) == len(long) or any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def test_pairs_leave_the_split_and_the_answers_alone() -> None:
    one, pairs = (load_task(config.TaskSection(), seed=1, eval_size=64, pairs=pairs) for pairs in (False, True))
    assert one == pairs


def test_jsonl_pairs_have_a_chosen_and_a_rejected_answer(tmp_path: Path, text: TextTokenizer) -> None:
    rows = [{"question": "1+1=", "chosen": 2, "rejected": "3"}, {"q": "", "better": "a", "worse": "b"}]
    (example,) = jsonl(tmp_path, rows[0], pairs=True).train
    assert (example.prompt, example.answer, example.rejected, example.row) == ("1+1=", "2", "3", rows[0])
    task = jsonl(tmp_path, rows[1], pairs=True, prompt_key="q", chosen_key="better", rejected_key="worse")
    prompt = task.prompt(task.train[0], 4, text)
    assert (prompt.answer, prompt.rejected, prompt.id) == ("a", "b", 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "1", "answer": "2"}, r"train\.jsonl:1: expected task\.chosen_key = 'chosen', found the columns"),
        (
            {"question": "1", "chosen": "2"},
            r"train\.jsonl:1: expected task\.rejected_key = 'rejected', found the columns",
        ),
        (
            {"question": "1", "chosen": "2", "rejected": None},
            r"train\.jsonl:1: expected a string, a number, a list or a table in 'rejected'",
        ),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jsonl(tmp_path, line, pairs=True)


def test_the_split_is_the_seeds() -> None:
    one, again, other = (load_task(config.TaskSection(), seed=seed, eval_size=64) for seed in (1, 1, 2))
    assert one == again
    assert one.heldout != other.heldout


def test_addition_must_keep_something_to_train_on() -> None:
    with pytest.raises(ValueError, match=r"eval\.size.*10000"):
        load_task(config.TaskSection(), seed=0, eval_size=10_000)


def test_jsonl_keeps_rows_and_takes_the_first_heldout(tmp_path: Path) -> None:
    rows = [{"q": f"{i}+1=", "a": i + 1, "hint": "count"} for i in range(4)]
    heldout = write(tmp_path / "eval.jsonl", *rows)
    task = jsonl(tmp_path, *rows[:2], "", eval_size=3, eval_path=heldout, prompt_key="q", answer_key="a")
    assert [(e.prompt, e.answer, e.row) for e in task.train] == [(r["q"], str(r["a"]), r) for r in rows[:2]]
    assert [e.row for e in task.heldout] == rows[:3]


def test_a_missing_or_empty_file_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"task\.eval_path: expected a JSONL or Parquet file, found none at ''.*eval\.size"
    ):
        jsonl(tmp_path, {"question": "1", "answer": "1"}, eval_size=1)
    with pytest.raises(ValueError, match=r"task\.path.*at least one row"):
        jsonl(tmp_path, "")


def test_prompts_are_read_through_the_template(tmp_path: Path, text: TextTokenizer) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    rows = [{"question": "1+1=", "answer": "2"}, {"question": messages, "answer": "2"}]
    task = jsonl(tmp_path, *rows, template="chat", system_prompt="add")
    from_text, from_messages = (task.prompt(e, i, text) for i, e in enumerate(task.train))
    assert from_text.text == from_messages.text == "<s><|system|>add</s><|user|>1+1=</s><|assistant|>"
    assert (from_text.id, from_messages.id, from_messages.row) == (0, 1, rows[1])

    plain = jsonl(tmp_path, rows[0])
    assert plain.prompt(plain.train[0], 7, text).text == "1+1="
    assert plain.prompt(plain.train[0], 7, text).tokens == text.prompt("1+1=", "plain")


@given(st.integers(0, 300), st.integers(0, 2**64), st.integers(0, 1000))
def test_shuffled_is_a_permutation(size: int, seed: int, stream: int) -> None:
    assert sorted(shuffled(size, seed, stream).tolist()) == list(range(size))


def test_shuffled_never_changes() -> None:
    """A resumed run depends on these very numbers."""
    assert shuffled(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffled(8, 0, 0).tolist() == [6, 3, 1, 4, 5, 2, 7, 0]
    assert not np.array_equal(shuffled(100, 0, 0), shuffled(100, 0, 1))
