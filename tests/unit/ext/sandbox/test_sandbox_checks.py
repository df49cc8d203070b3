"""Refusals of [sandbox] before a run starts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.config.toml import ConfigError
from titan_rl.ext.sandbox import checks
from titan_rl.ext.sandbox.checks import problems as check_sandbox
from titan_rl.ext.sandbox.checks import used_by
from titan_rl.preflight.checks import problems
from titan_rl.preflight.checks.task import check_task


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            'require = ["namespaces", "landlok"]',
            "sandbox.require: expected some of namespaces, landlock, seccomp, found landlok",
        ),
        (
            'require = ["namespaces"]',
            'sandbox.require: expected "seccomp", and "namespaces" or "landlock" or both, found namespaces',
        ),
        (
            "require = []",
            'sandbox.require: expected "seccomp", and "namespaces" or "landlock" or both, found none',
        ),
        (
            'cgroup = "/no/such"',
            "sandbox.cgroup: expected the folder of a cgroup v2, found '/no/such' (No such file or directory)",
        ),
        ("memory_mb = 4194304", "sandbox.memory_mb: expected at most "),
    ],
)
def test_a_weak_or_impossible_sandbox_is_refused(toml: str, message: str, tmp_path: Path) -> None:
    (found,) = problems(config(tmp_path, f"[sandbox]\n{toml}"))
    assert found.startswith(message)


def test_numbers_have_limits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[sandbox\] memory_mb: expected an integer >= 32 and <= 4194304, found 0"):
        config(tmp_path, "[sandbox]\nmemory_mb = 0")


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ('[environment]\nname = "titan_rl.ext.sandbox.code_tools:CodeTools"', "environment.name"),
        ('[task]\nreward = "titan_rl.ext.sandbox.code_tests:code_tests"', "task.reward"),
        ('[task]\nreward = "code_tests"', "task.reward"),
        ("[task]\nrewards = {exact = 1.0, code_tests = 0.5}", "task.rewards"),
        ('[task]\ngrader = "code_tests"', "task.grader"),
        ('[eval.sets.code]\nreward = "code_tests"', "eval.sets"),
        ('[task]\neval_reward = "uses_sandbox:reward"', "task.eval_reward"),
        ('[task]\nagent = "a_package.of_mine:run"', "task.agent"),
        ('[task]\nreward = "plain:reward"', ""),
        ("", ""),
    ],
)
def test_a_missing_layer_is_refused_where_code_uses_the_sandbox(
    toml: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uses_sandbox.py").write_text("from titan_rl.ext.sandbox.local import shared")
    (tmp_path / "plain.py").write_text("")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "of_mine.py").write_text("import titan_rl.ext.sandbox.code_tools")
    monkeypatch.syspath_prepend(tmp_path)
    asked = []

    def missing(section: object) -> Iterator[str]:
        asked.append(section)
        yield "seccomp: none"

    monkeypatch.setattr(checks, "missing", missing)
    checked = config(tmp_path, toml)
    assert used_by(checked) == key
    refused = [f"sandbox.require: {key} runs code in the sandbox, which is refused here: seccomp: none"]
    assert list(check_sandbox(checked)) == (refused if key else [])
    assert len(asked) == bool(key)


def test_this_machine_has_what_is_required(tmp_path: Path) -> None:
    checked = config(tmp_path, '[environment]\nname = "titan_rl.ext.sandbox.code_tools:CodeTools"')
    assert list(check_sandbox(checked)) == []


def test_rows_that_test_nothing_are_refused(tmp_path: Path) -> None:
    tests = ["assert f(3) == 6", "def test_f(): assert f(3) == 6"]
    rows = [json.dumps({"prompt": "Double it.", "answer": "", "tests": each}) for each in tests]
    for name, lines in (("good", rows[:1]), ("bad", rows)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    toml = '[task]\nname = "jsonl"\npath = "{}.jsonl"\nreward = "code_tests"\ntemplate = "chat"\n[eval]\nsize = 0'
    found = {name: list(check_task(config(tmp_path, toml.format(tmp_path / name)))) for name in ("good", "bad")}
    assert found["good"] == []
    (line,) = found["bad"]
    assert 'bad.jsonl:2: "code_tests" expects tests that an empty program fails' in line
