"""check_env: the arguments it takes and refuses, and its report of the rollouts."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.chat_folders import chat_folder
from titan_rl.ext.agents.random_policy import RandomPolicy, tools_in
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.check_env import Rehearsal, config_of, facts, main, parser, table
from titan_rl.tools.refused_input import UsageError
from titan_rl.wire.types import Branch, Completion, Request, Rollout, Sampling, Turn


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["no_such:Thing"], "environment.name = 'no_such:Thing': ModuleNotFoundError: No module named 'no_such'"),
        (["calk"], "environment.name: expected \"package.module:name\", found 'calk'"),
        ([], "NAME: expected an environment, or --config with one, found none"),
        (["--config", "grpo_llama"], "NAME: expected an environment, because grpo_llama has none, found none"),
        (["calc", "--config", "no_such"], "--config: expected a TOML file or a shipped config"),
        (["calc", "--environment.max_turns", "0"], "--environment.max_turns: expected an integer >= 1"),
        (["calc", "--rollout"], "unknown argument --rollout"),
        (["calc", "--install", "thing"], "--install: expected --environment.python with the folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("titan_rl.tools.check_env.in_own_network", lambda prog, config, work: work(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"titan_rl check_env: {why}")


@pytest.mark.parametrize("count", ["0", "-1", "x", "4097"])
def test_a_number_of_rollouts_that_is_none_is_refused(count: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["calc", "--rollouts", count])
    assert ended.value.code == 2


def test_a_name_is_an_environment_or_an_agent_and_a_config_may_have_it() -> None:
    def named(*argv: str) -> tuple[str, str, str]:
        config = config_of(parser().parse_args(argv), [])
        return config.environment.name, config.task.agent, config.task.name

    assert named("hunt") == ("hunt", "", "hunt")
    assert named("my:Thing") == ("my:Thing", "", "jsonl")
    assert named("my:run", "--agent") == ("", "my:run", "jsonl")
    assert named("verifiers:gsm8k") == ("", "verifiers:gsm8k", "jsonl")
    assert named("--config", "calc_agent_llama") == ("", "titan_rl.ext.agents.calc_agent:run", "calc")
    with pytest.raises(UsageError, match="base"):
        config_of(parser().parse_args(["hunt"]), [("base.x", "1")])


def sampled(policy: RandomPolicy, read: list[int], seed: int, most: int = 40) -> Completion:
    (completion,) = asyncio.run(policy.generate(Request("r", read, [seed], Sampling(most))))
    return completion


def test_the_random_policy_repeats_itself_and_says_no_control_token(text: TextTokenizer) -> None:
    tokenizer, policy = text, RandomPolicy(text, chat=False)
    read = tokenizer.encode("go up or down")
    said = [sampled(policy, read, seed).tokens for seed in range(60)]
    assert said == [sampled(policy, read, seed).tokens for seed in range(60)]
    assert all(tokens[-1] == tokenizer.eos and not tokenizer.control_ids & {*tokens[:-1]} for tokens in said)
    texts = {tokenizer.decode(tokens[:-1]) for tokens in said}
    assert len(texts) > 30
    assert texts & {"up", "down", "go", "or"}
    assert texts & set("0123456789")
    short = sampled(policy, read, 0, most=1)
    assert (len(short.tokens), short.finish) == (1, "length" if said[0][1:] else "stop")


def test_the_random_policy_calls_the_tools_that_it_reads_of(tmp_path: Path) -> None:
    chat_folder(tmp_path, "hermes")
    tokenizer = TextTokenizer.load(tmp_path)
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}]
    read = tokenizer.chat.prompt([{"role": "user", "content": "Hello"}], tools)
    assert tools_in(tokenizer.decode(read, skip_special=False)) == [tools[0]["function"]]
    policy = RandomPolicy(tokenizer, chat=True)
    calls = []
    for seed in range(40):
        said = sampled(policy, read, seed, most=200)
        try:
            calls += tokenizer.chat.parse(said.tokens, tools).get("tool_calls", ())
        except ValueError:  # a random answer may be half of a call
            continue
    assert {(call["function"]["name"], call["function"]["arguments"]) for call in calls} == {("add", '{"n": 1}')}


def rollout(reward: float = 1.0, **more: Any) -> Rollout:
    branch = Branch([Turn([1, 3], Completion([9, 2], [0.0, 0.0], [0, 0], "stop"))])
    return Rollout([branch, *more.pop("others", ())], "", reward, **more)


def test_what_is_wrong_is_said_once_each(text: TextTokenizer) -> None:
    config = config_of(parser().parse_args(["hunt"]), [("model.hf_assets_path", str(text.folder))])
    setup: Any = SimpleNamespace(config=config, tokenizer=text)
    failed = [rollout(float("nan"), status="error", error="ValueError: no (a.py:3)") for _ in range(2)]
    metrics = {"tools/add/calls": 3.0, "tools/add/failures": 1.0, "seconds": 0.5}
    played = [rollout(metrics=metrics), rollout(others=[Branch([])]), *failed]
    assert list(facts(setup, Rehearsal(played, 2.0, False, 3))) == [
        "tools      add 3 calls, 1 failed",
        "speed      4 rollouts, 4 turns in 2.00 s, in 2 processes",
        "capacity   2 processes x 128 rollouts; a run has up to 256 in flight; its server takes 3 of them",
        "repeats    no: the first rollout, played again, was another: after a lost process its turns are sampled again",
        "wrong: 2 of 4 rollouts failed: ValueError: no (a.py:3)",
        "wrong: environment.concurrency: its server takes 3 sessions, 4 rollouts were played",
        "wrong: model.hf_assets_path: 4 of 8 tokens that are read stand for characters without a token",
        "wrong: 1 of 4 rollouts began branches: earlier text was changed, and is read again",
    ]
    assert table(played).row_count == 4


def test_tools_that_the_template_does_not_write_are_named_as_a_dry_run_names_them(
    text: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_rl.preflight.checks.task.chat_warnings", lambda config: ["the policy cannot know add"])
    setup: Any = SimpleNamespace(config=config_of(parser().parse_args(["hunt"]), []), tokenizer=text)
    said = list(facts(setup, Rehearsal([rollout()], 1.0, True, None)))
    assert said[0] == "warning    the policy cannot know add"


def test_a_prompt_that_leaves_no_room_for_a_turn_is_named(text: TextTokenizer) -> None:
    config = config_of(parser().parse_args(["hunt"]), [("training.seq_len", "64")])
    setup: Any = SimpleNamespace(config=config, tokenizer=text)
    full = Rollout([], "", float("nan"), status="context_overflow")
    assert list(facts(setup, Rehearsal([full, rollout()], 1.0, True, None)))[-1] == (
        "wrong: 1 of 2 rollouts ended as context_overflow before the policy was asked: the prompt, with its tools and "
        "first observation, leaves no room in training.seq_len = 64"
    )


def test_that_the_task_judges_is_no_fault_of_an_environment(text: TextTokenizer) -> None:
    config = config_of(parser().parse_args(["hunt"]), [("task.reward", "last_number")])
    setup: Any = SimpleNamespace(config=config, tokenizer=text)
    said = list(facts(setup, Rehearsal([rollout(float("nan"))], 1.0, True, None)))
    judged = "in a run, the task's reward (last_number) judges the last turn"
    assert f"reward     none from the environment: {judged}" in said


def test_what_the_tokenizer_of_the_examples_lacks_is_no_fault_of_an_environment(text: TextTokenizer) -> None:
    setup: Any = SimpleNamespace(config=config_of(parser().parse_args(["hunt"]), []), tokenizer=text)
    said = list(facts(setup, Rehearsal([rollout()], 1.0, True, None)))
    assert said[-1].startswith(
        "tokens     1 of 2 that are read stand for characters that the tokenizer of the examples"
    )
