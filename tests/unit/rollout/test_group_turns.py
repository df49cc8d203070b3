"""Groups of rollouts with several turns: what fails is data, and a single answer is asked for as ever."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from support.rollout_streams import Echo, ids, ledger_lines, right_if_one, source
from support.turn_drivers import Answering, Conversation
from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.config.sections import AlgorithmSection, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.sampling import RolloutsFailed, StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Driver, Outcome, Session
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Generates, Group, Judgement, Prompt, Rollout, Sampling


def stream(
    engine: Generates, driver: Driver | None, tokenizer: TextTokenizer, folder: Path, *, lag: int = 0, window: int = 0
) -> RolloutStream:
    settings = StreamSettings(
        algorithm=AlgorithmSection(),
        rollout=RolloutSection(
            groups_per_step=2, group_size=4, max_staleness_steps=lag + window, overtake_steps=window
        ),
        sampling=Sampling(4),
        seed=7,
        first=1,
        groups=8,
        driver=driver,
    )
    return RolloutStream(settings, engine, source(tokenizer), right_if_one, tokenizer.decode, Clock(), Ledger(folder))


def taken(rollouts: RolloutStream, n: int = 2) -> list[Group]:
    async def body() -> list[Group]:
        async with aclosing(rollouts):
            rollouts.admit(n)
            return await rollouts.take(n, 1)

    return asyncio.run(body())


class Failing(Conversation):
    """Every rollout of a prompt in `prompts` but the last `valid` ones raises after its turns."""

    def __init__(self, prompts: frozenset[int], valid: int) -> None:
        super().__init__()
        self.prompts, self.valid = prompts, valid

    async def drive(self, session: Session) -> Outcome:
        outcome = await super().drive(session)
        if session.prompt.id in self.prompts and int(session.id.split(".")[1]) < 4 - self.valid:
            raise ValueError("no such tool")
        return outcome


def test_a_single_answer_is_one_request_of_the_group_with_a_sessions_seeds(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    echo = Echo([0])
    groups = taken(stream(echo, None, tokenizer, tmp_path))
    assert [(request.id, len(request.seeds), request.affinity) for request in echo.requests] == [
        ("prompt-0", 4, ()),
        ("prompt-1", 4, ()),
    ]
    assert all(rollout.plain for group in groups for rollout in group.rollouts)
    (tmp_path / "turns").mkdir()
    engine = Answering()
    taken(stream(engine, Conversation(lambda seed: 1), tokenizer, tmp_path / "turns"))
    seeds = {request.id: request.seeds for request in engine.requests}
    assert [seeds[f"prompt-0.{k}:0"] for k in range(4)] == [[seed] for seed in echo.requests[0].seeds]


def test_a_failed_rollout_is_no_baseline_and_is_not_trained_on(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    groups = taken(stream(Answering(), Failing(frozenset([0]), 2), tokenizer, tmp_path))
    assert ids(groups) == [0, 1]
    failed, valid = groups[0].rollouts[:2], groups[0].rollouts[2:]
    assert [(r.status, math.isnan(r.reward), r.sampled > 0) for r in failed] == [("error", True, True)] * 2
    algorithm = AlgorithmSection(normalize="none")
    judged, samples = with_advantages(groups, samples_of(groups, algorithm), algorithm)
    assert len(samples) == 6, "of the valid rollouts"
    mean = sum(rollout.reward for rollout in valid) / 2
    assert [r.advantage for r in judged[0].rollouts] == pytest.approx([0.0, 0.0, *(r.reward - mean for r in valid)])
    (line,) = [line for line in ledger_lines(tmp_path, "scored") if line[0] == 0]
    assert line[1][:2] == [None, None]


def test_a_group_with_fewer_than_two_valid_rollouts_is_replaced(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rollouts = stream(Answering(), Failing(frozenset([0]), 1), tokenizer, tmp_path)
    assert ids(taken(rollouts)) == [1, 2]
    assert ids(rollouts.dropped) == [0]
    why = "failed: 3 of 4 rollouts failed; the first: error: ValueError: no such tool"
    assert [line[:2] for line in ledger_lines(tmp_path, "dropped")] == [(0, why)]


def test_rollouts_that_always_fail_end_the_run(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rollouts = stream(Answering(), Failing(frozenset(range(99)), 0), tokenizer, tmp_path)
    with pytest.raises(RolloutsFailed, match="the rollouts failed on prompt 0: 4 of 4 rollouts failed; the first"):
        taken(rollouts)


def test_the_task_judges_the_last_turn_of_a_driver_that_gives_no_reward(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    class Silent(Conversation):
        async def drive(self, session: Session) -> Outcome:
            outcome = await super().drive(session)
            return Outcome(reward=0.25) if session.id.endswith(".0") else Outcome(metrics=outcome.metrics)

    (group, _) = taken(stream(Echo([0, 1, 2]), Silent(lambda seed: 2), tokenizer, tmp_path))
    assert [rollout.text for rollout in group.rollouts] == ["1"] * 4, "of the last turn only"
    assert group.rewards == [0.25, 1.0, 1.0, 1.0]


def test_long_rollouts_hold_up_no_short_ones(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Of the first prompt's rollouts each has 20 turns, of the others 1: they are sampled and trained on meanwhile."""

    class Lengths(Conversation):
        async def drive(self, session: Session) -> Outcome:
            self.turns = lambda seed: 20 if session.prompt.id == 0 else 1
            return await super().drive(session)

    async def body() -> list[list[int]]:
        engine = Answering()
        rollouts = stream(engine, Lengths(), tokenizer, tmp_path, lag=2, window=2)
        async with aclosing(rollouts):
            rollouts.admit(6)
            first = await rollouts.take(2, 1)
            asked = [request.id for request in engine.requests if request.id.startswith("prompt-0.")]
            assert len(asked) < 4 * 20, "the long ones are still being sampled"
            steps = [first, *[await rollouts.take(2, step) for step in (2, 3)]]
            assert sum(request.id.startswith("prompt-0.") for request in engine.requests) == 4 * 20
        return [ids(groups) for groups in steps]

    first, second, third = asyncio.run(body())
    assert 0 not in first + second, "not before it must be"
    assert 0 in third
    assert sorted(first + second + third) == list(range(6))


