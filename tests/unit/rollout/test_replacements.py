"""Groups without a signal or without rewards are replaced, and no other group's turn moves back."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from support.rollout_streams import Echo, Failing, ids, ledger_lines, source, stream
from titan_rl.batch.own_filter import filter_of
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RunError


async def test_flat_groups_are_replaced_round_by_round(tokenizer: TextTokenizer) -> None:
    """Of 0 1 2 3 are 0 and 3 flat; of their replacements 4 5 is 4; its own, 6, has a signal."""

    echo = Echo([2, 0, 1], flat={0, 3, 4}.__contains__)
    rollouts = stream(echo, source(tokenizer), tokenizer, groups=4, dynamic_sampling=True)
    async with aclosing(rollouts):
        rollouts.admit(4)
        groups = await rollouts.take(4, 1)
    assert ids(groups) == [1, 2, 5, 6]
    assert ids(rollouts.dropped) == [0, 3, 4]
    assert not any(group.flat for group in groups)
    assert len(echo.requests) == 7  # replacements come on top of what the run admits


async def test_replacements_take_nothing_from_the_steps_to_come(tokenizer: TextTokenizer) -> None:
    rollouts = stream(Echo([0], flat=lambda id: id < 2), source(tokenizer), tokenizer, 4, dynamic_sampling=True)
    async with aclosing(rollouts):
        rollouts.admit(2)
        first = await rollouts.take(2, 1)
        rollouts.admit(2)
        second = await rollouts.take(2, 1)
    assert (ids(first), ids(second)) == ([2, 3], [4, 5])
    assert rollouts.dropped == []  # only the last take's are listed


async def test_a_round_of_replacements_is_admitted_at_once(tokenizer: TextTokenizer) -> None:
    """All of a round are at the generators before the first of it is answered: the same batches in every run."""

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


async def test_a_step_goes_on_with_flat_groups_after_max_refills_rounds(tokenizer: TextTokenizer) -> None:
    echo = Echo([0], flat=lambda id: id != 1)
    rollouts = stream(echo, source(tokenizer), tokenizer, dynamic_sampling=True, max_refills=3)
    async with aclosing(rollouts):
        rollouts.admit(3)
        groups = await rollouts.take(3, 1)
    assert ids(groups) == [1, 7, 8]
    assert ids(rollouts.dropped) == [0, 2, 3, 4, 5, 6]
    assert len(echo.requests) == 3 + 3 * 2


async def test_refused_groups_are_replaced(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Beside a group whose judge fails, and a flat one."""
    judge, echo = Failing({1: 2}), Echo([2, 0, 1], flat={5}.__contains__)
    keeps = filter_of(lambda group: group.prompt.id not in (0, 4), "the filter")
    rollouts = stream(
        echo, source(tokenizer), tokenizer, 4, judge=judge, folder=tmp_path, keeps=keeps, dynamic_sampling=True
    )
    async with aclosing(rollouts):
        rollouts.admit(4)
        assert ids(await rollouts.take(4, 1)) == [2, 3, 6, 7]
        rollouts.trained(1, [])
    reasons = {line[0]: line[1].partition(":")[0] for line in ledger_lines(tmp_path, "dropped")}
    assert reasons == {0: "refused", 1: "failed", 4: "refused", 5: "flat"}


async def test_a_filter_that_refuses_everything_ends_the_run(tokenizer: TextTokenizer) -> None:
    echo = Echo([0])
    rollouts = stream(echo, source(tokenizer), tokenizer, keeps=lambda group: False, max_refills=2)
    async with aclosing(rollouts):
        rollouts.admit(2)
        with pytest.raises(RunError, match=r"expected task\.filter to keep 2 groups within algorithm\.max_refills = 2"):
            await rollouts.take(2, 1)
    assert len(echo.requests) == 2 * 3


async def test_without_dynamic_sampling_flat_groups_stay(tokenizer: TextTokenizer) -> None:
    rollouts = stream(Echo([0], flat=lambda id: True), source(tokenizer), tokenizer)
    async with aclosing(rollouts):
        rollouts.admit(2)
        assert ids(await rollouts.take(2, 1)) == [0, 1]
    assert rollouts.dropped == []


async def test_the_cursor_is_behind_the_replacements(tokenizer: TextTokenizer) -> None:
    rollouts = stream(Echo([1, 0], flat={1, 2}.__contains__), source(tokenizer), tokenizer, dynamic_sampling=True)
    async with aclosing(rollouts):
        rollouts.admit(2)
        assert ids(await rollouts.take(2, 1)) == [0, 3]
        resumed = source(tokenizer)
        resumed.load_state_dict(rollouts.cut())
    assert resumed.next().id == 4


async def test_a_group_whose_judge_fails_is_dropped_and_another_prompt_takes_its_place(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    judge = Failing({1: 2, 2: 1, 4: 2})
    rollouts = stream(Echo([2, 0, 1]), source(tokenizer), tokenizer, groups=4, judge=judge, folder=tmp_path)
    async with aclosing(rollouts):
        rollouts.admit(4)
        groups = await rollouts.take(4, 1)
        assert ids(groups) == [0, 2, 3, 5]
        assert ids(rollouts.dropped) == [1, 4]
        assert all(group.rewards == [1.0, 0.0, 1.0] for group in groups)
        rollouts.trained(1, groups)
    reason = "ZeroDivisionError: no such thing as"
    assert sorted(ledger_lines(tmp_path, "failed")) == [
        (id, attempt, f"{reason} {id}") for id, attempt in [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2)]
    ]
    assert ledger_lines(tmp_path, "dropped") == [(1, f"failed: {reason} 1", 3), (4, f"failed: {reason} 4", 3)]
    assert {line[0] for line in ledger_lines(tmp_path, "sampled")} == set(range(6))
    assert {line[0] for line in ledger_lines(tmp_path, "scored")} == {0, 2, 3, 5}


async def test_flat_and_failed_groups_are_replaced_together_but_failures_use_up_no_round(
    tokenizer: TextTokenizer,
) -> None:
    """0 is flat and 1 fails; of 4 and 5 the second fails; 6 is flat, and the one round for such is over."""

    judge = Failing({1: 1, 5: 1})
    echo = Echo([0], flat={0, 6}.__contains__)
    how: dict[str, Any] = {"dynamic_sampling": True, "max_refills": 1, "reward_attempts": 1}
    rollouts = stream(echo, source(tokenizer), tokenizer, groups=4, judge=judge, **how)
    async with aclosing(rollouts):
        rollouts.admit(4)
        assert ids(await rollouts.take(4, 1)) == [2, 3, 4, 6]
        assert ids(rollouts.dropped) == [0, 1, 5]


async def test_a_streamed_step_replaces_them_too(tokenizer: TextTokenizer, tmp_path: Path) -> None:
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
    assert [id for id, *_ in ledger_lines(tmp_path, "dropped")] == [1, 6]
