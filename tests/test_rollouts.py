"""The stream's promises: order, bounded admission, a cursor that loses nothing, seeds that depend on nothing else."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl import tokenizer as characters
from titan_rl.clock import Clock
from titan_rl.config import Task
from titan_rl.data import PromptSource
from titan_rl.rollouts import RolloutStream
from titan_rl.seeds import derive, sample_seed
from titan_rl.tasks import load_task
from titan_rl.tokenizer import TextTokenizer
from titan_rl.types import Completion, Request, Sampling


class Echo:
    """Answers a request after as many loop turns as `delays` says, out of order on purpose."""

    def __init__(self, delays: list[int]) -> None:
        self.delays = delays
        self.requests: list[Request] = []
        self.running = 0
        self.most = 0

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(self.delays[len(self.requests) % len(self.delays)]):
            await asyncio.sleep(0)
        self.running -= 1
        return [Completion([8], [-0.5], [0], "stop") for _ in request.seeds]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    characters.build(folder)
    return TextTokenizer.load(folder)


def source(tokenizer: TextTokenizer) -> PromptSource:
    return PromptSource(load_task(Task(), seed=1, eval_size=10), tokenizer, seed=3)


def stream(echo: Echo, prompts: PromptSource, tokenizer: TextTokenizer, groups: int = 100) -> RolloutStream:
    return RolloutStream(
        echo,
        prompts,
        lambda prompt, text: float(text == "1"),
        tokenizer.decode,
        sampling=Sampling(4),
        group_size=3,
        groups=groups,
        seed=7,
        clock=Clock(),
    )


@given(delays=st.lists(st.integers(0, 9), min_size=1, max_size=7), lag=st.integers(0, 3))
def test_oldest_first_whatever_finishes_first(tokenizer: TextTokenizer, delays: list[int], lag: int) -> None:
    async def body() -> None:
        echo = Echo(delays)
        rollouts = stream(echo, source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(2 * (lag + 1))
            for step in range(6):
                groups = await rollouts.take(2)
                assert [g.prompt.id for g in groups] == [2 * step, 2 * step + 1]
                rollouts.admit(2)
        assert echo.most <= 2 * (lag + 1)

    asyncio.run(body())


def test_a_run_never_admits_what_it_will_not_train(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        echo = Echo([0])
        rollouts = stream(echo, source(tokenizer), tokenizer, groups=5)
        async with aclosing(rollouts):
            rollouts.admit(4)
            await rollouts.take(4)
            rollouts.admit(4)
            await rollouts.take(1)
        assert len(echo.requests) == 5

    asyncio.run(body())


def test_the_cursor_is_behind_what_is_in_flight(tokenizer: TextTokenizer) -> None:
    """Resuming from it samples the admitted, untrained groups again: none lost, none twice."""

    async def body() -> None:
        rollouts = stream(Echo([3, 0, 5]), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(6)
            taken = [g.prompt.id for g in await rollouts.take(2)]
            resumed = source(tokenizer)
            resumed.load_state_dict(rollouts.cursor)
        assert taken == [0, 1]
        assert resumed.next().id == 2

    asyncio.run(body())


def test_rewards_and_turns(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(1)
            (group,) = await rollouts.take(1)
        (rollout, *_) = group.rollouts
        assert rollout.tokens == [*group.prompt.tokens, 8]
        assert rollout.mask == [0] * len(group.prompt.tokens) + [1]
        assert rollout.text == "1"
        assert rollout.reward == 1.0

    asyncio.run(body())


def test_seeds_depend_on_what_they_name_and_nothing_else() -> None:
    assert sample_seed(0, 5, 1) == sample_seed(0, 5, 1)
    seeds = {sample_seed(s, p, k) for s in range(3) for p in range(40) for k in range(8)}
    assert len(seeds) == 3 * 40 * 8
    assert all(0 <= s < 2**31 for s in seeds)
    assert derive(1, "a", 2) != derive(1, "a2")
