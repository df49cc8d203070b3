"""A greedy rollout as the baseline of its group, and rewards for length."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.rollout_streams import Echo, ids, ledger_lines, source, stream
from support.turn_drivers import Answering, Conversation
from titan_rl.config.sections import AlgorithmSection, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.sampling import RewardFailed, StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Group, Judgement, Prompt, Request, Rollout, Sampling

TRUNCATED = Sampling(4, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(3,))


class Greedy(Echo):
    """Answers greedy requests by token 20 ("0" is 7, "=" is another), and others as ever."""

    async def generate(self, request: Request) -> list[Completion]:
        found = await super().generate(request)
        return found if request.sampling.temperature else [replace(found[0], tokens=[20])]


def taken(rollouts: RolloutStream, n: int = 2) -> list[Group]:
    async def body() -> list[Group]:
        async with aclosing(rollouts):
            rollouts.admit(n)
            return await rollouts.take(n, 1)

    return asyncio.run(body())


async def by_token(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
    return [float(rollout.completion.tokens[0]) for rollout in rollouts]


def test_a_greedy_answer_is_asked_for_besides_and_only_its_reward_is_left(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    echo = Greedy([0, 2])
    rollouts = stream(
        echo, source(tokenizer), tokenizer, judge=by_token, folder=tmp_path, sampling=TRUNCATED, advantage="greedy"
    )
    groups = taken(rollouts)
    assert [(group.baseline, group.rewards) for group in groups] == [(20.0, [8.0, 9.0, 8.0])] * 2
    plain = Sampling(4, temperature=0.0, stop_token_ids=(3,))
    assert sorted((r.id, len(r.seeds), r.sampling) for r in echo.requests) == [
        ("prompt-0", 3, TRUNCATED),
        ("prompt-0.3", 1, plain),
        ("prompt-1", 3, TRUNCATED),
        ("prompt-1.3", 1, plain),
    ]
    assert [len(line[1]) for line in ledger_lines(tmp_path, "scored")] == [3, 3]


def test_a_group_of_one_has_a_baseline_too(tokenizer: TextTokenizer) -> None:
    one = RolloutSection(groups_per_step=2, group_size=1)
    groups = taken(stream(Greedy([0]), source(tokenizer), tokenizer, judge=by_token, rollout=one, advantage="greedy"))
    assert [(group.baseline, group.rewards) for group in groups] == [(20.0, [8.0])] * 2


def test_without_the_baseline_nothing_greedy_is_asked_for(tokenizer: TextTokenizer) -> None:
    echo = Echo([0])
    groups = taken(stream(echo, source(tokenizer), tokenizer))
    assert [group.baseline for group in groups] == [None, None]
    assert all(request.sampling.temperature for request in echo.requests)


def test_a_greedy_answer_without_a_reward_costs_the_group(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        failed = Judgement(math.nan, error="no such thing")
        rewards = [float(rollout.completion.tokens[0]) for rollout in rollouts]
        return [failed if reward == 20 and prompt.id == 0 else Judgement(reward) for reward in rewards]

    rollouts = stream(Greedy([0]), source(tokenizer), tokenizer, judge=judge, folder=tmp_path, advantage="greedy")
    assert ids(taken(rollouts)) == [1, 2]
    (dropped,) = rollouts.dropped
    assert len(dropped.rollouts) == 3
    why = "failed: 1 of 4 answers have no reward; the first: no such thing"
    assert [line[:2] for line in ledger_lines(tmp_path, "dropped")] == [(0, why)]
    assert isinstance(getattr(dropped, "failure"), RewardFailed)  # noqa: B009


class Named(Conversation):
    """The rollout whose session is `fails` raises; the reward of the others is their number of turns."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(lambda seed: 2)
        self.fails = fails

    async def drive(self, session: Session) -> Outcome:
        await super().drive(session)
        if session.id == self.fails:
            raise ValueError("no such tool")
        return Outcome(reward=float(session.id.split(".")[1]))


