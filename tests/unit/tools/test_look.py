"""`python -m titan_rl look` shows samples of written runs as a person reads them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.chat_folders import chat_folder
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.record.evaluation import STORED_CHARACTERS, STORED_PROBLEMS, Answer, Evaluation
from titan_rl.record.run_log import RunLog
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.sample_view import number
from titan_rl.tools.look import main
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn


def rollout(text: str, reward: float = 0.0, *, finish: Any = "stop", version: int = 0, **more: Any) -> Rollout:
    tokens = [characters.VOCABULARY[c] for c in text if c in characters.VOCABULARY]
    completion = Completion(tokens, [-0.5] * (len(tokens) - 1) + [-5.0], [version] * len(tokens), finish)
    return Rollout([Branch([Turn([1, 8, 9], completion)])], text, reward, advantage=reward - 0.5, **more)


CALL = {"function": {"name": "multiply", "arguments": '{"a": 2}'}, "id": "1"}
TALK = [
    {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "84"},
    {"role": "assistant", "content": "it is 84"},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    characters.build(tmp_path / "model")
    with RunLog(tmp_path, "tiny", Config()) as log:
        for step in (1, 2, 3):
            first = [rollout("good", 1.0, parts={"exact": 1.0}), rollout("bad\x1b[31m\ud800", version=step - 1)]
            second = [rollout("it is 84", 1.0, messages=TALK), rollout("so long", finish="length")]
            failed = rollout("", math.nan, unrewarded="ZeroDivisionError: division by zero")
            groups = [
                Group(Prompt(10 * step + k, "12+34=", [1, 8, 9], "640"), g) for k, g in enumerate((first, second))
            ]
            groups[1].rollouts.append(failed)
            log.step(step, {"reward/mean": 0.5}, {}, groups)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    found = main([str(each) for each in arguments])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out + err


def test_without_flags_it_shows_a_good_and_a_bad_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run)
    assert "step 3, the last: reward 0.50" in out
    assert "reward 1.00 (exact 1.00) · advantage 0.50\n4 tokens · stopped · policy age 2\nexpected 640\n" in out
    assert "prompt\n  12+34=\nassistant\n  good\n" in out
    assert r"bad\x1b[31m\ud800" in out
    assert "\x1b" not in out
    assert out.count("── step") == 2


@pytest.mark.parametrize(
    ("flags", "samples"),
    [
        ("--step first --limit 9", ["1.10.0", "1.10.1", "1.11.0", "1.11.1", "1.11.2"]),
        ("--step 1-2 --sort best --limit 2", ["1.10.0", "1.11.0"]),
        ("--sort worst --limit 1", ["3.30.1"]),
        ("--sort longest --limit 1", ["3.31.0"]),
        ("--sort off-policy --limit 2", ["3.30.0", "3.31.0"]),
        ("--prompt 21 --limit 1", ["2.21.0"]),
        ("--failed", ["3.31.2", "2.21.2", "1.11.2"]),
        ("--cut-off --step 2", ["2.21.1"]),
        ("--search multiply --limit 2", ["3.31.0", "2.21.0"]),
        ("--search /^s.*g$/ --step 1", ["1.11.1"]),
        ("--prompt 30 --group", ["3.30.0", "3.30.1"]),
    ],
)
def test_flags_select_samples(run: Path, capsys: pytest.CaptureFixture[str], flags: str, samples: list[str]) -> None:
    lines = shown(capsys, run, "--json", *flags.split()).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [f"{each['step']}.{each['prompt_id']}.{each['sample']}" for each in found] == samples


def test_players_are_named_and_a_game_is_won_by_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def game(white: float) -> Rollout:
        said = [
            {"role": "assistant", "content": "e4", "name": "white"},
            {"role": "assistant", "content": "e5", "name": "b"},
        ]
        turns = [Turn([3], Completion([4], [-1.0], [0], "stop"), 0.0, i, seat) for i, seat in enumerate(("white", "b"))]
        seats = {"white": white, "b": -white, "judge": None}
        return Rollout([Branch([each]) for each in turns], "e5", 0.0, messages=said, seats=seats)

    characters.build(tmp_path / "model")
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.step(1, {"reward/mean": 0.0}, {}, [Group(Prompt(0, "", [3], ""), [game(-1.0), game(1.0), game(0.0)])])
    out = shown(capsys, tmp_path)
    assert "reward 0.00 · white 1.00, b -1.00, judge frozen" in out
    assert "2 turns · 2 players · policy age" in out
    assert "assistant white\n  e4\nassistant b\n  e5" in out
    assert [line.split(", ")[2].split()[1] for line in out.splitlines() if line.startswith("── step")] == ["1", "0"]


def test_turns_with_tools_groups_and_tokens_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, run, "--prompt", 31, "--group")
    assert "── step 3, prompt 31: 3 samples, mean reward 0.50 " in out
    row = next(line for line in out.splitlines() if "multiply" in line)
    assert " ".join(row.split()) == '0 1.00 0.50 8 2 let me see -> multiply({"a": 2}) | it is 84'
    assert 'assistant\n  let me see\n  -> multiply({"a": 2})\ntool multiply\n  84\nassistant\n  it is 84\n' in out
    assert "cut off at max_new_tokens" in out
    assert "no reward\n" in out
    assert "failed: ZeroDivisionError" in out
    assert "<s>12⟦goo" in shown(capsys, run, "--prompt", 30, "--tokens", "--limit", 1)
    assert "d{0.0067}" in shown(capsys, run, "--prompt", 30, "--tokens", "--limit", 1)


def test_lines_fit_the_columns(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(run, "tiny", Config(), resume_step=3) as log:
        said = rollout("word " * 100, 1.0, parts={"format": 0.5})
        log.step(4, {}, {}, [Group(Prompt(1, "x" * 300, [1], "y" * 200), [said, rollout("no")])])
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = shown(capsys, run, "--group")
        assert max(map(len, out.splitlines())) <= columns
        assert out.count("word") >= 100


@pytest.mark.parametrize(("name", "control"), [("qwen3", "<|im_start|>"), ("header", "<|head|>"), ("phi3", "<|user|>")])
def test_chats_are_shown_without_control_tokens_and_system_prompts_are_folded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, control: str
) -> None:
    folder = chat_folder(tmp_path / "hf", name)
    tokenizer = TextTokenizer.load(folder)
    messages = [{"role": "system", "content": "rule\n" * 9 + "last rule"}, {"role": "user", "content": "user\nhello"}]
    tokens = tokenizer.chat.prompt(messages)
    prompt = Prompt(0, tokenizer.decode(tokens, skip_special=False), tokens, "hi", messages=messages)
    sampled = Completion([*tokenizer.encode("hi"), tokenizer.eos], [0.0] * 99, [0] * 99, "stop")
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.step(1, {}, {}, [Group(prompt, [Rollout([Branch([Turn(tokens, sampled)])], "hi", 1.0)])])
    out = shown(capsys, tmp_path)
    assert "<|" not in out
    assert "system\n  " in out
    assert "  rule\n  rule\n  ... " in out
    assert "user\n  user\n  hello\nassistant\n  hi\n" in out
    assert "last rule" in shown(capsys, tmp_path, "--full")
    assert control in shown(capsys, tmp_path, "--tokens")


def test_answers_of_evaluations_are_stored_within_bounds_and_superseded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = {i: Prompt(i, f"{i}+1=", [1], str(i + 1), where=f"rows.jsonl:{i}") for i in range(100)}
    answers = {i: [Answer(1.0, tokens=3, rollout=rollout(f"answer {i}"))] for i in prompts}
    answers[99] = [Answer(math.nan, "it hung", 3, rollout=rollout("x" * 2 * STORED_CHARACTERS))]
    evaluation = Evaluation("hard", answers, 1.0, prompts)
    with RunLog(tmp_path, "tiny", Config()) as log:
        for step in (2, 4):
            log.evaluations(step, [evaluation])
    with RunLog(tmp_path, "tiny", Config(), resume_step=3):
        pass
    (line,) = [json.loads(line) for line in (tmp_path / "evaluation_answers.jsonl").read_text().splitlines()]
    assert (line["step"], line["set"], line["left_out"]) == (2, "hard", 100 - STORED_PROBLEMS - 1)
    assert len(line["problems"][-1]["answers"][0]["text"]) < STORED_CHARACTERS + 100
    out = shown(capsys, tmp_path, "--evaluation", "--limit", 1)
    assert "── hard at step 2, problem 0, sample 0 " in out
    assert "3 tokens · stopped · row rows.jsonl:0\nexpected 1\nprompt\n  0+1=\nassistant\n  answer 0\n" in out
    assert "35 answers of these evaluations are not stored" in out
    (failed,) = shown(capsys, tmp_path, "--evaluation", "hard", "--failed", "--json").splitlines()[:1]
    assert json.loads(failed).items() >= {"prompt_id": 99, "error": "it hung", "reward": None}.items()


def test_what_cannot_be_shown_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "found no folder" in shown(capsys, tmp_path / "none", code=2)
    assert "expected N, first, last or A-B" in shown(capsys, run, "--step", "x", code=2)
    assert "a step from 1 to 3" in shown(capsys, run, "--step", "9", code=2)
    assert "a regular expression" in shown(capsys, run, "--search", "/(/", code=2)
    assert "found none" in shown(capsys, run, "--evaluation", code=1)
    assert "no sample matches" in shown(capsys, run, "--search", "zebra", code=1)
    with RunLog(tmp_path / "sft", "tiny", Config(algorithm=AlgorithmSection(name="sft"))) as log:
        log.fit(1, {"loss": 1.0})
    assert "the algorithm sft samples no rollouts; metrics.jsonl has its 1 steps" in shown(
        capsys, tmp_path / "sft", code=1
    )
    (run / "rollouts.jsonl").write_bytes(b'\xff\xfe garbage\n{"kind":"rl","step":7,"prompt_id":"x"}\n')
    assert "2 damaged lines" in shown(capsys, run, code=1)


@pytest.mark.parametrize(("value", "text"), [(-0.0, "0.00"), (-0.001, "-0.001"), (1.25, "1.25"), (None, "none")])
def test_numbers_have_no_negative_zero(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_chat_of_several_turns_is_shown_once_with_the_tools_that_its_policy_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = TextTokenizer.load(chat_folder(tmp_path / "hf", "qwen3"))
    question = [{"role": "user", "content": "2 times 42?"}]
    schema = {"name": "multiply", "description": "of two numbers", "parameters": {"type": "object", "properties": {}}}
    tokens = tokenizer.chat.prompt(question, [{"type": "function", "function": schema}])
    bare = tokenizer.chat.prompt(question)  # the prompt of the task has no tools

    def turn(index: int, read: list[int]) -> Turn:
        said = [*tokenizer.encode("hm"), tokenizer.eos]
        return Turn(read, Completion(said, [0.0] * len(said), [0] * len(said), "stop"), index=index)

    branch = Branch([turn(0, tokens), turn(1, tokenizer.encode("84"))])
    played = Rollout([branch], "it is 84", 1.0, messages=[*question, *TALK])
    prompt = Prompt(0, tokenizer.decode(bare, skip_special=False), bare, "84", messages=question)
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.step(1, {}, {}, [Group(prompt, [played])])
        answer = Answer(1.0, tokens=4, rollout=played)
        log.evaluations(1, [Evaluation("", {0: [answer]}, 1.0, {0: prompt})])
    out = shown(capsys, tmp_path, "--full")
    assert "multiply" in out[: out.index("2 times 42?")]
    said = out[out.index("user\n") :]
    turns = 'assistant\n  let me see\n  -> multiply({"a": 2})\ntool multiply\n  84\nassistant\n  it is 84\n'
    assert said == f"user\n  2 times 42?\n{turns}"
    assert shown(capsys, tmp_path, "--evaluation").endswith(f"user\n  2 times 42?\n{turns}")