class Paying(Conversation):
    """Pays each rollout itself, but for the first of its group."""

    async def drive(self, session: Session) -> Outcome:
        outcome = await super().drive(session)
        return replace(outcome, reward=None if session.id.split(".")[1] == "0" else 0.5)


def test_the_grader_judges_rollouts_whose_reward_the_environment_gave(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    asked: list[int] = []

    async def grade(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        asked.append(len(rollouts))
        if prompt.id == 1:
            raise ValueError("no such column")
        return [Judgement(0.25), Judgement(math.nan, error="late"), Judgement(1.0)]

    warned: list[str] = []
    rollouts = stream(Answering(), Paying(), tokenizer, tmp_path)
    rollouts._sampler._settings = replace(rollouts._sampler._settings, grade=grade, warn=warned.append)
    first, second = taken(rollouts)
    assert asked == [3, 3]  # the group's first rollout has a judge
    assert [r.reward for r in first.rollouts[1:]] == [r.reward for r in second.rollouts[1:]] == [0.5] * 3
    assert [dict(r.parts) for r in first.rollouts] == [{}, {"grader": 0.25}, {}, {"grader": 1.0}]
    assert all(not r.parts for r in second.rollouts)
    assert warned[0] == "the reward failed on prompt 0, sample 2: the grader: late"
    assert "the grader: no such column" in warned[1]


def test_the_grader_judges_rollouts_that_a_reward_model_judged(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    async def grade(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        return [0.25] * len(rollouts)

    rollouts = stream(Echo([0]), None, tokenizer, tmp_path)
    rollouts._sampler._settings = replace(rollouts._sampler._settings, grade=grade, modelled=True)
    graded = [r for group in taken(rollouts) for r in group.rollouts]
    assert [r.reward for r in graded] == [1.0, 0.0] * 4  # the judge's
    assert [r.parts for r in graded] == [{"grader": 0.25}] * 8
