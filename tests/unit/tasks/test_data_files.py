"""Rows of files as users have them: JSONL, Parquet, folders, the Hub's cache, other projects' columns, bad rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from titan_rl.config.sections import TaskSection
from titan_rl.tasks.examples import BadRows, Example
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.task import Task, load_task
from titan_rl.wire.types import Prompt

GOOD = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path: Path | str, *, eval_size: int = 0, pairs: bool = False, **keys: Any) -> Task:
    return load_task(TaskSection(name="jsonl", path=str(path), **keys), seed=0, eval_size=eval_size, pairs=pairs)


def contents(examples: Any) -> list[tuple[Any, str, dict[str, Any]]]:
    return [(e.prompt, e.answer, e.row) for e in examples]


def test_a_parquet_file_has_the_rows_of_the_same_jsonl_file(tmp_path: Path) -> None:
    rows = [row | {"level": i, "more": {"a": [i, None]}} for i, row in enumerate(GOOD)]
    one, other = parquet(tmp_path / "a.parquet", rows), jsonl(tmp_path / "a.jsonl", rows)
    assert contents(load(one).train) == contents(load(other).train)
    assert [e.where for e in load(one).train] == [f"{one}:{number}" for number in range(1, 6)]
    task = load(one, eval_size=2, eval_path=str(one))
    assert contents(task.heldout) == contents(task.train[:2])


SAID = [{"role": who, "content": text} for who, text in (("assistant", "?7"), ("tool", "9="), ("assistant", "9"))]


def test_a_demonstration_is_read_as_turns_and_rows_may_lack_it(tmp_path: Path) -> None:
    rows = [GOOD[0] | {"shown": SAID}, GOOD[1] | {"shown": None}, GOOD[2] | {"shown": SAID[2:]}]
    for path in (parquet(tmp_path / "a.parquet", rows), jsonl(tmp_path / "a.jsonl", rows)):
        examples = load(path, demonstration_key="shown").train
        assert [e.demonstration for e in examples] == [[("?7", [SAID[1]]), ("9", [])], (), [("9", [])]]
        assert [e.demonstration for e in load(path).train] == [()] * 3


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ("?7", "expected a list of chat messages in 'shown', the first and the last of the assistant, found '?7'"),
        (SAID[1:], "expected a list of chat messages in 'shown', the first and the last of the assistant, found"),
        (SAID[:2], "expected a list of chat messages in 'shown', the first and the last of the assistant, found"),
        ([SAID[0], SAID[2]], "expected message 2 of 'shown' not to follow another one of the assistant"),
        ([SAID[2] | {"tool_calls": [1]}], "expected message 1 of 'shown' to have its text, also of calls, as content"),
        ([SAID[2] | {"content": ["9"]}], "expected message 1 of 'shown' to have its text, also of calls, as content"),
    ],
)
def test_a_demonstration_that_cannot_be_imitated_is_a_bad_row(tmp_path: Path, shown: Any, why: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [GOOD[0] | {"shown": shown}])
    with pytest.raises(BadRows) as caught:
        load(path, demonstration_key="shown")
    assert caught.value.problems[0].startswith(f"{path}:1: {why}")


def test_messages_of_a_parquet_file_have_no_keys_that_only_others_have(tmp_path: Path) -> None:
    """Arrow gives every struct of a column all of its fields; templates ask which keys a message has."""
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    path = parquet(tmp_path / "a.parquet", [{"question": CHAT, "answer": "2"}, {"question": [asked], "answer": "3"}])
    first, second = load(path, template="chat").train
    assert first.prompt == CHAT
    assert second.prompt == [asked]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    jsonl(tmp_path / "data/b.jsonl", GOOD[2:4])
    parquet(tmp_path / "data/a.parquet", GOOD[:2])
    jsonl(tmp_path / "data/c.jsonl", GOOD[4:])
    jsonl(tmp_path / "data/.hidden.jsonl", ["{"])
    (tmp_path / "data/README.md").write_text("not rows")
    assert contents(load(tmp_path / "data").train) == [(row["question"], row["answer"], row) for row in GOOD]
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"task\.path: expected \*\.jsonl or \*\.parquet files in the folder"):
        load(tmp_path / "none")


def test_a_changed_file_of_a_folder_is_read_again(tmp_path: Path) -> None:
    jsonl(tmp_path / "data/a.jsonl", GOOD[:2])
    assert len(load(tmp_path / "data").train) == 2
    jsonl(tmp_path / "data/b.jsonl", GOOD[2:])
    assert len(load(tmp_path / "data").train) == 5


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as huggingface_hub keeps it: two configs, two splits, one of them in two parts."""
    folder = tmp_path / "hub/datasets--openai--gsm8k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc123")
    snapshot = folder / "snapshots/abc123"
    parquet(snapshot / "main/train-00000-of-00002.parquet", GOOD[:2])
    parquet(snapshot / "main/train-00001-of-00002.parquet", GOOD[2:4])
    parquet(snapshot / "main/test-00000-of-00001.parquet", GOOD[4:])
    parquet(snapshot / "socratic/train-00000-of-00001.parquet", GOOD)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_data_set_of_the_hub_is_found_in_the_local_cache(hub: Path) -> None:
    task = load("hf:openai/gsm8k:main:train", eval_size=1, eval_path="hf:openai/gsm8k:test")
    assert [e.row for e in task.train] == GOOD[:4]
    assert [e.row for e in task.heldout] == GOOD[4:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:openai/math", r"fetch it with `hf download openai/math --repo-type dataset`"),
        ("hf:openai/gsm8k", r"found 'hf:openai/gsm8k' and the files main/test-00000-of-00001\.parquet, main/train"),
        ("hf:openai/gsm8k:train", r'expected ":config:split" behind hf:openai/gsm8k .* socratic/train'),
        ("hf:openai/gsm8k:main:trian", r"did you mean 'train'\?"),
        ("hf:gsm8k", r'expected "hf:owner/name"'),
        ("hf:openai/gsm8k:a:b:c", r'expected "hf:owner/name"'),
    ],
)
def test_a_name_of_the_hub_that_is_not_there_says_what_is(hub: Path, name: str, message: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=rf"task\.path: .*{message}"):
        load(name)


