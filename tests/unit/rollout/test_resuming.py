"""The cut of a stream: a run that resumes from it trains on every prompt once, with any groups in flight."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from support.rollout_streams import Echo, Failing, begin, ids, replayed, right_if_one, source, stream
from titan_rl.config.sections import RolloutSection
from titan_rl.record.metrics import ages_of
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Completion, Group, Request

STEPS = 8
STRAGGLES = 60


class Stuck(Echo):
    """Answers the prompts of these ids never."""

    def __init__(self, *stuck: int) -> None:
        super().__init__([0])
        self.stuck = {f"prompt-{id}" for id in stuck}

    async def generate(self, request: Request) -> list[Completion]:
        if request.id in self.stuck:
            await asyncio.Event().wait()
        return await super().generate(request)


class Straggling(Echo):
    def __init__(self, delays: list[int], slow: int, flat: Callable[[int], bool]) -> None:
        super().__init__(delays, flat)
        self.slow = slow

    async def generate(self, request: Request) -> list[Completion]:
        if int(request.id.removeprefix("prompt-").partition("@")[0]) % self.slow == 0:
            for _ in range(STRAGGLES):
                await asyncio.sleep(0)
        return await super().generate(request)


async def test_prompts_newer_than_all_in_flight_are_not_forgotten(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """The newest issued prompts are trained on, while older ones are in flight and nothing new is admitted."""
    rollout = RolloutSection(groups_per_step=2, group_size=3, max_staleness_steps=2, overtake_steps=1)

    first = stream(Stuck(0, 1), source(tokenizer), tokenizer, 12, rollout=rollout, folder=tmp_path)
    begin(first, 0, {})
    async with aclosing(first):
        first.admit(4)
        groups = await asyncio.wait_for(first.take(2, 1), 5)
        first.trained(1, groups)
        cut = json.loads(json.dumps(first.saved(1)))
    trained, prompts, echo = ids(groups), source(tokenizer), Echo([0])
    echo.version = 1
    prompts.load_state_dict(cut)
    second = stream(echo, prompts, tokenizer, 10, rollout=rollout, first=2, folder=tmp_path)
    begin(second, 1, cut)
    async with aclosing(second):
        second.admit(4)
        for step in range(2, 7):
            groups = await second.take(2, step)
            second.trained(step, groups)
            trained += ids(groups)
            echo.version = step
            second.admit(2)
    assert trained == [2, 3, 0, 1, *range(4, 12)]
    replayed(tmp_path)


@dataclass(frozen=True)
class Life:
    """One process of a run: its delays, and the step after which it dies."""

    delays: list[int]
    slow: int  # each prompt whose id this divides takes STRAGGLES turns more
    pulls: list[int]  # loop turns until the generators serve a version
    steps: int  # made and checkpointed before it dies
    lost: bool  # another step was made, whose checkpoint never was


@dataclass(frozen=True)
class Settings:
    rollout: RolloutSection
    failing: bool  # the judge fails on every 23rd prompt
    dynamic: bool
    part_size: int = 0  # groups that a streamed step takes at a time; 0: the whole step


@st.composite
def runs(draw: st.DrawFn) -> tuple[Settings, list[Life]]:
    lag = draw(st.integers(0, 3))
    window = draw(st.integers(0, 2)) if lag else 0
    failing = draw(st.booleans())
    rollout = RolloutSection(
        groups_per_step=3 if failing else draw(st.integers(1, 3)),  # fewer failures in a row do not end a run
        group_size=3,
        max_staleness_steps=lag + window,
        overtake_steps=window,
    )
    life = st.builds(
        Life,
        delays=st.lists(st.integers(0, 9), min_size=2, max_size=7),
        slow=st.integers(2, 9),
        pulls=st.lists(st.integers(0, 20), min_size=1, max_size=4),
        steps=st.integers(1, 4),
        lost=st.booleans(),
    )
    lives = draw(st.lists(life, min_size=2, max_size=5))
    dynamic = not window and draw(st.booleans())
    part_size = 0 if window or dynamic else draw(st.integers(0, 2))
    return Settings(rollout, failing, dynamic, part_size), lives


class Run:
    """A run of several processes, each of which resumes from the last one's cut."""

    def __init__(self, tokenizer: TextTokenizer, settings: Settings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.folder = Path(mkdtemp())
        self.step = 0
        self.cut: dict[str, Any] = {}
        self.trained: list[int] = []

    async def live(self, life: Life, attempt: int, last: int) -> None:
        rollout, n = self.settings.rollout, self.settings.rollout.groups_per_step
        flat = (lambda id: id % 4 == 1) if self.settings.dynamic else (lambda id: False)
        echo, prompts = Straggling(life.delays, life.slow, flat), source(self.tokenizer)
        echo.version = self.step
        if self.cut:
            prompts.load_state_dict(self.cut)
        rollouts = stream(
            echo,
            prompts,
            self.tokenizer,
            n * (STEPS - self.step),
            judge=Failing(dict.fromkeys(range(2, 400, 23), 9)) if self.settings.failing else right_if_one,
            rollout=rollout,
            first=self.step + 1,
            folder=self.folder,
            attempt=attempt,
            dynamic_sampling=self.settings.dynamic,
        )
        begin(rollouts, self.step, self.cut)

        async def take(step: int) -> list[Group]:
            if not (size := self.settings.part_size):
                return await rollouts.take(n, step)
            groups = [group async for part in rollouts.parts(n, step, size) for group in part]
            return sorted(groups, key=lambda group: group.prompt.id)

        async def serve(version: int) -> None:
            for _ in range(life.pulls[version % len(life.pulls)]):
                await asyncio.sleep(0)
            echo.version = version
            rollouts.admit(n)

        syncing = asyncio.create_task(asyncio.sleep(0))
        async with aclosing(rollouts):
            rollouts.admit(n * (rollout.steps_ahead + 1))
            for step in range(self.step + 1, last + 1):
                groups = await take(step)
                assert len(groups) == n
                assert max(ages_of(step, groups)) <= rollout.max_staleness_steps
                rollouts.trained(step, groups)
                self.trained += ids(groups)
                await syncing
                syncing = asyncio.create_task(serve(step))
                if rollout.steps_ahead == 0:
                    await syncing
            self.step, self.cut = last, json.loads(json.dumps(rollouts.saved(last)))
            if life.lost and last < STEPS:
                rollouts.trained(last + 1, await take(last + 1))
            syncing.cancel()
            with suppress(asyncio.CancelledError):
                await syncing


TWICE = (  # the second process dies before it has started again all that was in flight when the first one died
    Settings(
        RolloutSection(groups_per_step=3, group_size=3, max_staleness_steps=5, overtake_steps=2),
        failing=True,
        dynamic=False,
    ),
    [
        Life([5, 0, 3, 9, 8, 1], slow=6, pulls=[9, 6, 14, 1], steps=3, lost=True),
        Life([1, 6, 5, 3, 6, 2, 2], slow=3, pulls=[7, 8], steps=1, lost=False),
        Life([2, 4, 0, 9, 1, 0], slow=9, pulls=[7, 1], steps=3, lost=True),
        Life([1, 6, 5, 3, 6, 2, 2], slow=3, pulls=[7, 1], steps=1, lost=False),
    ],
)


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes minutes
@example(drawn=TWICE)
@given(drawn=runs())
def test_every_prompt_has_one_fate_however_often_a_run_resumes(
    tokenizer: TextTokenizer, drawn: tuple[Settings, list[Life]]
) -> None:
    run = Run(tokenizer, drawn[0])

    async def body() -> None:
        *dying, survivor = drawn[1]
        for attempt, life in enumerate(dying, 1):
            await run.live(life, attempt, min(run.step + life.steps, STEPS))
        await run.live(replace(survivor, lost=False), len(drawn[1]), STEPS)

    asyncio.run(asyncio.wait_for(body(), 20))
    history = replayed(run.folder)
    assert len(run.trained) == len(set(run.trained)) == STEPS * drawn[0].rollout.groups_per_step
    lives = {id: life for id, life in history.prompts.items() if not life.undone}
    assert sorted(lives) == list(range(len(lives))), "a prompt was skipped"
    assert all(life.final for life in lives.values())
