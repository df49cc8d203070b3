"""Checks of task.rewards, task.reward_args and task.grader."""

import json
from pathlib import Path

import pytest

from titan_rl.config.toml import load
from titan_rl.preflight.checks import problems

JUDGE = 'reward_args = {judge_url = "http://host/v1", judge_model = "m"}'


def found(tmp_path: Path, keys: str) -> list[str]:
    (tmp_path / "small.toml").write_text(f"[task]\n{keys}\n[eval]\nsize = 8\n")
    return problems(load(tmp_path / "small.toml"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "rewards = {exact = true}",
            "task.rewards: expected a number other than 0, at most 1e6 in size, as the weight of",
        ),
        ("rewards = {exact = 0}", "as the weight of 'exact', found 0"),
        ('rewards = {exact = "1"}', "as the weight of 'exact', found \"1\""),
        (
            'reward = "last_number"\nrewards = {exact = 1}',
            "task.reward: expected to be unset where task.rewards is set",
        ),
        ("rewards = {exat = 1}", 'task.rewards: expected "exact", "last_number"'),
        ("rewards = {model = 1}", 'task.rewards: expected a reward other than "model", which has its own mesh'),
        (
            'grader = "model"',
            'task.grader: expected a reward other than "model", because a reward model cannot measure',
        ),
        ('grader = "no_such:f"', "task.grader = 'no_such:f': No module named 'no_such'"),
        ('reward = "length"', "task.reward_args: expected longest to be an integer, found none"),
        (
            'reward = "length"\nreward_args = {longest = 0}',
            "task.reward_args: expected longest to be at least 1, found 0",
        ),
        (
            'reward = "regex"\nreward_args = {pattern = "("}',
            "expected pattern to be a regular expression, found missing )",
        ),
        ('reward = "regex"\nreward_args = {patern = "x"}', "expected keys among pattern, found 'patern'; did you mean"),
        (
            "reward_args = {longest = 3}",
            "expected keys among none, because no verifier in use takes any, found 'longest'",
        ),
        (
            'reward = "regex"\nreward_workers = 0',
            'task.reward_workers: expected at least 1 for "regex", which may hang',
        ),
        (
            'grader = "json_schema"\nreward_args = {schema = "{"}',
            "expected schema to be a JSON schema or a file, found",
        ),
        (
            'grader = "json_schema"\nreward_args = {schema = "/no/such"}',
            "expected schema to be a JSON schema or a file",
        ),
        (
            'grader = "format"\nreward_args = {tags = "a b"}',
            "expected tags to be names such as think,answer, found 'a b'",
        ),
        ('grader = "judge"', "task.reward_args: expected judge_url to be a string, found none"),
        (
            f'reward = "judge_group"\n{JUDGE}',
            'task.eval_reward: expected a reward for the held-out answers, because "judge_group" compares',
        ),
        (
            f'eval_reward = "judge_group"\n{JUDGE}',
            'task.eval_reward: expected a reward for the held-out answers, because "judge_group" compares',
        ),
        (
            f'grader = "judge_group"\n{JUDGE}\n[rollout]\ngroup_size = 1\n[algorithm]\nname = "reinforce_pp"',
            'rollout.group_size: expected at least 2, because task.grader = "judge_group" compares answers, found 1',
        ),
        (
            'grader = "judge"\nreward_args = {judge_url = "host", judge_model = "m"}',
            "expected judge_url to be a URL such as http://HOST/v1, found 'host'",
        ),
        (
            'grader = "judge"\nreward_args = {judge_url = "http://h/v1", judge_model = "m", judge_key = "NO_KEY_1"}',
            "expected the environment to have judge_key = 'NO_KEY_1', found none",
        ),
    ],
)
def test_one_problem_of_rewards(tmp_path: Path, keys: str, message: str) -> None:
    (problem,) = found(tmp_path, keys)
    assert message in problem


@pytest.mark.parametrize(
    "keys",
    [
        'rewards = {exact = 1, last_number = -0.5}\ngrader = "number"',
        'rewards = {regex = 1, format = 0.1}\nreward_args = {pattern = "^a", tags = "think"}\neval_reward = "exact"',
        f'grader = "judge"\n{JUDGE}',
        f'reward = "judge_group"\neval_reward = "exact"\n{JUDGE}',
        'grader = "json_schema"\nreward_args = {schema = "{}"}',
    ],
)
def test_no_problem_of_rewards(tmp_path: Path, keys: str) -> None:
    assert found(tmp_path, keys) == []


@pytest.mark.parametrize("prompt", ["Hi", [{"role": "user", "content": "Hi"}]])
def test_a_reward_of_trl_gets_messages_of_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "polite.py").write_text(
        "def f(prompts, completions, **columns):\n"
        "    return [float((p[-1]['content'], c[0]['content']) == ('Hi', 'yes')) for p, c in zip(prompts, completions)]"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": prompt, "answer": "yes"}) + "\n")
    keys = f'name = "jsonl"\npath = "{tmp_path}/rows.jsonl"\neval_path = "{tmp_path}/rows.jsonl"\ntemplate = "chat"\n'
    assert not [each for each in found(tmp_path, keys + 'reward = "polite:f"') if "polite" in each]
