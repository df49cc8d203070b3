"""The stream's promises: order, bounded admission, a cursor that loses nothing, seeds that depend on nothing else."""

import asyncio
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from titan_rl.config.sections import AlgorithmSection, RolloutSection, TaskSection
from titan_rl.record.history import History
from titan_rl.record.ledger import Ledger, events
from titan_rl.record.metrics import ages_of
from titan_rl.rollout.judges import by_rule
from titan_rl.rollout.sampling import Judge, RewardFailed, StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks import tokenizer as characters
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import load_task
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.clock import Clock
from titan_rl.wire.errors import RankFailed
from titan_rl.wire.seeds import derive, sample_seed
from titan_rl.wire.types import Completion, Group, Prompt, Request, Sampling


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
        flat, n = self.flat(int(request.id.removeprefix("prompt-").partition("@")[0])), self.length
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
    return PromptSource(load_task(TaskSection(), seed=1, eval_size=10), tokenizer, seed=3)


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
    rollout: RolloutSection = RolloutSection(groups_per_step=4, group_size=3),  # noqa: B008 (frozen)
    first: int = 1,
    folder: Path | None = None,
    reward_attempts: int = 2,
    attempt: int = 1,
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
    )
    return RolloutStream(
        settings, echo, prompts, judge, tokenizer.decode, Clock(), Ledger(folder or Path(tempfile.mkdtemp()))
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
            rollout=RolloutSection(groups_per_step=n, group_size=3, lag=lag, window=window, pace=pace),
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
        rollout = RolloutSection(groups_per_step=2, group_size=3, lag=lag, window=window)
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
        rollout = RolloutSection(groups_per_step=2, group_size=3, lag=4, pace=pace)
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
        rollout = RolloutSection(groups_per_step=1, group_size=3, lag=2, window=4, pace=False)
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
            resumed.load_state_dict(rollouts.cut())
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
            resumed.load_state_dict(rollouts.cut())
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


# -- judges that fail -----------------------------------------------------------------------------------------------


class Failing:
    """A judge that fails so often on prompts of these ids before it answers."""

    def __init__(self, times: dict[int, int]) -> None:
        self.times = Counter(times)
        self.asked: list[int] = []

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        self.asked.append(prompt.id)
        if self.times[prompt.id] > 0:
            self.times[prompt.id] -= 1
            raise ZeroDivisionError(f"no such thing as {prompt.id}")
        return await right_if_one(prompt, completions, texts)


def told(folder: Path, event: str) -> list[tuple[Any, ...]]:
    """Those lines of the ledger, less their number and name; after an audit of all."""
    history = History()
    found = list(events(folder))
    for line in found:
        history.read(line)
    assert history.problems == []
    return [tuple(line.values())[2:] for line in found if line["event"] == event]


def test_a_group_whose_judge_fails_is_dropped_and_another_prompt_takes_its_place(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    async def body() -> None:
        judge = Failing({1: 2, 2: 1, 4: 2})
        rollouts = stream(Echo([2, 0, 1]), source(tokenizer), tokenizer, groups=4, judge=judge, folder=tmp_path)
        async with aclosing(rollouts):
            rollouts.admit(4)
            groups = await rollouts.take(4, 1)
            assert ids(groups) == [0, 2, 3, 5]
            assert ids(rollouts.dropped) == [1, 4]
            assert all(group.rewards == [1.0, 0.0, 1.0] for group in groups)
            rollouts.trained(1, groups)

    asyncio.run(body())
    reason = "ZeroDivisionError: no such thing as"
    assert sorted(told(tmp_path, "failed")) == [
        (id, attempt, f"{reason} {id}") for id, attempt in [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2)]
    ]
    assert told(tmp_path, "dropped") == [(1, f"failed: {reason} 1", 3), (4, f"failed: {reason} 4", 3)]
    assert {line[0] for line in told(tmp_path, "sampled")} == set(range(6))
    assert {line[0] for line in told(tmp_path, "scored")} == {0, 2, 3, 5}


def test_flat_and_failed_groups_are_replaced_together_but_failures_use_up_no_round(tokenizer: TextTokenizer) -> None:
    """0 is flat and 1 fails; of 4 and 5 the second fails; 6 is flat, and the one round for such is over."""

    async def body() -> None:
        judge = Failing({1: 1, 5: 1})
        echo = Echo([0], flat={0, 6}.__contains__)
        how: dict[str, Any] = {"dynamic_sampling": True, "max_refills": 1, "reward_attempts": 1}
        rollouts = stream(echo, source(tokenizer), tokenizer, groups=4, judge=judge, **how)
        async with aclosing(rollouts):
            rollouts.admit(4)
            assert ids(await rollouts.take(4, 1)) == [2, 3, 4, 6]
            assert ids(rollouts.dropped) == [0, 1, 5]

    asyncio.run(body())


def test_a_streamed_step_replaces_them_too(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    async def body() -> None:
        judge = Failing({1: 2, 6: 2})
        rollouts = stream(Echo([9, 1, 3, 5, 7]), source(tokenizer), tokenizer, judge=judge, folder=tmp_path)
        async with aclosing(rollouts):
            rollouts.admit(6)  # 1 3 5 7 9 1 turns
            parts = [ids(part) async for part in rollouts.parts(5, 1, 2)]
            assert sorted(id for part in parts for id in part) == [0, 2, 3, 4, 5]
            assert [len(part) for part in parts] == [2, 2, 1]
            assert ids(rollouts.dropped) == [1]
            assert rollouts.backlog.inflight == 1
            parts = [ids(part) async for part in rollouts.parts(1, 1, 4)]
            assert parts == [[7]]
            assert ids(rollouts.dropped) == [6]

    asyncio.run(body())
    assert [id for id, *_ in told(tmp_path, "dropped")] == [1, 6]


@settings(deadline=None, max_examples=100)
@given(
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    failing=st.sets(st.integers(0, 30), max_size=12),
    lag=st.integers(0, 3),
    window=st.integers(0, 3),
    pace=st.booleans(),
    n=st.integers(2, 4),
    stream_size=st.integers(0, 2),
    cut_at=st.integers(1, 5),
)
@example(  # the cut falls when the newest prompts have overtaken all that are in flight
    delays=[2, 3, 0, 0, 2],
    failing={0, 1, 2, 3, 18},
    lag=2,
    window=1,
    pace=False,
    n=3,
    stream_size=0,
    cut_at=5,
)
def test_failures_move_no_bound_and_lose_no_prompt(
    tokenizer: TextTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    delays: list[int],
    failing: set[int],
    lag: int,
    window: int,
    pace: bool,
    n: int,
    stream_size: int,
    cut_at: int,
) -> None:
    """Whichever fail, and in a run that is cut and goes on: every prompt is trained on once or dropped once, no token
    is too old, and the ledger agrees. Unless so many fail in a row that the run ends."""
    window = window if lag and not stream_size else 0
    steps, folder = 6, tmp_path_factory.mktemp("ledger")
    trained: dict[int, int] = {}

    async def life(prompts: PromptSource, first: int, last: int) -> dict[str, Any]:
        judge = Failing(dict.fromkeys(failing, 1))
        echo = Echo(delays)
        echo.version = first - 1
        rollouts = stream(
            echo,
            prompts,
            tokenizer,
            n * (steps - first + 1),
            rollout=RolloutSection(groups_per_step=n, group_size=3, lag=lag, window=window, pace=pace),
            first=first,
            judge=judge,
            folder=folder,
            reward_attempts=1,
        )
        rollouts._ledger.begun(first - 1, cut.get("next", 0), cut.get("open", []))
        async with aclosing(rollouts):
            rollouts.admit(n * (lag + 1))
            for step in range(first, last + 1):
                if stream_size:
                    groups = [g async for part in rollouts.parts(n, step, stream_size) for g in part]
                    groups.sort(key=lambda group: group.prompt.id)
                else:
                    groups = await rollouts.take(n, step)
                assert len(groups) == n
                assert max(ages_of(step, groups)) <= lag + window
                assert {*ids(rollouts.dropped)} <= failing
                rollouts.trained(step, groups)
                trained.update(dict.fromkeys(ids(groups), step))
                echo.version = step
                rollouts.admit(n)
            return json.loads(json.dumps(rollouts.saved(last)))

    cut: dict[str, Any] = {}
    try:
        cut = asyncio.run(asyncio.wait_for(life(source(tokenizer), 1, cut_at), 20))
        resumed = source(tokenizer)
        resumed.load_state_dict(cut)
        asyncio.run(asyncio.wait_for(life(resumed, cut_at + 1, steps), 20))
    except RewardFailed:
        assert len(failing) >= n
        return
    dropped = {id for id, *_ in told(folder, "dropped")}
    assert dropped <= failing
    assert trained.keys().isdisjoint(failing)
    assert len(trained) == n * steps
    assert {*trained, *dropped} == set(range(n * steps + len(dropped)))
    assert {attempt for *_, attempt in told(folder, "admitted")} <= {1, 2}


def test_with_a_window_the_groups_behind_a_failed_one_move_up(tokenizer: TextTokenizer) -> None:
    """Two a step, and 0 fails. 4 5 6 do not end by themselves: were 6 simply one more of their turn, all three would be
    due at step 4. But 4 has moved up, and is waited for at step 3."""

    class Stragglers(Echo):
        may_end = asyncio.Event()

        async def generate(self, request: Request) -> list[Completion]:
            if request.id in ("prompt-4", "prompt-5", "prompt-6"):
                await self.may_end.wait()
            return await super().generate(request)

    async def body() -> None:
        echo = Stragglers([0])
        rollout = RolloutSection(groups_per_step=2, group_size=3, lag=2, window=1, pace=False)
        rollouts = stream(echo, source(tokenizer), tokenizer, 40, rollout=rollout, judge=Failing({0: 2}))
        found: list[list[int]] = []
        waited: list[int] = []
        async with aclosing(rollouts):
            rollouts.admit(6)
            for step in range(1, 5):
                taking = asyncio.create_task(rollouts.take(2, step))
                await asyncio.sleep(0.01)
                if not taking.done():
                    waited.append(step)
                    echo.may_end.set()
                found.append(ids(await taking))
                echo.version = step
                rollouts.admit(2)
        assert found == [[1, 2], [3, 7], [4, 8], [5, 6]]
        assert waited == [3]

    asyncio.run(body())


def test_a_reward_that_always_fails_ends_the_run_by_the_first_prompt(tokenizer: TextTokenizer) -> None:
    """After a step's worth in a row; one success in between, and the count begins anew."""

    async def taken(failing: Sequence[int]) -> list[int]:
        rollouts = stream(Echo([2, 0, 1]), source(tokenizer), tokenizer, judge=Failing(dict.fromkeys(failing, 2)))
        async with aclosing(rollouts):
            rollouts.admit(4)
            return ids(await rollouts.take(4, 1))

    with pytest.raises(RewardFailed, match="the reward failed on prompt 0: ZeroDivisionError") as raised:
        asyncio.run(taken(range(99)))
    assert "4 groups in a row had no rewards" in raised.value.details
    assert "test_stream.py" in raised.value.details
    assert asyncio.run(taken([0, 1, 3, 5, 6, 8])) == [2, 4, 7, 9]


def test_a_meshs_failure_is_no_verdict(tokenizer: TextTokenizer) -> None:
    async def body() -> None:
        asked: list[int] = []

        async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
            asked.append(prompt.id)
            raise RankFailed("reward_model[dp=0 tp=0] failed in scores: RuntimeError")

        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
        async with aclosing(rollouts):
            rollouts.admit(1)
            with pytest.raises(RankFailed, match="reward_model"):
                await rollouts.take(1, 1)
        assert asked == [0]

    asyncio.run(body())


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, 0.0, float("nan")], [1.0, 0.0, float("inf")]])
def test_rewards_are_one_a_sample_and_finite(tokenizer: TextTokenizer, rewards: list[float]) -> None:
    async def body() -> None:
        async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
            return rewards

        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
        async with aclosing(rollouts):
            rollouts.admit(4)
            with pytest.raises(RewardFailed, match="expected 3 finite rewards, found"):
                await rollouts.take(4, 1)

    asyncio.run(body())


