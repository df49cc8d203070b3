from pathlib import Path

from support.checked_configs import config, edit, rows
from titan_rl.preflight.checks import problems, warnings


def test_a_whole_hugging_face_folder(tmp_path: Path, folder: Path) -> None:
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"')) == []


def test_a_chat_template_of_its_own_file(tmp_path: Path, folder: Path) -> None:
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"'
    edit(folder / "tokenizer_config.json", chat_template=None)
    (problem,) = problems(config(tmp_path, toml))
    assert problem.startswith('task.template: expected "plain"')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(config(tmp_path, toml)) == []


def test_an_end_of_sequence_beyond_the_vocabulary(tmp_path: Path, folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 99])
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"'))
    expected = "model.hf_assets_path: expected an eos_token_id of the model's vocabulary, 0 to 63, found 99"
    assert problem.startswith(expected)


GOOD = {"question": "1+1=", "answer": "2"}
CHAT = {"question": [{"role": "user", "content": "1+1="}], "answer": "2"}


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


def test_training_rows_as_held_out_rows_and_few_rows_are_warned_of(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    text = f'[task]\nname = "jsonl"\npath = "{rows}"\neval_path = "{tmp_path}/../{tmp_path.name}/rows.jsonl"\n'
    same, few = warnings(config(tmp_path, text + "[eval]\nsize = 1\n[rollout]\ngroups_per_step = 8"))[:2]
    assert same.startswith("task.eval_path: expected rows that are not trained on, found the training rows in ")
    assert few == "task.path: 1 row for the 8 prompts of a step, which then has each several times"
