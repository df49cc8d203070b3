"""Evaluations whose reward raises, is slow or hangs."""

import asyncio
import math
import threading
import time
from collections.abc import Callable

import pytest

from titan_rl.rollout.player import Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.problems import MOST_HUNG, Problems
from titan_rl.tasks.reward_pool import SideThread
from titan_rl.tasks.rewards import Messages
from titan_rl.wire.errors import RankDied, RequestRefused, RunError
from titan_rl.wire.sessions import Plays
from titan_rl.wire.types import Completion, Prompt, Request, Rollout, Sampling

PROMPTS = [Prompt(i, "x", [1, 2], str(i % 4)) for i in range(8)]


class Engines:
    """Answers problem k with token k % 4; refuses what a test tells it to."""

    def __init__(self, error: Exception | None = None, unsound: int = 0) -> None:
        self.error, self.unsound = error, unsound

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(0)
        id = int(request.id.removeprefix("greedy-"))
        assert request.sampling.temperature == 0
        if id == 5 and self.error is not None:
            raise self.error
        return [Completion([id % 4], [math.nan if id < self.unsound else 0.0], [0], "stop", "generator1")]


def alone(engines: Engines) -> Plays:
    return Player(None, engines, lambda tokens: str(tokens[0]), limits=SessionLimits()).alone


def score(
    reward: Callable[[Prompt, str, Messages], float], seconds: float = 30, engines: Engines | None = None
) -> tuple[float, list[str], float]:
    """Return the score, the warnings, and the longest time in which the event loop stood still."""
    warnings: list[str] = []
    problems = Problems(PROMPTS, by_rule(reward, seconds), Sampling(4))

    async def body() -> tuple[float, float]:
        ticks = [time.monotonic()]

        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        found = await problems.score(alone(engines or Engines()), warnings.append)
        ticking.cancel()
        return found, max(b - a for a, b in zip(ticks, [*ticks[1:], time.monotonic()], strict=True))

    found, longest = asyncio.run(body())
    return found, warnings, longest


def test_the_score_is_the_mean_reward() -> None:
    assert score(lambda prompt, text, messages: float(text == prompt.answer))[:2] == (1.0, [])
    assert score(lambda prompt, text, messages: float(prompt.id == 3))[:2] == (0.125, [])


def test_a_reward_that_raises_counts_as_nothing_and_is_counted() -> None:
    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        return 1 / (prompt.id % 4)  # of 0 and 4 it raises

    mean, warnings, _ = score(lambda prompt, text, messages: float(bool(reward(prompt, text))))
    assert mean == 0.75
    assert warnings == [
        "2 of 8 evaluated answers had no reward and count as 0; the first: ZeroDivisionError: division by zero"
    ]


def test_a_reward_that_is_not_finite_counts_as_nothing_and_is_counted() -> None:
    mean, warnings, _ = score(lambda prompt, text, messages: math.nan if prompt.id < 2 else 1.0)
    assert mean == 0.75
    assert warnings == [
        "2 of 8 evaluated answers had no reward and count as 0; the first: ValueError: expected a finite reward, "
        "found nan"
    ]


def test_an_evaluation_of_ruined_weights_ends_the_run() -> None:
    mean, warnings, _ = score(lambda prompt, text, messages: 1.0, engines=Engines(unsound=2))
    assert mean == 1.0
    what = "2 of 8 evaluated answers have log-probs that are not finite"
    assert warnings == [f"{what}; the first: problem 0, by generator1"]
    with pytest.raises(RunError, match="8 of 8 evaluated answers have log-probs that are not finite"):
        score(lambda prompt, text, messages: 1.0, engines=Engines(unsound=8))


def test_a_slow_reward_does_not_stop_the_loop() -> None:
    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        time.sleep(1.0 if prompt.id == 0 else 0.0)
        return 1.0

    mean, warnings, longest = score(reward)
    assert (mean, warnings) == (1.0, [])
    assert longest < 0.9


def test_rewards_that_hang_have_a_deadline_and_an_evaluation_waits_for_a_few_only() -> None:
    stuck = threading.Event()
    asked: list[int] = []

    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        asked.append(prompt.id)
        if prompt.id > 0:
            stuck.wait(30)
        return 1.0

    began = time.monotonic()
    mean, (warning,), _ = score(reward, 0.1)
    stuck.set()
    assert time.monotonic() - began < 5
    assert mean == 0.125
    assert asked == list(range(1 + MOST_HUNG))
    assert warning.startswith(
        "7 of 8 evaluated answers had no reward and count as 0; the first: RewardHung: the reward "
    )


def test_a_refused_request_counts_as_nothing_and_a_dead_rank_does_not() -> None:
    mean, (warning,), _ = score(
        lambda prompt, text, messages: 1.0, engines=Engines(RequestRefused("request greedy-5: too long"))
    )
    assert mean == 0.875
    assert warning.endswith("the first: RequestRefused: request greedy-5: too long")
    with pytest.raises(RankDied):
        score(
            lambda prompt, text, messages: 1.0, engines=Engines(RankDied("generator0[tp=0]", "was killed by signal 9"))
        )


def test_training_and_evaluation_never_call_user_code_at_once() -> None:
    running, most = 0, 0

    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return 1.0

    async def body() -> None:
        thread = SideThread()
        problems = Problems(PROMPTS, by_rule(reward, 30, thread), Sampling(4))
        train, done = by_rule(reward, 30, thread), Rollout([], "", math.nan)
        groups = [train(prompt, [done] * 2) for prompt in PROMPTS]
        await asyncio.gather(problems.score(alone(Engines()), print), *groups)

    asyncio.run(body())
    assert most == 1
