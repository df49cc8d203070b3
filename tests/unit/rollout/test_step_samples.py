"""What is made while the trainers step is what would be made at its turn."""

import asyncio
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.learners import learner_of
from support.rollout_streams import Echo, Failing, ids, right_if_one, source, stream
from titan_rl.config.sections import Config, RolloutSection, TrainingSection
from titan_rl.rollout.sampling import Judge
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.train import step_samples
from titan_rl.train.step_samples import StepSamples
from titan_rl.wire.errors import RankDied
from titan_rl.wire.types import Batch

GROUPS = 2


class Trainers:
    """Ranks that take a while for a step, and keep what they were sent."""

    dp = 1

    def __init__(self, seconds: float) -> None:
        self.seconds, self.sent = seconds, list[list[Batch]]()

    async def step(self, updates: list[list[Batch]]) -> Any:
        self.sent += updates
        await asyncio.sleep(self.seconds)
        return "stats"


async def three_steps(
    folder: Path,
    tokenizer: TextTokenizer,
    seconds: float,
    judge: Judge = right_if_one,
    *,
    lag: int = 1,
    window: int = 0,
    dynamic: bool = False,
) -> tuple[list[int], Trainers, list[bool]]:
    """Return the prompts of three steps, the trainers, and whether each step was made ahead."""
    section = RolloutSection(groups_per_step=GROUPS, group_size=4, lag=lag, window=window)
    config = Config(training=TrainingSection(seq_len=64, local_batch_size=4), rollout=section)
    trainers = Trainers(seconds)
    learner, _ = learner_of(folder, config, trainers)
    folder.mkdir(exist_ok=True)
    echo = Echo([0])
    rollouts = stream(
        echo, source(tokenizer), tokenizer, judge=judge, rollout=section, folder=folder, dynamic_sampling=dynamic
    )
    made, found, ahead = StepSamples(config, learner, rollouts), list[int](), list[bool]()
    async with aclosing(rollouts):
        rollouts.admit(GROUPS * (section.lag + 1))
        for step in range(1, 4):
            groups = await rollouts.take(GROUPS, step)
            ahead.append(made._made is not None)
            groups, samples = await made.of(step, groups)
            await learner.accumulate(samples)
            assert await made.beside(learner.update) == "stats"
            echo.version = step
            rollouts.admit(GROUPS)
            found += ids(groups)
    return found, trainers, ahead


def arrays(trainers: Trainers) -> list[tuple[str, np.ndarray]]:
    """Return every array that was sent."""
    found = list[tuple[str, np.ndarray]]()
    for (batch,) in trainers.sent:
        for rows in batch.microbatches:
            plain = {field.name: getattr(rows, field.name) for field in fields(rows)}
            found += sorted((plain.pop("columns") | {k: v for k, v in plain.items() if v is not None}).items())
    return found


def test_batches_made_ahead_are_those_made_in_time(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = asyncio.run(three_steps(tmp_path / "late", tokenizer, 0.0))
    assert late[2] == [False] * 3, "the trainers were done before"
    monkeypatch.setattr(step_samples, "SENT_SECONDS", 0.0)
    early = asyncio.run(three_steps(tmp_path / "early", tokenizer, 0.5))
    assert early[2] == [False, True, True]
    assert early[0] == late[0] == list(range(3 * GROUPS))
    assert len(early[1].sent) == len(late[1].sent) == 3
    for (name, ours), (other, theirs) in zip(arrays(early[1]), arrays(late[1]), strict=True):
        assert name == other
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("why", ["lag 0", "window", "dynamic sampling", "a judge failed"])
def test_nothing_is_made_ahead_that_may_change(
    why: str, tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_samples, "SENT_SECONDS", 0.0)
    judge = Failing({2: 9}) if why == "a judge failed" else right_if_one
    lag, window, dynamic = int(why != "lag 0"), int(why == "window"), why == "dynamic sampling"
    steps = three_steps(tmp_path, tokenizer, 0.2, judge, lag=lag, window=window, dynamic=dynamic)
    found, trainers, ahead = asyncio.run(steps)
    assert not ahead[1]
    assert len(trainers.sent) == 3
    assert len(set(found)) == 3 * GROUPS
    assert (2 in found) == (why != "a judge failed"), "another prompt took its place"


def test_an_update_that_fails_leaves_nothing_running(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    async def body() -> None:
        section = RolloutSection(groups_per_step=GROUPS, group_size=4, lag=1)
        config = Config(rollout=section)
        learner, _ = learner_of(tmp_path, config, Trainers(0))
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, rollout=section)

        async def fails() -> Any:
            raise RankDied("trainer[dp=0 tp=0]", "was killed")

        async with aclosing(rollouts):
            rollouts.admit(2 * GROUPS)
            with pytest.raises(RankDied):
                await StepSamples(config, learner, rollouts).beside(fails)
            assert not [task for task in asyncio.all_tasks() if "_make_ahead" in repr(task)]

    asyncio.run(body())