def played(driver: Named, tokenizer: TextTokenizer, folder: Path, **algorithm: Any) -> RolloutStream:
    settings = StreamSettings(
        algorithm=AlgorithmSection(advantage="greedy", **algorithm),
        rollout=RolloutSection(groups_per_step=2, group_size=3),
        sampling=Sampling(4),
        seed=7,
        first=1,
        groups=8,
        driver=driver,
    )
    return RolloutStream(settings, Answering(), source(tokenizer), by_token, tokenizer.decode, Clock(), Ledger(folder))


def test_a_greedy_rollout_of_several_turns_is_played_like_the_others(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    groups = taken(played(Named(), tokenizer, tmp_path))
    assert [(group.baseline, group.rewards) for group in groups] == [(3.0, [0.0, 1.0, 2.0])] * 2
    assert {line[1] for line in ledger_lines(tmp_path, "turn")} == {0, 1, 2}, "of the group's samples"


@pytest.mark.parametrize("fails", ["prompt-0.3", "prompt-0.1"])
def test_a_greedy_rollout_that_fails_costs_the_group_and_another_does_not(
    tokenizer: TextTokenizer, tmp_path: Path, fails: str
) -> None:
    rollouts = played(Named(fails), tokenizer, tmp_path)
    groups = taken(rollouts)
    if fails == "prompt-0.3":
        assert ids(groups) == [1, 2]
        why = "failed: 1 of 4 rollouts failed; the first: error: ValueError: no such tool"
        assert [line[:2] for line in ledger_lines(tmp_path, "dropped")] == [(0, why)]
        assert [len(group.rollouts) for group in rollouts.dropped] == [3]
    else:
        assert [r.valid for r in groups[0].rollouts] == [True, False, True]
        assert groups[0].baseline == 3.0


class Lengths(Echo):
    """Answers of 1, 2, 3, 4 tokens; greedy ones of 2."""

    async def generate(self, request: Request) -> list[Completion]:
        counts = range(1, len(request.seeds) + 1) if request.sampling.temperature else [2]
        return [Completion([8] * n, [-0.5] * n, [0] * n, "stop") for n in counts]


async def right_if_odd(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
    return [float(rollout.sampled % 2) for rollout in rollouts]


@pytest.mark.parametrize(
    ("algorithm", "penalties"),
    [
        ({"length_reward": "kimi"}, [-0.25, 0.0, 0.25 / 3, 0.25]),
        ({"length_reward": "kimi", "length_weight": 2.0}, [-1.0, 0.0, 1 / 3, 1.0]),
        ({"length_reward": "target", "length_target": 2}, [0.25, 0.0, 0.25, 0.5]),
        ({"length_reward": "target", "length_target": 4, "overlong_buffer": 2}, [0.375, 0.25, 0.625, 1.0]),
    ],
)
def test_rewards_for_length_lower_the_penalty(
    tokenizer: TextTokenizer, algorithm: dict[str, Any], penalties: list[float]
) -> None:
    four = RolloutSection(groups_per_step=2, group_size=4)
    groups = taken(stream(Lengths([0]), source(tokenizer), tokenizer, judge=right_if_odd, rollout=four, **algorithm))
    for group in groups:
        assert group.rewards == [1.0, 0.0, 1.0, 0.0]
        assert [rollout.penalty for rollout in group.rollouts] == pytest.approx(penalties)


def test_the_greedy_answer_is_rewarded_for_its_length_too(tokenizer: TextTokenizer) -> None:
    four = RolloutSection(groups_per_step=2, group_size=4)
    keys: dict[str, Any] = {"advantage": "greedy", "length_reward": "target", "length_target": 4}
    groups = taken(stream(Lengths([0]), source(tokenizer), tokenizer, judge=right_if_odd, rollout=four, **keys))
    assert [group.baseline for group in groups] == [-0.25, -0.25]


def test_an_answer_without_a_reward_is_no_shortest_one(tokenizer: TextTokenizer) -> None:
    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(1.0) if r.sampled > 1 else Judgement(math.nan, error="none") for r in rollouts]

    four = RolloutSection(groups_per_step=2, group_size=4)
    groups = taken(stream(Lengths([0]), source(tokenizer), tokenizer, judge=judge, rollout=four, length_reward="kimi"))
    assert [rollout.penalty for rollout in groups[0].rollouts] == pytest.approx([0.0, -0.25, 0.0, 0.25])
