"""The shipped agent, which has only the openai package, on a real socket; and the demonstrations it starts from."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from support.agent_rollouts import AgentRollout, endpoint_client
from support.played import LIMITS
from titan_rl.config.sections import TaskSection
from titan_rl.ext.agents import calc, calc_agent
from titan_rl.ext.agents.conversation import ChatText
from titan_rl.ext.agents.episodes import Limits
from titan_rl.tasks.prompts import supervised
from titan_rl.tasks.task import Task, load_task
from titan_rl.text.tokenizer import TextTokenizer

ROW = {"a": 347, "b": 862}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The loop that the agent's connections belong to, as in an environment process."""
    with asyncio.Runner() as runner:
        yield runner
        runner.run(calc_agent.connections().close())
        calc_agent.connections.cache_clear()


def play(
    loop: asyncio.Runner, text: TextTokenizer, said: Sequence[str], row: dict[str, int] = ROW, limits: Limits = LIMITS
) -> tuple[tuple[float, ...], AgentRollout]:
    """Return the agent's reward and calls when the policy answers with these texts, and the rollout."""
    left = list(said)
    rollout = AgentRollout(ChatText(text), lambda _: [*text.encode(left.pop(0)), text.eos], limits)

    async def body() -> dict[str, float]:
        async with endpoint_client(rollout) as (client,):
            return await calc_agent.run(row, client.url, client.key)

    found = loop.run(asyncio.wait_for(body(), 60))
    rollout.check()
    return (found["reward"], found["calls"]), rollout


@pytest.mark.parametrize(
    ("said", "reward", "calls"),
    [
        (["?347*862", "299114"], 1, 1),
        (["299114"], 1, 0),
        (["299115"], 0, 0),
        (["?347*862", "299114="], 0, 1),
        (["?1000*2", "?a*2", "?3"], 0, 3),
        (["?1000*2", "?347*862", "299114"], 1, 2),
    ],
)
def test_the_agent_rewards_the_answer_only_and_answers_calls(
    loop: asyncio.Runner, text: TextTokenizer, said: list[str], reward: float, calls: int
) -> None:
    assert play(loop, text, said)[0] == (reward, calls)


def test_an_answer_that_was_cut_off_is_no_answer(loop: asyncio.Runner, text: TextTokenizer) -> None:
    found, rollout = play(loop, text, ["299114"], limits=replace(LIMITS, max_tokens=6))
    assert rollout.engine[0][1] == text.encode("299114")
    assert found == (0, 0)


@pytest.mark.parametrize("template", ["plain", "chat"])
def test_a_demonstration_is_token_by_token_the_rollout_in_which_the_policy_says_it(
    loop: asyncio.Runner, text: TextTokenizer, template: str
) -> None:
    """Or else the cold start teaches a format that the policy never meets. Planted before: a chat's later turns without
    their roles."""
    whole = load_task(TaskSection(name="calc"), seed=0, eval_size=8)
    task = Task(whole.train[:30], [], template, game=whole.game)  # pyright: ignore[reportArgumentType]
    prompts = [task.prompt(example, id, text) for id, example in enumerate(task.train)]
    called = [prompt for prompt in prompts if len(prompt.demonstration) == 2][:3]
    assert called
    for prompt in called:
        (sample,) = supervised(prompt, text)
        spoken = [said for said, _ in prompt.demonstration]
        if template == "plain":
            shown = [read for _, read in prompt.demonstration if isinstance(read, str)]
            parts = [
                t
                for said, read in zip(spoken, shown, strict=True)
                for t in (*text.encode(said), text.eos, *text.encode(read))
            ]
            assert list(sample.tokens) == [*prompt.tokens, *parts]
            continue
        (reward, calls), rollout = play(loop, text, spoken, dict(prompt.row))
        assert (reward, calls) == (1, 1)
        (branch,) = rollout.recorded.branches()
        assert branch.turns[0].context == prompt.tokens
        assert (list(sample.tokens), list(sample.mask)) == (branch.tokens, branch.mask)


def test_its_calculator_is_that_of_the_task() -> None:
    rows = [calc.row(number) for number in range(0, calc.COUNT, 40_501)]
    assert [calc_agent.multiply(f"{row['a']}*{row['b']}") for row in rows] == [f"{calc.answer(row)}=" for row in rows]
    assert {calc_agent.multiply(text) for text in ("", "1*", "a*1", "1000*1", "1*-2", "1*2*3")} == {calc.MALFORMED}
