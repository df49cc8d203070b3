"""Prompts that are solved drop out, hopeless ones wait, and a run that resumes chooses the same prompts."""

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rollout_streams import Echo, begin, ids, ledger_lines, stream
from titan_rl.config.sections import CurriculumSection, RolloutSection
from titan_rl.ext.curriculum.curriculum import Curriculum
from titan_rl.tasks.examples import Example
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Prompt, Rollout

BOTH = CurriculumSection(solved_visits=2, hopeless_wait=3)
SOLVED, HOPELESS, SOME = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


def source(
    text: TextTokenizer, n: int, chosen: CurriculumSection = BOTH, unfit: frozenset[int] = frozenset()
) -> PromptSource:
    task = Task([Example(f"{i}=", str(i), {"i": i}) for i in range(n)], [], curriculum=chosen, unfit=unfit)
    return PromptSource(task, text, seed=5)


def counts(metrics: dict[str, float]) -> tuple[float, ...]:
    return tuple(metrics[f"curriculum/{name}"] for name in ("active", "solved", "waiting"))


def test_a_prompt_drops_out_after_its_last_visits_were_solved() -> None:
    found = Curriculum(BOTH, 3)
    for rewards in (SOLVED, SOME, SOLVED):  # not in a row
        found.visited(0, rewards)
    assert not found.passes_over(0)
    found.visited(0, SOLVED)
    assert [found.passes_over(i) for i in range(3)] == [True, False, False]
    assert counts(found.metrics) == (2, 1, 0)
    found.visited(0, SOME)  # it was in flight when it dropped out
    assert not found.passes_over(0)


def test_a_hopeless_prompt_waits_for_its_turns() -> None:
    found = Curriculum(BOTH, 3)
    found.visited(1, HOPELESS)
    assert counts(found.metrics) == (2, 0, 1)
    assert [found.passes_over(1) for _ in range(5)] == [True, True, True, False, False]
    assert counts(found.metrics) == (3, 0, 0)


def test_what_counts_as_correct_is_the_users() -> None:
    chosen = CurriculumSection(solved_visits=1, hopeless_wait=1, correct_at=2.0)
    found = Curriculum(chosen, 9)
    for index, rewards in enumerate(([2, 3], [1, 1], [2, 1], [math.nan, 2.0], [math.nan])):
        found.visited(index, rewards)
    assert [found.passes_over(index) for index in range(5)] == [True, True, False, True, False]


def test_it_never_runs_dry_and_says_so() -> None:
    found = Curriculum(BOTH, 2, unfit=frozenset({1}))
    found.visited(0, HOPELESS)
    assert not found.passes_over(0)
    assert found.note == "curriculum: the 1 prompts that are not solved all wait: they are sampled now"
    for _ in range(2):
        found.visited(0, SOLVED)
    assert not found.passes_over(0)
    assert found.note == "curriculum: all 1 prompts are solved: an epoch of all of them begins again"
    assert counts(found.metrics) == (1, 0, 0)


def test_off_it_remembers_nothing(text: TextTokenizer) -> None:
    off = source(text, 5, CurriculumSection())
    for prompt in [off.next() for _ in range(20)]:
        off.visited(prompt.id, HOPELESS)
    assert off.metrics == {}
    assert off.cut([]) is None
    assert off.state_dict() == {"seed": 5, "examples": 5, "position": 20, "taken": []}


def visit(prompts: PromptSource, waiting: list[Prompt], bias: int) -> None:
    """Judge the oldest prompt in flight, by its example: a third of all are solved, a third hopeless."""
    prompt = waiting.pop(0)
    prompts.visited(prompt.id, (SOLVED, HOPELESS, SOME)[(prompt.row["i"] + bias) % 3])


def test_any_split_resumes_with_the_prompts_in_flight(text: TextTokenizer) -> None:
    @settings(deadline=None)
    @given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 5), st.integers(0, 2), st.integers(0, 40))
    def resumes(n: int, first: int, inflight: int, bias: int, second: int) -> None:
        def play(prompts: PromptSource, waiting: list[Prompt], steps: int) -> list[Any]:
            seen = []
            for _ in range(steps):
                waiting.append(prompts.next())
                seen.append((waiting[-1].id, waiting[-1].row["i"], prompts.take_note(), prompts.metrics))
                if len(waiting) > inflight:
                    visit(prompts, waiting, bias)
            return seen

        whole, flying = source(text, n), list[Prompt]()
        play(whole, flying, first)
        cut = json.dumps(whole.cut([prompt.id for prompt in flying]))
        rest = play(whole, [*flying], second)

        resumed = source(text, n)
        resumed.load_state_dict(json.loads(cut))
        assert json.loads(json.dumps(resumed.cut([]))) == json.loads(cut)  # it is cut again at once
        again = [resumed.next() for _ in flying]
        assert again == flying
        assert json.loads(json.dumps(resumed.cut([p.id for p in again]))) == json.loads(cut)
        assert play(resumed, again, second) == rest

    resumes()


def test_one_that_resumes_replaces_what_no_longer_fits(text: TextTokenizer) -> None:
    whole = source(text, 7)
    flying = [whole.next() for _ in range(3)]
    cut = json.loads(json.dumps(whole.cut([prompt.id for prompt in flying])))
    gone = flying[1].row["i"]
    resumed = source(text, 7, unfit=frozenset({gone}))
    resumed.load_state_dict(cut)
    found = [resumed.next() for _ in range(6)]
    assert [prompt.id for prompt in found] == list(range(6))
    assert [found[0], found[2]] == [flying[0], flying[2]]
    assert gone not in [prompt.row["i"] for prompt in found]


