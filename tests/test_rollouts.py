"""The stream's promises: order, bounded admission, a cursor that loses nothing, seeds that depend on nothing else."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl import tokenizer as characters
from titan_rl.clock import Clock
from titan_rl.config import Algorithm, Rollout, Task
from titan_rl.data import PromptSource
from titan_rl.ledger import Ledger
from titan_rl.metrics import ages_of
from titan_rl.reward_model import by_rule
from titan_rl.rollouts import Judge, RolloutStream
from titan_rl.seeds import derive, sample_seed
from titan_rl.tasks import load_task
from titan_rl.tokenizer import TextTokenizer
from titan_rl.types import Completion, Group, Prompt, Request, Sampling


class Echo:
    """Answers a request after as many loop turns as `delays` says, out of order on purpose. A prompt whose id is in
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
        flat, n = self.flat(int(request.id.removeprefix("prompt-"))), self.length
        return [
            Completion([8 if flat else 8 + k % 2] * n, [-0.5] * n, [self.version] * n, "stop")
            for k in range(len(request.seeds))
        ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    characters.build(folder)
    return TextTokenizer.load(folder)


def source(tokenizer: TextTokenizer) -> PromptSource:
    return PromptSource(load_task(Task(), seed=1, eval_size=10), tokenizer, seed=3)


async def right_if_one(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
    return [float(text == "1") for text in texts]


def stream(
    echo: Echo,
    prompts: PromptSource,
    tokenizer: TextTokenizer,
    groups: int = 100,
    *,
    judge: Judge = right_if_one,
    sampling: Sampling | None = None,
    rollout: Rollout = Rollout(groups_per_step=4, group_size=3),  # noqa: B008 (frozen)
    first: int = 1,
    **algorithm: Any,
) -> RolloutStream:
    return RolloutStream(
        echo,
        prompts,
        judge,
        tokenizer.decode,
        algorithm=Algorithm(**algorithm),
        rollout=rollout,
        sampling=sampling or Sampling(4),
        first=first,
        groups=groups,
        seed=7,
        clock=Clock(),
        ledger=Ledger(Path(tempfile.mkdtemp())),
    )


@settings(deadline=None, max_examples=100)  # the first source imports torch
@given(
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    pulls=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    lag=st.integers(0, 4),
    window=st.integers(0, 3),
    pace=st.booleans(),
    n=st.integers(1, 3),
    begun=st.integers(0, 2),
)
def test_no_token_is_older_than_the_bound(
    tokenizer: TextTokenizer, delays: list[int], pulls: list[int], lag: int, window: int, pace: bool, n: int, begun: int
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
            rollout=Rollout(groups_per_step=n, group_size=3, lag=lag, window=window, pace=pace),
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

    asyncio.run(asyncio.wait_for(body(), 20))


def test_the_bound_is_reached_and_a_window_moves_it(tokenizer: TextTokenizer) -> None:
    """The first group never finishes by itself: without a window nothing goes on, with one the others do, so long."""

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
        rollout = Rollout(groups_per_step=2, group_size=3, lag=lag, window=window)
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
    long, there are as many more as keep the trainers busy."""

    async def ages_with(pace: bool, turns: int) -> tuple[int, int]:
        echo = Echo([turns])
        oldest = 0
        rollout = Rollout(groups_per_step=2, group_size=3, lag=4, pace=pace)
        rollouts = stream(echo, source(tokenizer), tokenizer, rollout=rollout)
        async with aclosing(rollouts):
            rollouts.admit(10)
            for step in range(1, 20):
                groups = await rollouts.take(2, step)
                oldest = max(oldest, *ages_of(step, groups))
                for _ in range(10):  # training
                    await asyncio.sleep(0)
                echo.version = step
                rollouts.admit(2)
            return int(oldest), rollouts.backlog.inflight

    assert asyncio.run(ages_with(pace=False, turns=5)) == (4, 10)
    assert asyncio.run(ages_with(pace=True, turns=5))[0] <= 2
    oldest, inflight = asyncio.run(ages_with(pace=True, turns=38))
    assert oldest <= 4
    assert inflight == 10


def test_a_step_is_given_part_by_part_in_the_order_of_finishing(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([9, 1, 3, 5, 7]), source(tokenizer), tokenizer)  # 1 3 5 7 9 turns
        async with aclosing(rollouts):
            rollouts.admit(6)
            parts = [ids(part) async for part in rollouts.parts(5, 1, 2)]
            assert parts == [[0, 1], [2, 3], [4]]
            assert rollouts.backlog.inflight == 1
            assert [ids(part) async for part in rollouts.parts(1, 1, 4)] == [[5]]

    asyncio.run(body())


def test_a_run_resumes_without_the_groups_that_overtook(tokenizer: TextTokenizer) -> None:
    """Also one that resumes twice before the straggler is trained on."""

    async def body() -> None:
        rollout = Rollout(groups_per_step=1, group_size=3, lag=2, window=4, pace=False)
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
                cursor = rollouts.cut(life + 1)
            prompts = source(tokenizer)
            prompts.load_state_dict(json.loads(json.dumps(cursor)))
        assert seen == [1, 2, 3]
        assert [prompts.next().id for _ in range(2)] == [0, 4]

    asyncio.run(body())


def test_a_run_never_admits_what_it_will_not_train(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        echo = Echo([0])
        rollouts = stream(echo, source(tokenizer), tokenizer, groups=5)
        async with aclosing(rollouts):
            rollouts.admit(4)
            await rollouts.take(4, 1)
            rollouts.admit(4)
            await rollouts.take(1, 1)
        assert len(echo.requests) == 5

    asyncio.run(body())


def test_the_cursor_is_behind_what_is_in_flight(tokenizer: TextTokenizer) -> None:
    """Resuming from it samples the admitted, untrained groups again: none lost, none twice."""

    async def body() -> None:
        rollouts = stream(Echo([3, 0, 5]), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(6)
            taken = [g.prompt.id for g in await rollouts.take(2, 1)]
            resumed = source(tokenizer)
            resumed.load_state_dict(rollouts.cut(1))
        assert taken == [0, 1]
        assert resumed.next().id == 2

    asyncio.run(body())


def test_rewards_and_turns(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(1)
            (group,) = await rollouts.take(1, 1)
        (rollout, *_) = group.rollouts
        assert rollout.tokens == [*group.prompt.tokens, 8]
        assert rollout.mask == [0] * len(group.prompt.tokens) + [1]
        assert rollout.text == "1"
        assert rollout.reward == 1.0

    asyncio.run(body())


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.id for group in groups]


def test_flat_groups_are_replaced_round_by_round(tokenizer: TextTokenizer) -> None:
    """Of 0 1 2 3 are 0 and 3 flat; of their replacements 4 5 is 4; its own, 6, has a signal."""

    async def body() -> None:
        echo = Echo([2, 0, 1], flat={0, 3, 4}.__contains__)
        rollouts = stream(echo, source(tokenizer), tokenizer, groups=4, dynamic_sampling=True)
        async with aclosing(rollouts):
            rollouts.admit(4)
            groups = await rollouts.take(4, 1)
        assert ids(groups) == [1, 2, 5, 6]
        assert ids(rollouts.dropped) == [0, 3, 4]
        assert not any(group.flat for group in groups)
        assert len(echo.requests) == 7  # replacements come on top of what the run admits

    asyncio.run(body())


def test_replacements_take_nothing_from_the_steps_to_come(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([0], flat=lambda id: id < 2), source(tokenizer), tokenizer, 4, dynamic_sampling=True)
        async with aclosing(rollouts):
            rollouts.admit(2)
            first = await rollouts.take(2, 1)
            rollouts.admit(2)
            second = await rollouts.take(2, 1)
        assert (ids(first), ids(second)) == ([2, 3], [4, 5])
        assert rollouts.dropped == []  # of the last take only

    asyncio.run(body())


def test_a_round_of_replacements_is_admitted_at_once(tokenizer: TextTokenizer) -> None:
    """All of a round are at the generators before the first of it is answered: the same batches in every run."""

    async def body() -> None:
        echo = Echo([5], flat=lambda id: id < 6)
        rollouts = stream(echo, source(tokenizer), tokenizer, dynamic_sampling=True)
        async with aclosing(rollouts):
            rollouts.admit(6)
            taking = asyncio.create_task(rollouts.take(6, 1))
            seen = set()
            while not taking.done():
                seen.add((len(echo.requests), echo.running))
                await asyncio.sleep(0)
            assert {requests for requests, _ in seen} <= {0, 6, 12}
            assert (12, 6) in seen
            assert ids(await taking) == list(range(6, 12))

    asyncio.run(body())


def test_a_step_goes_on_with_flat_groups_after_max_refills_rounds(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        echo = Echo([0], flat=lambda id: id != 1)
        rollouts = stream(echo, source(tokenizer), tokenizer, dynamic_sampling=True, max_refills=3)
        async with aclosing(rollouts):
            rollouts.admit(3)
            groups = await rollouts.take(3, 1)
        assert ids(groups) == [1, 7, 8]
        assert ids(rollouts.dropped) == [0, 2, 3, 4, 5, 6]
        assert len(echo.requests) == 3 + 3 * 2

    asyncio.run(body())


def test_without_dynamic_sampling_flat_groups_stay(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([0], flat=lambda id: True), source(tokenizer), tokenizer)
        async with aclosing(rollouts):
            rollouts.admit(2)
            assert ids(await rollouts.take(2, 1)) == [0, 1]
        assert rollouts.dropped == []

    asyncio.run(body())


def test_the_cursor_is_behind_the_replacements(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        rollouts = stream(Echo([1, 0], flat={1, 2}.__contains__), source(tokenizer), tokenizer, dynamic_sampling=True)
        async with aclosing(rollouts):
            rollouts.admit(2)
            assert ids(await rollouts.take(2, 1)) == [0, 3]
            resumed = source(tokenizer)
            resumed.load_state_dict(rollouts.cut(1))
        assert resumed.next().id == 4

    asyncio.run(body())


def test_long_rollouts_are_punished_and_their_rewards_stay(tokenizer: TextTokenizer) -> None:
    """Three of at most four tokens, a buffer of two: half of the penalty."""

    async def body() -> None:
        echo = Echo([0], length=3)
        how = {"overlong_buffer": 2, "overlong_penalty": 0.25}
        rollouts = stream(echo, source(tokenizer), tokenizer, judge=by_rule(lambda prompt, text: 1.0), **how)
        async with aclosing(rollouts):
            rollouts.admit(1)
            (group,) = await rollouts.take(1, 1)
        assert group.rewards == [1.0] * 3
        assert [r.penalty for r in group.rollouts] == [0.125] * 3
        assert group.signals == [0.875] * 3

    asyncio.run(body())


def test_a_judge_may_take_its_time_and_sees_tokens_and_texts(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        seen: list[tuple[int, list[list[int]], list[str]]] = []

        async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
            for _ in range(9 - prompt.id):  # the first is judged last
                await asyncio.sleep(0)
            seen.append((prompt.id, [c.tokens for c in completions], list(texts)))
            return [prompt.id + 0.1 * k for k in range(len(completions))]

        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
        async with aclosing(rollouts):
            rollouts.admit(3)
            groups = await rollouts.take(3, 1)
        assert [group.rewards for group in groups] == [[i, i + 0.1, i + 0.2] for i in range(3)]
        assert [id for id, _, _ in seen] == [2, 1, 0]
        assert seen[0][1:] == ([[8], [9], [8]], ["1", "2", "1"])

    asyncio.run(body())


def test_a_judges_failure_is_the_takers(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
            raise ZeroDivisionError

        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
        async with aclosing(rollouts):
            rollouts.admit(1)
            with pytest.raises(ZeroDivisionError):
                await rollouts.take(1, 1)

    asyncio.run(body())


def test_seeds_depend_on_what_they_name_and_nothing_else() -> None:
    assert sample_seed(0, 5, 1) == sample_seed(0, 5, 1)
    seeds = {sample_seed(s, p, k) for s in range(3) for p in range(40) for k in range(8)}
    assert len(seeds) == 3 * 40 * 8
    assert all(0 <= s < 2**31 for s in seeds)
    assert derive(1, "a", 2) != derive(1, "a2")
