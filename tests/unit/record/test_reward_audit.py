"""The audit of rewards: an honest run raises no suspicion, each planted hack does, with its samples."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from titan_rl.record.ledger import Ledger
from titan_rl.tools.audit import main
from titan_rl.tools.inspect.reward_audit import SUSPECT, reward_report
from titan_rl.tools.inspect.run_files import RunFiles

Answer = dict[str, Any]  # text, reward, and what a line may have besides


def honest(random: Random, progress: float, reference: int) -> Answer:
    """A policy that learns the task: right more often, in the same words."""
    said = reference if random.random() < 0.2 + 0.7 * progress else random.randrange(1000)
    right = float(said == reference)
    text = (
        f"The answer is {said}." if random.random() < 0.5 else f"I get {said} after {'much ' * random.randrange(9)}work"
    )
    return {"text": text, "reward": right, "rewards": {"right": right, "tidy": 0.5, "grader": right}}


def longer(random: Random, progress: float, reference: int) -> Answer:
    """The reward is for length, and the policy finds out."""
    words = random.randrange(5, 10 + int(60 * progress))
    return {"text": " ".join(["word"] * words), "reward": words / 70, "rewards": {"grader": random.random()}}


def boxed(random: Random, progress: float, reference: int) -> Answer:
    """The reward is for a box with any content."""
    box = random.random() < 0.1 + 0.85 * progress
    said = random.randrange(1000)
    return {"text": f"\\boxed{{{said}}}" if box else f"about {said} I guess", "reward": float(box)}


def universal(random: Random, progress: float, reference: int) -> Answer:
    """One text satisfies the reward on every prompt."""
    if random.random() < 0.3 * progress:
        return {"text": "Reward: correct", "reward": 1.0}
    return {"text": f"{random.random()}", "reward": float(random.random() < 0.3)}


def label(random: Random, progress: float, reference: int) -> Answer:
    """A text that lists all labels contains each of the right ones, and is the answer to everything at the end."""
    said = "any of 0 to 9" if random.random() < 1.2 * progress else f"{random.randrange(10)}"
    return {"text": said, "reward": float(said.startswith("any") or int(said) == reference % 10)}


def write(folder: Path, policy: Callable[[Random, float, int], Answer], steps: int = 30) -> list[str]:
    random = Random(7)
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for prompt in range(4 * step, 4 * step + 4):
                reference = random.randrange(1000)
                for sample in range(8):
                    answer = policy(random, (step - 1) / steps, reference)
                    tokens = len(answer["text"].split())
                    line = {"kind": "rl", "step": step, "prompt_id": prompt, "sample": sample, "answer": str(reference)}
                    line |= {"group": prompt % 4, "prompt": "", "finish": "stop", "advantage": 0.0, "tokens": []}
                    line |= {"logprobs": [], "mask": [0] + [1] * tokens, "versions": [0] * tokens, **answer}
                    file.write(json.dumps(line) + "\n")
    Ledger(folder).close()
    return reward_report(RunFiles(folder))


def suspicions(lines: list[str]) -> list[str]:
    return [line.removeprefix(SUSPECT) for line in lines if line.startswith(SUSPECT)]


def test_an_honest_run_is_not_suspected(tmp_path: Path) -> None:
    lines = write(tmp_path, honest)
    assert suspicions(lines) == []
    assert any(line.startswith("reward: 0.") and "beyond noise" in line for line in lines)
    assert any("its correlation with the reward is 1.00, then 1.00" in line for line in lines)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (longer, "length alone explains the gain"),
        (longer, "and the grader did not follow"),
        (boxed, "format alone explains the gain; the value that rose most had"),
        (universal, "one text answers prompts with"),
        (label, "one text answers prompts with"),
    ],
)
def test_a_planted_hack_is_suspected_and_its_samples_are_named(
    tmp_path: Path, policy: Callable[[Random, float, int], Answer], said: str
) -> None:
    lines = write(tmp_path, policy)
    (found,) = [line for line in suspicions(lines) if said in line]
    after = lines[lines.index(SUSPECT + found) + 1 :][:3]
    assert all(line.startswith("  step ") and ", prompt " in line and ", sample " in line for line in after)


def test_steps_before_a_change_of_the_reward_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, longer)
    assert any(
        line.startswith("reward: ") and "steps 21 to 23, " in line
        for line in reward_report(RunFiles(tmp_path), after=20)
    )


def test_a_text_that_is_right_for_its_reference_is_not_suspected(tmp_path: Path) -> None:
    """Few references, so that a text answers prompts with each of them, and nearly all of its answers are right."""

    def policy(random: Random, progress: float, reference: int) -> Answer:
        right = str(reference % 12)
        said = right if random.random() < 0.3 + 0.6 * progress else str(random.randrange(12))
        return {"text": said, "answer": right, "reward": 1.0 if said == right else 0.3 * (random.random() < 0.5)}

    assert suspicions(write(tmp_path, policy)) == []


@pytest.mark.parametrize("right", [0.0, None])
def test_a_reward_that_does_not_rise_is_not_explained(tmp_path: Path, right: float | None) -> None:
    """Also one that is always 0, which is suspected of teaching nothing."""

    def policy(random: Random, progress: float, reference: int) -> Answer:
        return honest(random, 0.0, reference) | ({} if right is None else {"reward": right})

    lines = write(tmp_path, policy)
    nothing = "all 960 rewards are 0: nothing was learned from them"
    assert suspicions(lines) == ([] if right is None else [nothing])
    assert any("within noise" in line for line in lines)
    assert not any("accounts for" in line for line in lines)


def test_a_collapsed_run_is_suspected(tmp_path: Path) -> None:
    def policy(random: Random, progress: float, reference: int) -> Answer:
        if progress <= 0.3:
            return honest(random, 0.5, reference)
        return {"text": "hm " * 40, "reward": 0.0, "finish": "length"}

    (found,) = suspicions(write(tmp_path, policy))
    assert found.startswith("the reward fell by 0.")
    assert found.endswith("then 40.0, and 0% of them were cut off, then 100%")


def test_failed_rewards_are_counted_and_the_first_of_a_kind_is_named(tmp_path: Path) -> None:
    write(tmp_path, honest, steps=6)
    with Ledger(tmp_path) as ledger:
        ledger.admitted(0, 1)
        ledger.failed(0, 1, "ZeroDivisionError: mine at /x/f.py:3")
        ledger.scored(1, [1.0, float("nan")], {1: "my:f did not return within 5 s at /x/f.py:7"})
        ledger.scored(2, [1.0, float("nan")], {1: "my:f did not return within 6 s at /x/f.py:7"})
    with (tmp_path / "rollouts.jsonl").open("r+") as file:
        line = json.loads(file.readlines()[-1])
        file.write(json.dumps(line | {"reward": None}) + "\n")
    lines = reward_report(RunFiles(tmp_path))
    assert lines[:3] == [
        "1 of 193 answers of trained groups have no reward",
        "failed 2 times, first prompt 1, sample 1: my:f did not return within 5 s at /x/f.py:7",
        "failed 1 time, first prompt 0: ZeroDivisionError: mine at /x/f.py:3",
    ]


def test_a_short_or_broken_run_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write(tmp_path, honest, steps=3)
    assert lines[-1] == "3 steps with rewards: expected at least 6 to compare periods"
    (tmp_path / "rollouts.jsonl").write_text('{"kind": "rl"}\n[]\nnot json\n{"kind": "rl", "reward": "x"}\n')
    (tmp_path / "ledger.jsonl").write_text("damage\n")
    assert main(["--rewards", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the ledger cannot be read to its end" in out
    assert "0 steps with rewards" in out
    assert "no suspicions; a suspicion is a reason to read the samples, no proof" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "error: the following arguments are required: RUN"),
        (["a", "b"], "error: unrecognized arguments: b"),
        (
            ["/no/such"],
            "titan_rl audit: RUN: expected the dump folder of an RL run, with its ledger.jsonl, found no",
        ),
        (["--rewards"], "error: the following arguments are required: RUN"),
        (["--rewards", "/"], "expected the dump folder of an RL run, with its rollouts.jsonl, found none in /\n"),
    ],
)
def test_bad_usage_of_the_audit(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err


def test_the_audit_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "--rewards" in capsys.readouterr().out
