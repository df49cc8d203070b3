"""The stream's promises: order, bounded admission, a cursor that loses nothing, seeds that depend on nothing else."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.operations import instructions
from support.rollout_streams import Echo, ids, source, stream
from titan_rl.config.sections import RolloutSection
from titan_rl.record.metrics import ages_of
from titan_rl.rollout.stream import RolloutStream
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.seeds import derive, sample_seed
from titan_rl.wire.types import Completion, Request


@settings(deadline=None)
@given(
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    pulls=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    lag=st.integers(0, 4),
    window=st.integers(0, 3),
    n=st.integers(1, 3),
    begun=st.integers(0, 2),
)
def test_no_token_is_older_than_the_bound(
    tokenizer: TextTokenizer, delays: list[int], pulls: list[int], lag: int, window: int, n: int, begun: int
) -> None:
    """Whatever takes how long: sampling, or until the generators serve a version. Every prompt is trained on once."""
    window = window if lag else 0
    steps = 7

    async def body() -> None:
        echo = Echo(delays)
        echo.version = begun
        rollouts = stream(
            echo,
            source(tokenizer),
            tokenizer,
            n * (steps - begun),
            rollout=RolloutSection(
                groups_per_step=n, group_size=3, max_staleness_steps=lag + window, overtake_steps=window
            ),
            first=begun + 1,
        )
        trained: list[int] = []

        async def serve(version: int) -> None:
            for _ in range(pulls[version % len(pulls)]):
                await asyncio.sleep(0)
            echo.version = version
            rollouts.admit(n)

        syncing: asyncio.Task[None] | None = None
        async with aclosing(rollouts):
            rollouts.admit(n * (lag + 1))
            for step in range(begun + 1, steps + 1):
                groups = await rollouts.take(n, step)
                assert len(groups) == n
                if window == 0:
                    assert ids(groups) == list(range(len(trained), len(trained) + n))
                trained += ids(groups)
                assert max(ages_of(step, groups)) <= lag + window
                assert rollouts.backlog.inflight <= n * lag
                if syncing:
                    await syncing
                syncing = asyncio.create_task(serve(step))
                if lag == 0:
                    await syncing
            assert sorted(trained) == list(range(n * (steps - begun)))
            if syncing:
                await syncing

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_window_takes_groups_that_are_admitted_while_it_waits(tokenizer: TextTokenizer) -> None:
    """A weight sync ends while the step waits for its second group: the groups that it admits finish first."""

    class Stragglers(Echo):
        async def generate(self, request: Request) -> list[Completion]:
            if request.id in ("prompt-1", "prompt-2", "prompt-3"):
                await asyncio.Event().wait()
            return await super().generate(request)

    async def body() -> None:
        rollout = RolloutSection(groups_per_step=2, group_size=3, max_staleness_steps=2, overtake_steps=1)
        rollouts = stream(Stragglers([0]), source(tokenizer), tokenizer, 40, rollout=rollout)
        async with aclosing(rollouts):
            rollouts.admit(4)
            taking = asyncio.create_task(rollouts.take(2, 1))
            await asyncio.sleep(0.01)
            assert not taking.done()
            rollouts.admit(2)
            assert ids(await asyncio.wait_for(taking, 5)) == [0, 4]

    asyncio.run(body())


def test_the_bound_is_reached_and_a_window_moves_it(tokenizer: TextTokenizer) -> None:
    """The first group never finishes by itself: without a window the step waits for it, with one others come first."""

    class Straggler(Echo):
        def __init__(self) -> None:
            super().__init__([0])
            self.may_end = asyncio.Event()

        async def generate(self, request: Request) -> list[Completion]:
            version = self.version
            if request.id == "prompt-0":
                await self.may_end.wait()
            completions = await super().generate(request)
            return [replace(c, versions=[version, *c.versions][: len(c.tokens)]) for c in completions]

    async def reached(lag: int, window: int) -> tuple[int, int]:
        echo = Straggler()
        rollout = RolloutSection(
            groups_per_step=2, group_size=3, max_staleness_steps=lag + window, overtake_steps=window
        )
        rollouts = stream(echo, source(tokenizer), tokenizer, 40, rollout=rollout)
        async with aclosing(rollouts):
            rollouts.admit(2 * (lag + 1))
            for step in range(1, 10):
                taking = asyncio.create_task(rollouts.take(2, step))
                await asyncio.sleep(0.01)
                if not taking.done():
                    echo.may_end.set()
                groups = await taking
                if 0 in ids(groups):
                    return step, int(max(ages_of(step, groups)))
                echo.version = step
                rollouts.admit(2)
        raise AssertionError("never taken")

    assert asyncio.run(reached(lag=2, window=0)) == (1, 0)
    assert asyncio.run(reached(lag=1, window=2)) == (3, 2)
    assert asyncio.run(reached(lag=2, window=3)) == (4, 3)


def test_quick_generators_wait_rather_than_grow_stale(tokenizer: TextTokenizer) -> None:
    """Where sampling is quicker than training, two steps' worth in flight are enough. Where it takes four steps as
    long, more are in flight, enough to keep the trainers busy."""

    async def ages_with(*turns: int) -> tuple[int, int]:
        echo = Echo([*turns])
        oldest = 0
        rollout = RolloutSection(groups_per_step=2, group_size=3, max_staleness_steps=4)
        rollouts = stream(echo, source(tokenizer), tokenizer, rollout=rollout)
        async with aclosing(rollouts):
            rollouts.admit(10)
            for step in range(1, 40):
                groups = await rollouts.take(2, step)
                oldest = max(oldest, *ages_of(step, groups))
                for _ in range(10):  # training
                    await asyncio.sleep(0)
                echo.version = step
                rollouts.admit(2)
            return int(oldest), rollouts.backlog.inflight

    assert asyncio.run(ages_with(5))[0] <= 2
    assert asyncio.run(ages_with(*[0] * 7, 5))[0] <= 2
    for turns in ([38], [0] * 7 + [60]):  # one slow group is enough, although later ones have finished
        oldest, inflight = asyncio.run(ages_with(*turns))
        assert oldest <= 4
        assert inflight == 10


async def test_a_step_is_given_part_by_part_in_the_order_of_finishing(tokenizer: TextTokenizer) -> None:
    rollouts = stream(Echo([9, 1, 3, 5, 7]), source(tokenizer), tokenizer)  # 1 3 5 7 9 turns
    async with aclosing(rollouts):
        rollouts.admit(6)
        parts = [ids(part) async for part in rollouts.parts(5, 1, 2)]
        assert parts == [[0, 1], [2, 3], [4]]
        assert rollouts.backlog.inflight == 1
        assert [ids(part) async for part in rollouts.parts(1, 1, 4)] == [[5]]


async def test_a_run_resumes_without_the_groups_that_overtook(tokenizer: TextTokenizer) -> None:
    """Also one that resumes twice before the straggler is trained on."""

    rollout = RolloutSection(groups_per_step=1, group_size=3, max_staleness_steps=6, overtake_steps=4)
    prompts = source(tokenizer)
    seen: list[int] = []
    for life in range(3):
        echo = Echo([50, 0, 0, 0, 0])  # by count: the fifth request of a life is slow
        echo.requests = [None] * 4  # type: ignore[list-item]
        rollouts = stream(echo, prompts, tokenizer, 20, rollout=rollout, first=life + 1)
        async with aclosing(rollouts):
            rollouts.admit(3)
            echo.version = life
            await asyncio.sleep(0)
            groups = await rollouts.take(1, life + 1)
            seen += ids(groups)
            cursor = rollouts.cut()
        prompts = source(tokenizer)
        prompts.load_state_dict(json.loads(json.dumps(cursor)))
    assert seen == [1, 2, 3]
    assert [prompts.next().id for _ in range(2)] == [0, 4]


async def test_a_run_never_admits_what_it_will_not_train(tokenizer: TextTokenizer) -> None:
    echo = Echo([0])
    rollouts = stream(echo, source(tokenizer), tokenizer, groups=5)
    async with aclosing(rollouts):
        rollouts.admit(4)
        await rollouts.take(4, 1)
        rollouts.admit(4)
        await rollouts.take(1, 1)
    assert len(echo.requests) == 5


async def test_the_cursor_is_behind_what_is_in_flight(tokenizer: TextTokenizer) -> None:
    """Resuming from it samples the admitted, untrained groups again: none lost, none twice."""

    rollouts = stream(Echo([3, 0, 5]), source(tokenizer), tokenizer)
    async with aclosing(rollouts):
        rollouts.admit(6)
        taken = [g.prompt.id for g in await rollouts.take(2, 1)]
        resumed = source(tokenizer)
        resumed.load_state_dict(rollouts.cut())
    assert taken == [0, 1]
    assert resumed.next().id == 2


async def test_rewards_and_turns(tokenizer: TextTokenizer) -> None:
    rollouts = stream(Echo([0]), source(tokenizer), tokenizer)
    async with aclosing(rollouts):
        rollouts.admit(1)
        (group,) = await rollouts.take(1, 1)
    (rollout, *_) = group.rollouts
    assert rollout.branches[0].tokens == [*group.prompt.tokens, 8]
    assert rollout.branches[0].mask == [0] * len(group.prompt.tokens) + [1]
    assert rollout.text == "1"
    assert rollout.reward == 1.0


async def test_a_snapshots_cut_writes_nothing_and_a_checkpoints_is_preceded_by_its_events(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, folder=tmp_path)
    async with aclosing(rollouts):
        rollouts.admit(6)
        await rollouts.take(4, 1)
        before = rollouts._ledger._lines
        cut = rollouts.cut()
        assert rollouts._ledger._lines == before
        assert rollouts.saved(1) == cut
        assert list(RunFiles(tmp_path).ledger())[-1] == {"n": before, "event": "saved", "step": 1}


def test_a_later_stream_of_a_process_asks_under_other_names(tokenizer: TextTokenizer) -> None:
    async def body(attempt: int) -> list[str]:
        echo = Echo([0])
        rollouts = stream(echo, source(tokenizer), tokenizer, attempt=attempt)
        async with aclosing(rollouts):
            rollouts.admit(2)
            await rollouts.take(2, 1)
        return [request.id for request in echo.requests]

    assert asyncio.run(body(1)) == ["prompt-0", "prompt-1"]
    assert asyncio.run(body(3)) == ["prompt-0@3", "prompt-1@3"]


def test_seeds_depend_on_what_they_name_and_nothing_else() -> None:
    assert sample_seed(0, 5, 1) == sample_seed(0, 5, 1)
    seeds = {sample_seed(s, p, k) for s in range(3) for p in range(40) for k in range(8)}
    assert len(seeds) == 3 * 40 * 8
    assert all(0 <= s < 2**31 for s in seeds)
    assert derive(1, "a", 2) != derive(1, "a2")


FEW, MANY = 24, 96


async def take_all(rollouts: RolloutStream, n: int) -> None:
    assert len(await rollouts.take(n, 1)) == n


async def take_one_by_one(rollouts: RolloutStream, n: int) -> None:
    assert [len(part) async for part in rollouts.parts(n, 1, 1)] == [1] * n


@pytest.mark.parametrize("take", [take_all, take_one_by_one])
@pytest.mark.parametrize("window", [0, 1])
def test_a_group_costs_the_same_in_a_large_step(
    tokenizer: TextTokenizer, take: Callable[[RolloutStream, int], Awaitable[None]], window: int
) -> None:
    def step(n: int) -> Callable[[], None]:
        async def body() -> None:
            rollout = RolloutSection(
                groups_per_step=n, group_size=2, max_staleness_steps=1 + window, overtake_steps=window
            )
            rollouts = stream(Echo([*range(17)]), source(tokenizer), tokenizer, 4 * n, rollout=rollout)
            async with aclosing(rollouts):
                rollouts.admit(2 * n)
                await take(rollouts, n)
                assert rollouts.cut()["open"]

        return lambda: asyncio.run(body())

    few, many = (instructions(step(n), "rollout/stream.py") / n for n in (FEW, MANY))
    assert many < 1.5 * few
