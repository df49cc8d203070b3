"""task.reward_workers = 0: the core's own judge of functions, on a thread of this process."""

import math
from collections.abc import Sequence

import pytest

from titan_rl.config.sections import Config, TaskSection
from titan_rl.tasks.judging import RewardJudges, training_rubric
from titan_rl.tasks.reward_thread import RewardHung
from titan_rl.tasks.rubric import RewardUnusable
from titan_rl.wire.parts import PARTS, PartMissing
from titan_rl.wire.types import Judgement, Prompt, Rollout


def judges(name: str = "support.hostile_rewards:obey", workers: int = 0) -> RewardJudges:
    return RewardJudges(Config(task=TaskSection(reward=name, reward_workers=workers, reward_seconds=1.0)))


async def judged(calls: RewardJudges, *texts: str, name: str = "support.hostile_rewards:obey") -> Sequence[Judgement]:
    judge = calls.judge(training_rubric(TaskSection(reward=name)), attempts=2)
    found = await judge(Prompt(0, "q", [], "a"), [Rollout([], text, math.nan) for text in texts])
    return [each for each in found if isinstance(each, Judgement)]


async def test_a_function_that_raises_or_exits_costs_only_its_own_answer() -> None:
    right, raised, left, nan, last = await judged(judges(), "ok 1", "raise", "sys.exit", "nan", "ok 2")
    assert (right, last) == (Judgement(1.0), Judgement(2.0))
    assert all(math.isnan(each.reward) for each in (raised, left, nan))
    assert "ZeroDivisionError: mine" in raised.error
    assert "SystemExit" in left.error


async def test_a_function_that_hangs_fails_its_group_and_no_later_one() -> None:
    calls = judges()
    with pytest.raises(RewardHung, match="did not return within 1 s"):
        await judged(calls, "sleep 5", "ok 1")
    assert await judged(calls, "ok 3") == [Judgement(3.0)]
    await calls.close()


async def test_a_function_that_cannot_be_imported_ends_the_run() -> None:
    with pytest.raises(RewardUnusable, match="no_such_module"):
        await judged(judges("no_such_module:score"), "ok 1", name="no_such_module:score")


async def test_processes_need_their_part_and_the_simplest_rewards_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "reward processes", "ext.gone.reward_pool:reward_pool")
    with pytest.raises(PartMissing, match=r"task\.reward_workers: expected an installation with titan_rl/ext/gone"):
        await judged(judges(workers=4), "ok 1")
    judge = judges("exact", workers=4).judge(training_rubric(TaskSection(reward="exact")))
    assert await judge(Prompt(0, "q", [], "a"), [Rollout([], text, math.nan) for text in "ab"]) == [1.0, 0.0]
