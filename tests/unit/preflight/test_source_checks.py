"""The tables [task.sources.NAME] that no run can use."""

from pathlib import Path

import pytest

from support.checked_configs import config, rows
from titan_rl.config.data_sources import data_sources
from titan_rl.config.toml import load, to_toml
from titan_rl.preflight.checks import problems
from titan_rl.run import main

GOOD = {"question": "1+1=", "answer": "2"}


def sources(tmp_path: Path, toml: str, more: str = "") -> str:
    train = rows(tmp_path / "train.jsonl", GOOD)
    text = toml.replace("{train}", train).replace("{world}", str(tmp_path))
    return f'[eval]\nsize = 0\n{more}[task]\nname = "jsonl"\n{text}'


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[task.sources.a]\nweight = 2", 'task.sources.a.path: expected a JSONL or Parquet file, found ""'),
        ('[task.sources.a]\npath = "{train}"\nweight = 0', "task.sources.a.weight: expected a number > 0 and <="),
        (
            '[task.sources.a]\npath = "{train}"\nwieght = 1',
            "task.sources.a: there is no key \"wieght\"; did you mean 'weight'?",
        ),
        ('[task.sources."a b"]\npath = "{train}"', "task.sources: expected a name of letters, digits"),
        (
            'path = "{train}"\n[task.sources.a]\npath = "{train}"',
            "task.path: expected to be unset where task.sources is",
        ),
        (
            '[task.sources.a]\npath = "/no/such"',
            "task.sources.a.path: expected a JSONL or Parquet file, found none at '/no/such'",
        ),
        (
            '[task.sources.a]\npath = "{train}"\nanswer_key = "b"',
            "train.jsonl:1: expected task.sources.a.answer_key = 'b', found the columns ['answer', 'question']",
        ),
        ('[task.sources.a]\npath = "{train}"\nsystem_prompt = "add"', 'task.sources.a.system_prompt: expected "" with'),
        (
            'template = "chat"\n[task.sources.a]\npath = "{train}"\nchat_template = "{world}/none.jinja"',
            "task.sources.a.chat_template: expected a Jinja template or the path of a file with one, found",
        ),
        (
            'template = "chat"\n[task.sources.a]\npath = "{train}"\nchat_template_kwargs = {tools = 1}',
            "task.sources.a.chat_template_kwargs: expected variables of the template other than",
        ),
        (
            'template = "chat"\n[task.sources.a]\npath = "{train}"\nchat_template = "{{ nothing"',
            "train.jsonl:1: expected a prompt that the chat template accepts, found TemplateSyntaxError",
        ),
    ],
)
def test_a_source_that_no_run_can_use(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, sources(tmp_path, toml)))
    assert message in problem


def test_sources_are_for_files_only(tmp_path: Path) -> None:
    (problem,) = problems(config(tmp_path, '[task.sources.a]\npath = "a.jsonl"'))
    assert problem == 'task.sources: expected none with task.name = "addition", found ["a"]'


def test_later_turns_have_one_template(tmp_path: Path) -> None:
    toml = 'template = "chat"\nagent = "support.openai_agent:solve"\n[task.sources.a]\npath = "{train}"\n'
    own = toml + 'system_prompt = "add"\n'
    found = problems(config(tmp_path, sources(tmp_path, own)))
    assert not [problem for problem in found if problem.startswith("task.sources")]
    found = problems(config(tmp_path, sources(tmp_path, toml + "chat_template_kwargs = {style = 1}")))
    assert [p for p in found if p.startswith("task.sources.a.chat_template: expected none, because")]


def test_what_a_source_leaves_out_is_that_of_the_task(tmp_path: Path) -> None:
    other = rows(tmp_path / "other.jsonl", {"q": "1+1=", "answer": 2})
    toml = 'answer_key = "answer"\nprompt_key = "q"\n[task.sources.a]\npath = "{train}"\nprompt_key = "question"\n'
    found = config(tmp_path, sources(tmp_path, toml + f'[task.sources.b]\npath = "{other}"\nweight = 2\n'))
    assert problems(found) == []
    assert [(s.prompt_key, s.answer_key, s.weight) for s in data_sources(found.task)] == [
        ("question", "answer", 1.0),
        ("q", "answer", 2.0),
    ]
    (tmp_path / "again.toml").write_text(to_toml(found))
    assert load(tmp_path / "again.toml") == found


def test_a_table_within_a_source_is_read_from_a_flag(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    flag = '{a = {path = "x", chat_template_kwargs = {b = 1}}}'
    found = load(tmp_path / "run.toml", [("task.sources", flag)])
    assert data_sources(found.task)[0].chat_template_kwargs == {"b": 1}


def test_the_plan_says_what_is_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        sources(tmp_path, '[task.sources.a]\npath = "{train}"\n[task.sources.b]\npath = "{train}"\nweight = 2.5\n')
    )
    assert main(["--config", str(file), "--dry-run", "--job.dump_folder", str(tmp_path / "run")]) == 0
    assert "jsonl: 2 problems (a 1 x 1, b 1 x 2.5), 0 held out" in " ".join(capsys.readouterr().out.split())
