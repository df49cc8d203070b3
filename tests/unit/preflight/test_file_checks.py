from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import config, edit, rows
from support.folders import write_hf
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.checks import problems
from titan_rl.preflight.shapes import shape_of


def test_a_whole_hugging_face_folder(tmp_path: Path, folder: Path) -> None:
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"')) == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "model.hf_assets_path: expected a usable"),
        (lambda f: (f / "config.json").write_text("{"), "config.json, found Expecting property name"),
        (lambda f: edit(f / "config.json", model_type="gpt2"), 'qwen2, qwen3, qwen3_moe or mistral, found "gpt2"'),
        (
            lambda f: write_hf(f, replace(shape_of(ModelSection()), vocab_size=40)),
            "a vocab_size of at least the tokenizer's 52",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "expected *.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "model.hf_assets_path: expected a tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "model.hf_assets_path: expected a tokenizer"),
        (lambda f: edit(f / "tokenizer_config.json", chat_template=None), 'task.template: expected "plain"'),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "expected a weight_map in"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "a-1.safetensors", "b": "b-2.safetensors"}}'
            ),
            "model.safetensors.index.json, found no a-1.safetensors, b-2.safetensors",
        ),
    ],
)
def test_an_incomplete_hugging_face_folder(tmp_path: Path, folder: Path, broken: Any, message: str) -> None:
    broken(folder)
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"'
    (problem,) = problems(config(tmp_path, toml))
    assert message in problem


def test_a_chat_template_of_its_own_file(tmp_path: Path, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"')) == []


def test_a_flavor_and_a_folder(tmp_path: Path, folder: Path) -> None:
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\nflavor = "8B"'))
    assert problem == 'model.flavor: expected "", because model.hf_assets_path is set, found "8B"'


GOOD = {"question": "1+1=", "answer": "2"}
CHAT = {"question": [{"role": "user", "content": "1+1="}], "answer": "2"}


@pytest.mark.parametrize(
    ("lines", "toml", "message"),
    [
        ([GOOD, "{"], "", "train.jsonl:2: expected a JSON object, found"),
        (
            [GOOD, {"question": "2", "reply": "3"}],
            "",
            "train.jsonl:2: expected task.answer_key = 'answer', found the col",
        ),
        ([{"text": "2", "answer": "3"}], "", "['answer', 'text']"),
        ([], "", "task.path: expected at least one row"),
        ([CHAT], "", 'task.template: expected "chat" for the messages in {}/train.jsonl:1, found "plain"'),
        (
            [GOOD, GOOD | {"answer": " "}],
            "[cold_start]\nsteps = 3",
            "cold_start.steps: expected 0, because {}/train.jsonl:2 has no answer",
        ),
        (
            [GOOD | {"answer": "two"}],
            'reward = "last_number"',
            'task.reward: expected a number in the answer of {}/train.jsonl:1, found "two"',
        ),
        ([GOOD, "", *[GOOD] * 100, "the last one"], "", "train.jsonl:103: expected a JSON object, found"),
    ],
)
def test_rows(tmp_path: Path, lines: list[Any], toml: str, message: str) -> None:
    train = rows(tmp_path / "train.jsonl", *lines)
    heldout = rows(tmp_path / "test.jsonl", GOOD)
    text = f'[task]\nname = "jsonl"\npath = "{train}"\neval_path = "{heldout}"\n{toml}'
    (problem,) = problems(config(tmp_path, text))
    assert message.replace("{}", str(tmp_path)) in problem


def test_good_rows(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", GOOD, "", *[GOOD] * 100)
    text = f'[task]\nname = "jsonl"\npath = "{train}"\nreward = "last_number"\n[cold_start]\nsteps = 3\n[eval]\nsize = '
    assert problems(config(tmp_path, text + "0")) == []
    (problem,) = problems(config(tmp_path, text + "8"))
    assert problem.startswith("task.eval_path: expected a JSONL or Parquet file for eval.size = 8")
    chat = rows(tmp_path / "chat.jsonl", CHAT)
    text = f'[task]\nname = "jsonl"\ntemplate = "chat"\npath = "{chat}"\n[eval]\nsize = 0'
    assert problems(config(tmp_path, text)) == []


def test_a_column_that_no_row_has_is_one_problem(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", *[GOOD] * 30)
    text = f'[task]\nname = "jsonl"\nanswer_key = "no"\nreward = "last_number"\npath = "{train}"\n[eval]\nsize = 0'
    (problem,) = problems(config(tmp_path, text))
    assert "train.jsonl:1: expected task.answer_key = 'no', found the columns ['answer', 'question']" in problem
    assert problem.endswith(", in all 30 rows alike")


def test_pairs_are_read_by_their_own_columns(tmp_path: Path) -> None:
    pair = {"question": "1+1=", "chosen": "2", "rejected": "3"}
    for name in ("dpo", "ipo", "reward_model"):
        text = f'[algorithm]\nname = "{name}"\n[eval]\nsize = 0\n[task]\nname = "jsonl"\npath = '
        good = text + f'"{rows(tmp_path / "good.jsonl", pair)}"'
        assert problems(config(tmp_path, good)) == []
        (problem,) = problems(config(tmp_path, text + f'"{rows(tmp_path / "bad.jsonl", pair, GOOD)}"'))
        assert "bad.jsonl:2: expected task.chosen_key = 'chosen', found the columns" in problem


def test_a_reward_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems(config(tmp_path, '[task]\nreward = "broken_reward:f"'))
    assert problem.endswith('expected "broken_reward:f" to import, found ZeroDivisionError: division by zero')


def test_the_reward_of_the_held_out_answers_decides_what_they_must_be(tmp_path: Path) -> None:
    words = rows(tmp_path / "words.jsonl", GOOD | {"answer": "two"})
    text = f'[task]\nname = "jsonl"\npath = "{words}"\neval_path = "{words}"\neval_reward = "last_number"'
    (problem,) = problems(config(tmp_path, text))
    assert problem.startswith(f"task.eval_reward: expected a number in the answer of {words}:1, found")


def test_training_rows_are_checked_if_evaluation_has_the_same_reward(tmp_path: Path) -> None:
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    train.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2", "answer": "two"}\n')
    heldout.write_text('{"prompt": "1", "answer": "1"}\n')
    text = (
        f'[task]\nname = "jsonl"\npath = "{train}"\neval_path = "{heldout}"\nreward = "number"\neval_reward = "number"'
    )
    (found,) = problems(config(tmp_path, text))
    assert found == f'task.reward: expected a number in the answer of {train}:2, found "two"'