def test_a_function_that_hangs_stops_neither_the_loop_nor_the_next_group(tokenizer: TextTokenizer) -> None:
    """Of all four the second hangs, on both attempts; it is dropped, and two threads are left behind."""
    stuck = threading.Event()

    async def body() -> None:
        def reward(prompt: Prompt, text: str) -> float:
            if prompt.id == 1:
                stuck.wait(60)
            return float(text == "1")

        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=by_rule(reward, 0.2))
        async with aclosing(rollouts):
            rollouts.admit(4)
            taking = asyncio.create_task(rollouts.take(4, 1))
            turns = 0
            while not taking.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert ids(await taking) == [0, 2, 3, 4]
            assert turns > 10
            assert ids(rollouts.dropped) == [1]
            assert rollouts._sampler.failures == []

    began = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - began < 10
    left = [thread for thread in threading.enumerate() if thread.name == "reward" and thread.is_alive()]
    assert all(thread.daemon for thread in left)
    stuck.set()


def test_a_function_runs_once_at_a_time_in_order_on_one_thread_and_what_it_raises_is_its_own() -> None:
    calls: list[tuple[int, str]] = []
    errors: list[BaseException] = [SystemExit(3), StopIteration(), ZeroDivisionError("mine"), TimeoutError("mine too")]

    def reward(prompt: Prompt, text: str) -> float:
        calls.append((threading.get_ident(), f"{prompt.id} begins"))
        time.sleep(0.002)
        calls.append((threading.get_ident(), f"{prompt.id} ends"))
        if prompt.id < len(errors):
            raise errors[prompt.id]
        return float(prompt.id)

    async def body() -> list[Any]:
        judge, done = by_rule(reward, 30), Completion([], [], [], "stop")
        asked = [judge(Prompt(id, "", [], ""), [done] * 2, ["", ""]) for id in range(8)]
        return await asyncio.gather(*asked, return_exceptions=True)

    *raised, a, b, c, d = asyncio.run(body())
    assert [str(error) for error in raised] == ["SystemExit(3)", "coroutine raised StopIteration", "mine", "mine too"]
    assert all(isinstance(error, Exception) for error in raised)
    assert [a, b, c, d] == [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
    assert len({thread for thread, _ in calls} - {threading.get_ident()}) == 1
    times = {id: 1 if id < len(errors) else 2 for id in range(8)}
    assert [what for _, what in calls] == [
        f"{id} {what}" for id in range(8) for _ in range(times[id]) for what in ("begins", "ends")
    ]


def test_a_snapshots_cut_writes_nothing_and_a_checkpoints_is_preceded_by_its_events(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    async def body() -> None:
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, folder=tmp_path)
        async with aclosing(rollouts):
            rollouts.admit(6)
            await rollouts.take(4, 1)
            before = rollouts._ledger._lines
            cut = rollouts.cut()
            assert rollouts._ledger._lines == before
            assert rollouts.saved(1) == cut
            assert list(events(tmp_path))[-1] == {"n": before, "event": "saved", "step": 1}

    asyncio.run(body())


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
