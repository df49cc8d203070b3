"""Judges that fail, hang or answer late."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from support.rollout_streams import Echo, Failing, ids, source, stream
from titan_rl.config.sections import RolloutSection
from titan_rl.rollout.sampling import RewardFailed
from titan_rl.tasks.judging import by_rule
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RankFailed
from titan_rl.wire.types import Completion, Prompt, Request, Rollout


async def test_with_a_window_the_groups_behind_a_failed_one_move_up(tokenizer: TextTokenizer) -> None:
    """Two a step, and 0 fails. 4 5 6 do not end by themselves: were 6 simply one more of their turn, all three would be
    due at step 4. But 4 has moved up, and is waited for at step 3."""

    class Stragglers(Echo):
        may_end = asyncio.Event()

        async def generate(self, request: Request) -> list[Completion]:
            if request.id in ("prompt-4", "prompt-5", "prompt-6"):
                await self.may_end.wait()
            return await super().generate(request)

    echo = Stragglers([0])
    rollout = RolloutSection(groups_per_step=2, group_size=3, max_staleness_steps=3, overtake_steps=1)
    rollouts = stream(echo, source(tokenizer), tokenizer, 40, rollout=rollout, judge=Failing({0: 2}))
    found: list[list[int]] = []
    waited: list[int] = []
    async with aclosing(rollouts):
        rollouts.admit(6)
        for step in range(1, 5):
            taking = asyncio.create_task(rollouts.take(2, step))
            await asyncio.sleep(0.01)
            if not taking.done():
                waited.append(step)
                echo.may_end.set()
            found.append(ids(await taking))
            echo.version = step
            rollouts.admit(2)
    assert found == [[1, 2], [3, 7], [4, 8], [5, 6]]
    assert waited == [3]


def test_a_reward_that_always_fails_ends_the_run_by_the_first_prompt(tokenizer: TextTokenizer) -> None:
    """After a step's worth in a row; one success in between, and the count begins anew."""

    async def taken(failing: Sequence[int]) -> list[int]:
        rollouts = stream(Echo([2, 0, 1]), source(tokenizer), tokenizer, judge=Failing(dict.fromkeys(failing, 2)))
        async with aclosing(rollouts):
            rollouts.admit(4)
            return ids(await rollouts.take(4, 1))

    with pytest.raises(RewardFailed, match="the reward failed on prompt 0: ZeroDivisionError") as raised:
        asyncio.run(taken(range(99)))
    assert "4 groups in a row had no rewards" in raised.value.details
    assert "rollout_streams.py" in raised.value.details
    assert asyncio.run(taken([0, 1, 3, 5, 6, 8])) == [2, 4, 7, 9]


async def test_a_meshs_failure_is_no_verdict(tokenizer: TextTokenizer) -> None:
    asked: list[int] = []

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        asked.append(prompt.id)
        raise RankFailed("reward_model[dp=0 tp=0] failed in scores: RuntimeError")

    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
    async with aclosing(rollouts):
        rollouts.admit(1)
        with pytest.raises(RankFailed, match="reward_model"):
            await rollouts.take(1, 1)
    assert asked == [0]


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 0.0, float("nan")], [1.0, 0.0, float("inf")]])
async def test_rewards_are_one_a_sample_and_finite(tokenizer: TextTokenizer, rewards: list[float]) -> None:
    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        return rewards

    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
    async with aclosing(rollouts):
        rollouts.admit(4)
        with pytest.raises(RewardFailed, match="expected 3 finite rewards, found"):
            await rollouts.take(4, 1)


async def test_a_function_that_hangs_stops_neither_the_loop_nor_the_next_group(tokenizer: TextTokenizer) -> None:
    """Of all four the second hangs, on both attempts; it is dropped, and two threads are left behind."""
    stuck = threading.Event()

    began = time.monotonic()

    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        if prompt.id == 1:
            stuck.wait(60)
        return float(text == "1")

    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=by_rule(reward, 0.2))
    async with aclosing(rollouts):
        rollouts.admit(4)
        taking = asyncio.create_task(rollouts.take(4, 1))
        turns = 0
        while not taking.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert ids(await taking) == [0, 2, 3, 4]
        assert turns > 10
        assert ids(rollouts.dropped) == [1]
        assert rollouts._sampler.failures == []
    assert time.monotonic() - began < 50, "the function would have hung for 60 s"
    left = [thread for thread in threading.enumerate() if thread.name == "reward" and thread.is_alive()]
    assert all(thread.daemon for thread in left)
    stuck.set()


async def test_a_function_runs_once_at_a_time_in_order_on_one_thread_and_what_it_raises_is_its_own() -> None:
    calls: list[tuple[int, str]] = []
    errors: list[BaseException] = [SystemExit(3), StopIteration(), ZeroDivisionError("mine"), TimeoutError("mine too")]

    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        calls.append((threading.get_ident(), f"{prompt.id} begins"))
        time.sleep(0.002)
        calls.append((threading.get_ident(), f"{prompt.id} ends"))
        if prompt.id < len(errors):
            raise errors[prompt.id]
        return float(prompt.id)

    judge, done = by_rule(reward, 30), Rollout([], "", math.nan)
    asked = [judge(Prompt(id, "", [], ""), [done] * 2) for id in range(8)]
    *raised, a, b, c, d = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in raised] == ["SystemExit(3)", "coroutine raised StopIteration", "mine", "mine too"]
    assert all(isinstance(error, Exception) for error in raised)
    assert [a, b, c, d] == [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
    assert len({thread for thread, _ in calls} - {threading.get_ident()}) == 1
    times = {id: 1 if id < len(errors) else 2 for id in range(8)}
    assert [what for _, what in calls] == [
        f"{id} {what}" for id in range(8) for _ in range(times[id]) for what in ("begins", "ends")
    ]


async def test_long_rollouts_are_punished_and_their_rewards_stay(tokenizer: TextTokenizer) -> None:
    """Three of at most four tokens, a buffer of two: half of the penalty."""

    echo = Echo([0], length=3)
    judge = by_rule(lambda prompt, text, messages: 1.0)
    rollouts = stream(echo, source(tokenizer), tokenizer, judge=judge, overlong_buffer=2)
    async with aclosing(rollouts):
        rollouts.admit(1)
        (group,) = await rollouts.take(1, 1)
    assert group.rewards == [1.0] * 3
    assert [r.penalty for r in group.rollouts] == [0.5] * 3
    assert [rollout.signal for rollout in group.rollouts] == [0.5] * 3


async def test_a_judge_may_take_its_time_and_sees_tokens_and_texts(tokenizer: TextTokenizer) -> None:
    seen: list[tuple[int, list[list[int]], list[str]]] = []

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        for _ in range(9 - prompt.id):  # the first is judged last
            await asyncio.sleep(0)
        seen.append((prompt.id, [r.completion.tokens for r in rollouts], [r.text for r in rollouts]))
        return [prompt.id + 0.1 * k for k in range(len(rollouts))]

    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
    async with aclosing(rollouts):
        rollouts.admit(3)
        groups = await rollouts.take(3, 1)
    assert [group.rewards for group in groups] == [[i, i + 0.1, i + 0.2] for i in range(3)]
    assert [id for id, _, _ in seen] == [2, 1, 0]
    assert seen[0][1:] == ([[8], [9], [8]], ["1", "2", "1"])
