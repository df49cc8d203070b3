import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_rl.batch.advantages import (
    discounted,
    gae,
    group_relative,
    leave_one_out,
    soft_overlong_punishment,
    whiten,
)

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=32)
reals = st.floats(-10, 10)
Trajectory = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Rewards, values, mask."""
    steps = draw(st.lists(st.tuples(reals, reals, st.integers(0, 1)), max_size=12))
    r, v, m = (np.array(column) for column in zip(*steps, strict=True)) if steps else (np.zeros(0),) * 3
    return r, v, m


def test_group_relative_by_hand() -> None:
    """The sample standard deviation of (1, 0, 0, 1) is sqrt(1/3), as TRL computes it, not the population's 1/2."""
    high = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert group_relative([1, 0, 0, 1], normalize_std=True) == pytest.approx([high, -high, -high, high])
    assert group_relative([1, 0, 0, 1], normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_relative([1, 0], normalize_std=True, eps=0) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


@given(st.floats(-1e6, 1e6), st.integers(0, 40), st.booleans())
def test_a_flat_group_is_exactly_zero(reward: float, size: int, normalize_std: bool) -> None:
    assert group_relative([reward] * size, normalize_std=normalize_std) == [0.0] * size
    assert leave_one_out([reward] * size) == [0.0] * size


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


def test_leave_one_out_by_hand() -> None:
    assert leave_one_out([1, 0, 0, 4]) == pytest.approx([1 - 4 / 3, -5 / 3, -5 / 3, 4 - 1 / 3])
    assert leave_one_out([3, 1]) == [2, -2]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=32))
def test_leave_one_out_is_n_over_n_minus_1_times_the_distance_from_the_mean(values: list[float]) -> None:
    n, mean = len(values), math.fsum(values) / len(values)
    assert leave_one_out(values) == pytest.approx([n / (n - 1) * (r - mean) for r in values], abs=1e-9)


def test_discounted_by_hand() -> None:
    rewards, on = np.array([1.0, 0.0, 2.0]), np.ones(3)
    assert discounted(rewards, on, 0.5).tolist() == [1 + 0.25 * 2, 0.5 * 2, 2]
    assert discounted(rewards, on, 1.0).tolist() == [3, 2, 2]
    assert discounted(rewards, on, 0.0).tolist() == rewards.tolist()


def test_what_a_tool_said_is_no_step_of_the_discount() -> None:
    """Two sampled tokens, two of the tool's output, one sampled token."""
    rewards, mask = np.array([0.0, 1.0, 50.0, 50.0, 4.0]), np.array([1, 1, 0, 0, 1])
    assert discounted(rewards, mask, 0.5).tolist() == [0.5 * (1 + 0.5 * 4), 1 + 0.5 * 4, 0, 0, 4]


def test_gae_by_hand() -> None:
    """delta_2 = 1 - 0.5, delta_1 = 0.9 x 0.5 - 0.25, delta_0 = 0.9 x 0.25 - 0.125; gamma lambda = 0.72."""
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.125, 0.25, 0.5]), np.ones(3), gamma=0.9, lam=0.8)
    a2 = 0.5
    a1 = 0.2 + 0.72 * a2
    a0 = 0.1 + 0.72 * a1
    assert advantages.tolist() == pytest.approx([a0, a1, a2])
    assert returns.tolist() == pytest.approx([a0 + 0.125, a1 + 0.25, a2 + 0.5])


@given(trajectories(), st.floats(0, 1))
def test_gae_with_lambda_1_is_the_return_less_the_value(trajectory: Trajectory, gamma: float) -> None:
    rewards, values, mask = trajectory
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    exact = discounted(rewards, mask, gamma)
    assert returns == pytest.approx(exact, abs=1e-9)
    assert advantages == pytest.approx(np.where(mask > 0, exact - values, 0), abs=1e-9)


@given(trajectories(), st.floats(0, 1))
def test_gae_with_lambda_0_is_the_temporal_difference(trajectory: Trajectory, gamma: float) -> None:
    rewards, values, mask = trajectory
    steps = np.flatnonzero(mask)
    following = np.append(values[steps[1:]], 0.0)[: len(steps)]
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=0.0)
    assert advantages[steps] == pytest.approx(rewards[steps] + gamma * following - values[steps], abs=1e-9)


@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_gae_passes_over_what_a_tool_said(trajectory: Trajectory, gamma: float, lam: float) -> None:
    """The same as for the sampled tokens alone; nothing elsewhere."""
    rewards, values, mask = trajectory
    on = mask > 0
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    alone = gae(rewards[on], values[on], np.ones(int(on.sum())), gamma=gamma, lam=lam)
    for everywhere, sampled in zip(got, alone, strict=True):
        assert everywhere[on].tolist() == sampled.tolist()
        assert not everywhere[~on].any()


@given(st.lists(st.lists(st.tuples(reals, st.integers(0, 1)), max_size=9), max_size=9))
def test_whitened_tokens_have_mean_0_and_variance_1(sequences: list[list[tuple[float, int]]]) -> None:
    advantages = [np.array([a for a, _ in s]) for s in sequences]
    masks = [np.array([m for _, m in s]) for s in sequences]
    got = whiten(advantages, masks)
    on = [float(a) for s, m in zip(got, masks, strict=True) for a in s[m > 0]]
    before = [float(a) for s, m in zip(advantages, masks, strict=True) for a in s[m > 0]]
    assert not any(s[m == 0].any() for s, m in zip(got, masks, strict=True))
    if len(set(before)) < 2:
        assert not any(on)
    elif statistics.variance(before) > 1e-3:
        assert statistics.fmean(on) == pytest.approx(0, abs=1e-9)
        assert statistics.variance(on) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (15, 0), (16, 0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1), (25, -1)]
)
def test_soft_overlong_punishment_by_hand(length: int, expected: float) -> None:
    """DAPO, equation 13, with L_max = 20 and L_cache = 4."""
    assert soft_overlong_punishment(length, longest=20, buffer=4) == expected
    assert soft_overlong_punishment(length, longest=20, buffer=0) == 0
