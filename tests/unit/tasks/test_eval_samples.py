"""Evaluation sets with several answers per problem: what is asked, how failures are judged again, what is counted."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from titan_rl.record.evaluation import Evaluation
from titan_rl.rollout.player import Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.problems import Problems
from titan_rl.tasks.rewards import Messages
from titan_rl.wire.types import Completion, Prompt, Request, Sampling

PROMPTS = [Prompt(i, "x", [1, 2], str(i)) for i in range(3)]


class Engines:
    """Answers with the parity of the request's seed."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request)
        (seed,) = request.seeds
        return [Completion([seed % 2], [0.0], [0], "stop")]


def measure(problems: Problems, engines: Engines, warnings: list[str]) -> Evaluation:
    plays = Player(None, engines, lambda tokens: str(tokens[0]), limits=SessionLimits()).alone
    return asyncio.run(problems.measure(plays, warnings.append))


def even(prompt: Prompt, text: str, messages: Messages) -> float:
    return float(text == "0")


CUT = Sampling(4, 0.3, 0.5, top_k=3, min_p=0.1)
SET = Problems(PROMPTS, by_rule(even), CUT, "hard", samples=16, temperature=0.8, seed=7)


def test_every_answer_has_its_own_seed_and_request() -> None:
    engines = Engines()
    found = measure(SET, engines, [])
    assert len({request.id for request in engines.asked}) == len(engines.asked) == 48
    assert len({request.seeds[0] for request in engines.asked}) == 48
    assert {r.sampling for r in engines.asked} == {Sampling(4, 0.8)}  # of the whole distribution
    assert [len(answers) for answers in found.answers.values()] == [16] * 3
    assert 0 < found.average.value < 1


def test_the_seed_decides_the_answers() -> None:
    one, again, other = (measure(replace(SET, seed=seed), Engines(), []) for seed in (7, 7, 8))
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
    found = measure(flaky_set, Engines(), warnings)
    assert tried == {0: 2, 1: 2, 2: 2}
    assert found.average.value == pytest.approx(2 / 3)
    assert found.failures == [(2, 0, "ValueError: no verdict on 2")]
    assert warnings == [
        "eval.sets.hard: 1 of 3 evaluated answers had no reward and count as 0; the first: ValueError: no verdict on 2"
    ]
