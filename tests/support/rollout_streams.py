"""Generators without an engine, and the streams that run on them."""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from titan_rl.batch.own_filter import Filter
from titan_rl.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    Config,
    RolloutSection,
    TaskSection,
    TrainingSection,
)
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.rollout.sampling import Judge, StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import Task, load_task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.audit_rules import BOUND_RULES
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Group, Prompt, Request, Rollout, Sampling


class Echo:
    """Answers a request after the loop turns in `delays`, out of order on purpose. A prompt whose id is in
    `flat` is answered alike by all its samples; every other one by "1", "2", "1", ..."""

    def __init__(self, delays: list[int], flat: Callable[[int], bool] = lambda id: False, length: int = 1) -> None:
        self.delays = delays
        self.flat = flat
        self.length = length
        self.version = 0
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
        flat, n = self.flat(int(re.split(r"[-@.]", request.id)[1])), self.length
        return [
            Completion([8 if flat else 8 + k % 2] * n, [-0.5] * n, [self.version] * n, "stop")
            for k in range(len(request.seeds))
        ]


@cache
def additions() -> Task:
    return load_task(TaskSection(), seed=1, eval_size=10)


def source(tokenizer: TextTokenizer) -> PromptSource:
    return PromptSource(additions(), tokenizer, seed=3)


async def right_if_one(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
    return [float(rollout.text == "1") for rollout in rollouts]


def stream(
    echo: Echo,
    prompts: PromptSource,
    tokenizer: TextTokenizer,
    groups: int = 100,
    *,
    judge: Judge = right_if_one,
    sampling: Sampling | None = None,
    rollout: RolloutSection = RolloutSection(groups_per_step=4, group_size=3),  # noqa: B008 (frozen)
    first: int = 1,
    folder: Path | None = None,
    reward_attempts: int = 2,
    attempt: int = 1,
    keeps: Filter | None = None,
    **algorithm: Any,
) -> RolloutStream:
    settings = StreamSettings(
        algorithm=AlgorithmSection(**algorithm),
        rollout=rollout,
        sampling=sampling or Sampling(4),
        seed=7,
        first=first,
        groups=groups,
        reward_attempts=reward_attempts,
        attempt=attempt,
        keeps=keeps,
    )
    return RolloutStream(
        settings, echo, prompts, judge, tokenizer.decode, Clock(), Ledger(folder or Path(tempfile.mkdtemp()))
    )


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.id for group in groups]


# -- judges that fail -----------------------------------------------------------------------------------------------


class Failing:
    """A judge that fails so often on prompts of these ids before it answers."""

    def __init__(self, times: dict[int, int]) -> None:
        self.times = Counter(times)
        self.asked: list[int] = []

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        self.asked.append(prompt.id)
        if self.times[prompt.id] > 0:
            self.times[prompt.id] -= 1
            raise ZeroDivisionError(f"no such thing as {prompt.id}")
        return await right_if_one(prompt, rollouts)


def begin(rollouts: RolloutStream, step: int, cut: dict[str, Any]) -> None:
    """Write the stream's start into its ledger, as the controller does."""
    settings = rollouts._settings
    config = Config(
        rollout=settings.rollout,
        algorithm=settings.algorithm,
        training=TrainingSection(steps=step + settings.groups // settings.rollout.groups_per_step),
        checkpoint=CheckpointSection(interval=1000),
    )
    rollouts._ledger.begun(step, cut.get("next", 0), cut.get("open", ()), bounds=bounds_of(config))


def replayed(folder: Path) -> LedgerHistory:
    """Return the ledger's content, which must contradict neither itself nor the bounds in force."""
    history = LedgerHistory.of(folder)
    problems = [*history.problems, *(problem for rule in BOUND_RULES for problem in rule(history))]
    assert problems == [], problems
    return history


def ledger_lines(folder: Path, event: str) -> list[tuple[Any, ...]]:
    """Those lines of the ledger, less their number and name; after an audit of all."""
    replayed(folder)
    return [tuple(line.values())[2:] for line in RunFiles(folder).ledger() if line["event"] == event]