def test_turning_it_off_keeps_the_prompts_in_flight(text: TextTokenizer) -> None:
    whole = source(text, 7)
    flying = [whole.next() for _ in range(4)]
    whole.visited(0, SOLVED)
    cut = json.loads(json.dumps(whole.cut([1, 3])))
    off = source(text, 7, CurriculumSection())
    off.load_state_dict(cut)
    assert [off.next(), off.next()] == [flying[1], flying[3]]
    assert off.next().id == 4


def test_a_checkpoint_from_before_it_resumes_with_it(text: TextTokenizer) -> None:
    plain, resumed = source(text, 7, CurriculumSection()), source(text, 7)
    expected = [plain.next() for _ in range(12)]
    resumed.load_state_dict({"seed": 5, "examples": 7, "position": 4, "taken": [5], "next": 7, "open": [4, 6]})
    assert [resumed.next() for _ in range(6)] == [expected[4], *expected[6:11]]


async def by_example(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
    return ([1.0] * 3, [0.0] * 3, [1.0, 0.0, 1.0])[prompt.row["i"] % 3]


@settings(deadline=None)
@given(
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    lag=st.integers(0, 2),
    window=st.integers(0, 2),
    flat=st.booleans(),
    cut_at=st.integers(1, 5),
    size=st.integers(3, 12),
)
def test_a_cut_run_trains_every_prompt_once_and_each_on_its_own_example(
    tmp_path_factory: pytest.TempPathFactory,
    text: TextTokenizer,
    delays: list[int],
    lag: int,
    window: int,
    flat: bool,
    cut_at: int,
    size: int,
) -> None:
    """With prompts in flight, groups that overtake and groups that are dropped as flat; without a lag, the resumed run
    is the uninterrupted one."""
    window, steps = window if lag else 0, 6
    settings_of = RolloutSection(
        groups_per_step=2, group_size=3, max_staleness_steps=lag + window, overtake_steps=window
    )

    def run(folder: Path, cuts: Sequence[int]) -> dict[int, tuple[int, Any]]:
        seen: dict[int, tuple[int, Any]] = {}
        state: dict[str, Any] = {}

        async def life(first: int, last: int) -> dict[str, Any]:
            prompts, echo = source(text, size), Echo(delays)
            if state:
                prompts.load_state_dict(state)
            echo.version = first - 1
            n = 2 * (steps - first + 1)
            more = {"dynamic_sampling": flat, "max_refills": 3}
            rollouts = stream(
                echo, prompts, text, n, judge=by_example, rollout=settings_of, first=first, folder=folder, **more
            )
            begin(rollouts, first - 1, state)
            async with aclosing(rollouts):
                rollouts.admit(2 * (lag + 1))
                for step in range(first, last + 1):
                    groups = await rollouts.take(2, step)
                    rollouts.trained(step, groups)
                    for group in groups:
                        assert group.prompt.id not in seen
                        seen[group.prompt.id] = (step, group.prompt.row["i"])
                    echo.version = step
                    rollouts.admit(2)
                    seen[-step] = (step, rollouts.backlog.curriculum)
                return json.loads(json.dumps(rollouts.saved(last)))

        for first, last in zip((1, *(each + 1 for each in cuts)), (*cuts, steps), strict=True):
            open_before = dict(state.get("again", ()))
            state = asyncio.run(asyncio.wait_for(life(first, last), 60))
            for id, index in open_before.items():
                assert seen.get(id, (0, index))[1] == index
        return seen

    folders = [tmp_path_factory.mktemp("ledger") for _ in range(2)]
    resumed = run(folders[0], [cut_at])
    dropped = [id for id, *_ in ledger_lines(folders[0], "dropped")]
    done = sorted([*(id for id in resumed if id >= 0), *dropped])
    assert len(done) == len(set(done))
    if not lag:
        assert done == list(range(len(done)))
        assert resumed == run(folders[1], [])


async def test_what_is_trained_on_is_a_visit(text: TextTokenizer) -> None:
    prompts = source(text, 9, replace(BOTH, solved_visits=1))

    async def alike(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        return [float(prompt.id == 0)] * 3

    rollouts = stream(Echo([0]), prompts, text, 4, judge=alike)
    async with aclosing(rollouts):
        rollouts.admit(4)
        groups = await rollouts.take(2, 1)
        assert counts(dict(rollouts.backlog.curriculum)) == (9, 0, 0)
        rollouts.trained(1, groups)
        assert counts(dict(rollouts.backlog.curriculum)) == (7, 1, 1)
        cut = rollouts.cut()
    assert (cut["position"], cut["open"], cut["taken"]) == (4, [2, 3], [])
    assert cut["curriculum"] == {
        "solved": [(groups[0].prompt.row["i"], 1)],
        "waits": [(groups[1].prompt.row["i"], 3)],
    }


async def test_what_is_dropped_as_flat_is_a_visit_and_what_fails_is_none(text: TextTokenizer) -> None:
    prompts = source(text, 9, replace(BOTH, solved_visits=1))

    async def fails_or_solves(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        if prompt.id == 0:
            raise ZeroDivisionError("no reward")
        return [1.0] * 3 if prompt.id == 1 else [1.0, 0.0, 1.0]

    rollouts = stream(Echo([0]), prompts, text, 2, judge=fails_or_solves, reward_attempts=1, dynamic_sampling=True)
    async with aclosing(rollouts):
        rollouts.admit(2)
        assert ids(await rollouts.take(2, 1)) == [2, 3]
        assert counts(dict(rollouts.backlog.curriculum)) == (8, 1, 0)
