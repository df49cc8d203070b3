import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_rl.advantages import group_relative, with_advantages
from titan_rl.types import Completion, Group, Prompt, Rollout, Turn

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=32)


def test_by_hand() -> None:
    """The sample standard deviation of (1, 0, 0, 1) is sqrt(1/3), as TRL computes it, not the population's 1/2."""
    high = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert group_relative([1, 0, 0, 1], normalize_std=True) == pytest.approx([high, -high, -high, high])
    assert group_relative([1, 0, 0, 1], normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_relative([1, 0], normalize_std=True, eps=0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@given(st.floats(-1e6, 1e6), st.integers(0, 40), st.booleans())
def test_a_flat_group_is_exactly_zero(reward: float, size: int, normalize_std: bool) -> None:
    assert group_relative([reward] * size, normalize_std=normalize_std) == [0.0] * size


@given(rewards, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_rewards_order(values: list[float], normalize_std: bool) -> None:
    got = group_relative(values, normalize_std=normalize_std)
    assert math.fsum(got) == pytest.approx(0, abs=1e-6)
    ranked = [a for _, a in sorted(zip(values, got, strict=True))]
    assert ranked == sorted(ranked)


@given(rewards)
def test_normalized_advantages_have_unit_spread(values: list[float]) -> None:
    assume(len(values) > 1)
    assume(statistics.stdev(values) > 1)
    assert statistics.stdev(group_relative(values, normalize_std=True)) == pytest.approx(1, abs=1e-3)


def test_with_advantages_changes_nothing_else() -> None:
    turn = Turn([1], Completion([2], [-0.5], [0], "stop"))
    group = Group(Prompt(0, "", [1], ""), [Rollout([turn], "", reward) for reward in (1.0, 0.0)])
    got = with_advantages(group, normalize_std=False)
    assert [r.advantage for r in got.rollouts] == [0.5, -0.5]
    assert [r.advantage for r in group.rollouts] == [0.0, 0.0]
    assert (got.prompt, got.rewards) == (group.prompt, group.rewards)
    assert [r.turns for r in got.rollouts] == [[turn], [turn]]
