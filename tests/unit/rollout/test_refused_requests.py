"""Prompts that the engines cannot sample cost their group, like a reward that fails."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from support.rollout_streams import Echo, Failing, ids, ledger_lines, source, stream
from titan_rl.config.sections import RolloutSection
from titan_rl.record.metrics import step_metrics, step_times
from titan_rl.rollout.sampling import RewardFailed, SamplingFailed
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RequestRefused
from titan_rl.wire.reports import StepStats, SyncStats
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Request


class Refusing(Echo):
    """Engines that refuse prompts of these ids."""

    refused: frozenset[int] = frozenset()

    async def generate(self, request: Request) -> list[Completion]:
        if int(request.id.removeprefix("prompt-")) in self.refused:
            raise RequestRefused(f"request {request.id}: 69 tokens and 4 new ones exceed 32")
        return await super().generate(request)


def refusing(*prompts: int) -> Refusing:
    echo = Refusing([2, 0, 1])
    echo.refused = frozenset(prompts)
    return echo


@pytest.mark.parametrize("size", [0, 2])
async def test_a_refused_prompt_is_replaced_and_counted(tokenizer: TextTokenizer, tmp_path: Path, size: int) -> None:
    rollouts = stream(refusing(1, 2), source(tokenizer), tokenizer, folder=tmp_path)
    async with aclosing(rollouts):
        rollouts.admit(4)
        if size:
            groups = [group async for part in rollouts.parts(4, 1, size) for group in part]
        else:
            groups = await rollouts.take(4, 1)
        assert sorted(ids(groups)) == [0, 3, 4, 5]
        assert sorted(ids(rollouts.dropped)) == [1, 2]
        rollouts.trained(1, groups)
    stats, clock = StepStats(0.0, 0.0, 0.0, 1, 1.0), Clock()
    metrics = step_metrics(1, groups, stats, SyncStats(1), step_times(clock.lap()), dropped=rollouts.dropped)
    assert (metrics["dropped/failed"], metrics["dropped/groups"], metrics["dropped/tokens"]) == (2, 0, 0)
    reasons = {line[0]: line[1] for line in ledger_lines(tmp_path, "dropped")}
    assert reasons == {i: f"failed: request prompt-{i}: 69 tokens and 4 new ones exceed 32" for i in (1, 2)}


def test_prompts_that_are_always_refused_end_the_run(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(refusing(*range(99)), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(4)
            await rollouts.take(4, 1)

    with pytest.raises(SamplingFailed, match="the engines refused prompt 0: request prompt-0: 69 tokens") as raised:
        asyncio.run(body())
    assert "4 groups in a row had no rewards. task.bad_rows" in raised.value.details


def test_one_failure_does_not_end_a_run_of_one_group_a_step(tokenizer: TextTokenizer) -> None:
    async def taken(failing: list[int]) -> list[int]:
        rollout = RolloutSection(groups_per_step=1, group_size=3)
        judge = Failing(dict.fromkeys(failing, 2))
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, rollout=rollout, judge=judge)
        async with aclosing(rollouts):
            rollouts.admit(1)
            return ids(await rollouts.take(1, 1))

    assert asyncio.run(taken([0, 1])) == [2]
    with pytest.raises(RewardFailed, match="the reward failed on prompt 0") as raised:
        asyncio.run(taken([0, 1, 2]))
    assert "3 groups in a row had no rewards after 2 attempts each" in raised.value.details
