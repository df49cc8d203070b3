"""What the stream does for a group does not grow with the number of groups in flight. Instructions are counted."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from support.operations import instructions
from support.rollout_streams import Echo, source, stream
from titan_rl.config.sections import RolloutSection
from titan_rl.rollout.stream import RolloutStream
from titan_rl.text.tokenizer import TextTokenizer

FEW, MANY = 24, 96


async def take_all(rollouts: RolloutStream, n: int) -> None:
    assert len(await rollouts.take(n, 1)) == n


async def take_one_by_one(rollouts: RolloutStream, n: int) -> None:
    assert [len(part) async for part in rollouts.parts(n, 1, 1)] == [1] * n


@pytest.mark.parametrize("take", [take_all, take_one_by_one])
@pytest.mark.parametrize("window", [0, 1])
def test_a_group_costs_the_same_in_a_large_step(
    tokenizer: TextTokenizer, take: Callable[[RolloutStream, int], Awaitable[None]], window: int
) -> None:
    def step(n: int) -> Callable[[], None]:
        async def body() -> None:
            rollout = RolloutSection(groups_per_step=n, group_size=2, lag=1, window=window)
            rollouts = stream(Echo([*range(17)]), source(tokenizer), tokenizer, 4 * n, rollout=rollout)
            async with aclosing(rollouts):
                rollouts.admit(2 * n)
                await take(rollouts, n)
                assert rollouts.cut()["open"]

        return lambda: asyncio.run(body())

    few, many = (instructions(step(n), "rollout/stream.py") / n for n in (FEW, MANY))
    assert many < 1.5 * few