def test_half_of_a_download_is_refused(hub: Path) -> None:
    (hub / "main/train-00001-of-00002.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"found no -00001-of-00002: run `hf download openai/gsm8k"):
        load("hf:openai/gsm8k:main:train")


VERL = {
    "data_source": "gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
FORMATS = [
    (VERL, CHAT, "2", "rows of verl: prompt from 'prompt', answer from 'reward_model.ground_truth'"),
    (
        {"prompt": CHAT, "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "2"}},
        CHAT,
        "2",
        "rows of SkyRL-gym: prompt from 'prompt', answer from 'reward_spec.ground_truth'",
    ),
    (
        {"prompt": "1+1=", "label": "2", "metadata": {"a": 1}},
        "1+1=",
        "2",
        "rows of slime: prompt from 'prompt', answer from 'label'",
    ),
    (
        {"prompt": CHAT, "answer": "2", "info": {}},
        CHAT,
        "2",
        "rows of verifiers: prompt from 'prompt', answer from 'answer'",
    ),
    ({"prompt": CHAT, "solution": "2"}, CHAT, "2", "rows of TRL: prompt from 'prompt', answer from 'solution'"),
    (
        {"prompt": CHAT, "completion": [{"role": "assistant", "content": "2"}]},
        CHAT,
        "2",
        "rows of TRL: prompt from 'prompt', answer from 'completion'",
    ),
    ({"question": "1+1=", "answer": "2", "info": {"a": 1}, "task": "sums"}, "1+1=", "2", ""),
    (
        {"problem": "1+1=", "solution": "2"},
        "1+1=",
        "2",
        "rows of problems: prompt from 'problem', answer from 'solution'",
    ),
]


@pytest.mark.parametrize(("row", "prompt", "answer", "note"), FORMATS)
@pytest.mark.parametrize("write", [jsonl, parquet])
def test_whose_rows_these_are_is_recognized_and_said(
    tmp_path: Path, write: Any, row: dict[str, Any], prompt: Any, answer: str, note: str
) -> None:
    if write is parquet:
        row = {key: value or {"a": 1} for key, value in row.items()}  # Parquet has no empty tables
    path = write(tmp_path / f"a.{write.__name__}", [row, row])
    task = load(path)
    assert task.train == [Example(prompt, answer, row, where=f"{path}:{number}") for number in (1, 2)]
    assert task.notes == ((f"task.path: {note}",) if note else ())


def test_configured_columns_win(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [VERL | {"hint": "two", "a.b": "dotted"}])
    assert load(path, answer_key="hint").train[0].answer == "two"
    assert load(path, answer_key="a.b").train[0].answer == "dotted"
    assert load(path, prompt_key="data_source", answer_key="extra_info.index").train[0].prompt == "gsm8k"
    with pytest.raises(BadRows, match=r"expected task\.answer_key = 'reward_model\.truth', found the columns \["):
        load(path, answer_key="reward_model.truth")


def test_a_ground_truth_that_is_a_table_becomes_json(tmp_path: Path) -> None:
    row = VERL | {"reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}}
    (example,) = load(jsonl(tmp_path / "a.jsonl", [row])).train
    assert (example.answer, example.row) == ('{"target": ["Paris"]}', row)


def test_pairs_of_trl(tmp_path: Path) -> None:
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("2", "3"))
    path = parquet(tmp_path / "a.parquet", [{"prompt": CHAT, "chosen": chosen, "rejected": rejected}])
    task = load(path, pairs=True)
    assert [(e.prompt, e.answer, e.rejected) for e in task.train] == [(CHAT, "2", "3")]
    assert task.notes == (
        "task.path: rows of TRL: prompt from 'prompt', chosen from 'chosen', rejected from 'rejected'",
    )


BAD = [GOOD[0], "{", GOOD[1], {"question": "1"}, {"question": None, "answer": "2"}]


def test_bad_rows_are_all_named_or_skipped_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", BAD)
    with pytest.raises(BadRows) as refused:
        load(path)
    assert [problem.split(": ")[0] for problem in refused.value.problems] == [f"{path}:{line}" for line in (2, 4, 5)]
    task = load(path, bad_rows="drop")
    assert [e.row for e in task.train] == GOOD[:2]
    assert task.bad_rows == 3
    (note,) = task.notes
    assert note.startswith(f"task.bad_rows: 3 of 5 rows of task.path are left out; {path}:2: expected a JSON obj")


def test_a_file_of_bad_rows_only_is_never_skipped(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match=r"a\.jsonl:1: expected a JSON object"):
        load(jsonl(tmp_path / "a.jsonl", ["{"]), bad_rows="drop")


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [*GOOD, {"question": "1", "answer": None}])
    with pytest.raises(BadRows, match=r"a\.parquet:6: expected a string, a number, a list or a table in 'answer'"):
        load(path)


def test_a_file_with_more_rows_than_memory_holds_is_refused_unread(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"question": pyarrow.nulls(2**24 + 1)}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**20
    with pytest.raises(ValueError, match=r"found 16,777,217 rows, of at most 16,777,216 in "):
        load(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", GOOD)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"task\.path: expected a Parquet file that can be read, found .*a\.parquet"):
        load(path)


def test_the_row_of_verl_reaches_its_compute_score_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, ground_truth, extra_info) == ('gsm8k', ['2', 'two'], {'index': 0})\n"
        "    return {'score': float(solution_str in ground_truth), 'index': extra_info['index']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    row = VERL | {"reward_model": {"style": "rule", "ground_truth": ["2", "two"]}}
    (example,) = load(parquet(tmp_path / "a.parquet", [row])).train
    score = component("own_score:compute_score")
    prompt = Prompt(0, "", [], example.answer, example.row)
    found = [score.read(score.call(prompt, Answered(text, [], 0))) for text in ("two", "3")]
    assert [(each.value, each.more) for each in found] == [(1.0, {"index": 0.0}), (0.0, {"index": 0.0})]
