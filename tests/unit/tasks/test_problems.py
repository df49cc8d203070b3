"""Evaluations whose reward raises, is slow or hangs."""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from titan_rl.record.evaluation import Evaluation
from titan_rl.rollout.player import Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.problems import MOST_HUNG, Problems
from titan_rl.tasks.reward_thread import SideThread
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


def play_for_evaluation(engines: Engines) -> Plays:
    return Player(None, engines, lambda tokens: str(tokens[0]), limits=SessionLimits()).play_for_evaluation


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
        found = await problems.score(play_for_evaluation(engines or Engines()), warnings.append)
        ticking.cancel()
        return found, max(b - a for a, b in zip(ticks, [*ticks[1:], time.monotonic()], strict=True))

    found, longest = asyncio.run(body())
    return found, warnings, longest


def test_the_score_is_the_mean_reward() -> None:
    assert score(lambda prompt, text, messages: float(text == prompt.answer))[:2] == (1.0, [])
    assert score(lambda prompt, text, messages: float(prompt.id == 3))[:2] == (0.125, [])


def test_a_reward_that_raises_counts_as_nothing_and_is_counted() -> None:
    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        return 1 / (prompt.id % 4)  # it raises for 0 and 4

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


async def test_training_and_evaluation_never_call_user_code_at_once() -> None:
    running, most = 0, 0

    def reward(prompt: Prompt, text: str, messages: object = ()) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return 1.0

    thread = SideThread()
    problems = Problems(PROMPTS, by_rule(reward, 30, thread), Sampling(4))
    train, done = by_rule(reward, 30, thread), Rollout([], "", math.nan)
    groups = [train(prompt, [done] * 2) for prompt in PROMPTS]
    await asyncio.gather(problems.score(play_for_evaluation(Engines()), print), *groups)
    assert most == 1


FEW = [Prompt(i, "x", [1, 2], str(i)) for i in range(3)]


class SeedParity:
    """Answers with the parity of the request's seed."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request)
        (seed,) = request.seeds
        return [Completion([seed % 2], [0.0], [0], "stop")]


def measure(problems: Problems, engines: SeedParity, warnings: list[str]) -> Evaluation:
    plays = Player(None, engines, lambda tokens: str(tokens[0]), limits=SessionLimits()).play_for_evaluation
    return asyncio.run(problems.measure(plays, warnings.append))


def even(prompt: Prompt, text: str, messages: Messages) -> float:
    return float(text == "0")


CUT = Sampling(4, 0.3, 0.5, top_k=3, min_p=0.1)
SET = Problems(FEW, by_rule(even), CUT, "hard", samples=16, temperature=0.8, seed=7)


def test_every_answer_has_its_own_seed_and_request() -> None:
    engines = SeedParity()
    found = measure(SET, engines, [])
    assert len({request.id for request in engines.asked}) == len(engines.asked) == 48
    assert len({request.seeds[0] for request in engines.asked}) == 48
    assert {r.sampling for r in engines.asked} == {Sampling(4, 0.8)}  # from the whole distribution
    assert [len(answers) for answers in found.answers.values()] == [16] * 3
    assert 0 < found.average.value < 1


def test_the_seed_decides_the_answers() -> None:
    one, again, other = (measure(replace(SET, seed=seed), SeedParity(), []) for seed in (7, 7, 8))
    assert one == again
    assert one.answers != other.answers


def test_a_reward_that_fails_is_tried_again_as_in_training() -> None:
    tried = Counter[int]()

    def flaky(prompt: Prompt, text: str, messages: Messages) -> float:
        tried[prompt.id] += 1
        if prompt.id == 2 or tried[prompt.id] == 1:
            raise ValueError(f"no verdict on {prompt.id}")
        return 1.0

    warnings: list[str] = []
    flaky_set = replace(SET, judge=by_rule(flaky), samples=1, attempts=2)
    found = measure(flaky_set, SeedParity(), warnings)
    assert tried == {0: 2, 1: 2, 2: 2}
    assert found.average.value == pytest.approx(2 / 3)
    assert found.failures == [(2, 0, "ValueError: no verdict on 2")]
    assert warnings == [
        "eval.sets.hard: 1 of 3 evaluated answers had no reward and count as 0; the first: ValueError: no verdict on 2"
    ]
