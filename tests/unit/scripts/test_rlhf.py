"""scripts/rlhf.py: its rule, pairs, configs, arguments and table. tests/system/test_rlhf.py runs the whole of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rlhf
from rlhf_rule import follows

from titan_rl.config.toml import load

SUBJECTS = rlhf.SUBJECTS.read_text(encoding="utf-8").split()
KEYS = ("chosen", "rejected")
ANSWERS = {
    subject: [
        f"The {subject} are here.",
        f"The {subject} are here.",
        "They are here.",
        f"{subject}! Look, there they are. And then they fly away to the",
    ]
    for subject in SUBJECTS
}


@pytest.mark.parametrize(
    ("completion", "parts"),
    [
        ("Cats chase mice.", 3),
        ("  A cat is a small hunter.\n", 3),
        ("They chase mice.", 2),
        ("Concatenation is an operation.", 2),  # its middle is not the subject
        ("Cats chase mice. They sleep.", 2),
        ("Cats chase mice", 2),
        ("Cats chase\nmice.", 2),
        ("Cats " + "and dogs " * 6 + "sleep.", 2),
        ("I cannot help! Sorry.", 1),
        ("", 0),
    ],
)
def test_the_rule_counts_its_parts(completion: str, parts: int) -> None:
    assert follows(completion, "cats") == parts / 3


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rlhf.write_prompts(tmp_path)
    rlhf.write_pairs(tmp_path, ANSWERS)
    rlhf.write_configs(tmp_path, "http://127.0.0.1:1/v1", "policy")
    return tmp_path


def test_pairs_are_in_the_order_of_the_rule_but_for_some_of_those_to_train_on(written: Path) -> None:
    wrong = dict[str, float]()
    for name in ("pairs", "heldout_pairs"):
        pairs = rows(written / f"{name}.jsonl")
        subjects = [pair["prompt"].split()[1] for pair in pairs]
        chosen, rejected = ([follows(pair[key], s) for pair, s in zip(pairs, subjects, strict=True)] for key in KEYS)
        assert all(a != b for a, b in zip(chosen, rejected, strict=True))
        wrong[name] = sum(a < b for a, b in zip(chosen, rejected, strict=True)) / len(pairs)
    assert wrong["heldout_pairs"] == 0
    assert 0.05 < wrong["pairs"] < 0.15


def test_no_held_out_subject_is_trained_on(written: Path) -> None:
    for column, trained, held_out in (
        ("question", "train", "heldout"),
        ("prompt", "pairs", "heldout_pairs"),
        ("question", "grades", "heldout_grades"),
    ):
        one, other = (
            {row[column].split("\n")[0] for row in rows(written / f"{name}.jsonl")} for name in (trained, held_out)
        )
        assert one
        assert other
        assert not one & other


def test_a_grade_is_what_the_judge_is_asked_for(written: Path) -> None:
    grade = next(row for row in rows(written / "grades.jsonl") if "They are here." in row["question"])
    subject = grade["question"].removeprefix("Grade this description of ").split()[0]
    assert grade["question"] == f"Grade this description of {subject} from 0 to 3.\n\nThey are here."
    assert grade["answer"] == "2"


def test_answers_that_the_rule_cannot_tell_apart_end_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rlhf.write_pairs(tmp_path, dict.fromkeys(SUBJECTS, ["the same"] * 4))
    assert ended.value.code == 1
    assert "expected answers that the rule tells apart, found none" in capsys.readouterr().err
    assert not (tmp_path / "pairs.jsonl").exists()


def test_the_policies_earn_the_reward_model_and_are_graded_by_the_rule(written: Path) -> None:
    for name in rlhf.ALGORITHMS:
        config = load(written / f"{name}.toml")
        assert config.algorithm.name == name
        assert config.algorithm.kl_coef > 0
        assert config.lora.rank > 0
        assert (config.task.reward, config.task.grader, config.task.eval_reward) == ("model", rlhf.RULE, rlhf.RULE)
        assert config.reward_model.hf_assets_path == f"{load(written / 'reward_model.toml').job.dump_folder}/hf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "unknown argument --nope"),
        (["--training.steps"], "--training.steps: expected a value, found none"),
        (["--training.step", "3"], "training.step"),
        (["--training.steps", "many"], "training.steps: expected"),
        (["--model.hf_assets_path", "fetch:gpt"], 'model.hf_assets_path: expected a folder or "fetch:smollm2"'),
        (["--judge-url", "http://127.0.0.1/v1"], "--judge-url, --judge-model: expected both or none"),
        (["--task.path", "x"], "--task.path: expected a key that all runs may share"),
        (["--judge-port", "0"], "--judge-port: expected a number from 1 to 65535, found 0"),
        (["--folder", "/dev/null/x"], "--folder: expected a folder that can be written"),
    ],
)
def test_a_bad_argument_has_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf.py", "--folder", str(tmp_path), *arguments])
    assert rlhf.main() == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def test_the_table_compares_the_ends_of_the_runs(tmp_path: Path) -> None:
    def metrics(name: str, lines: list[dict[str, Any]]) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    metrics("reward_model", [{"kind": "eval", "eval/score": 0.0}, {"kind": "fit", "eval/score": 0.8}])
    metrics("judge", [{"kind": "eval", "eval/score": 0.1}, {"kind": "fit", "eval/score": 0.7}])
    start, end = {"eval/score": 0.5, rlhf.JUDGED: 0.25}, {"eval/score": 0.75, rlhf.JUDGED: 0.625}
    steps = [{"kind": "rl", "reward/mean": step / 10, "kl/k3": step / 100} for step in range(8)]
    for name in rlhf.ALGORITHMS:
        metrics(name, [{"kind": "eval", **start}, *steps[:-1], steps[-1] | end])
        (tmp_path / name / "rollouts.jsonl").touch()
    first, second, _, _, grpo, ppo = "\n".join(rlhf.report(tmp_path, judged_here=True)).splitlines()
    assert first.startswith("reward model: 0.80 of the held-out pairs")
    assert second.startswith("judge: 0.70 of the held-out grades equal the rule's (0.10 before")
    assert " ".join(grpo.split()) == "grpo 0.100 -> 0.600 0.500 -> 0.750 0.250 -> 0.625 0.060 0"
    assert ppo.split()[1:] == grpo.split()[1:]
