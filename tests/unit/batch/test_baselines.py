"""Baselines and length rewards against formulas that are written out plainly, over random groups."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.judged_groups import TOOL, advantages, algorithm, group, rollout, with_column
from titan_rl.batch.advantages import length_weighted, over_mean, pass_at_k, per_reward, shorter_is_better
from titan_rl.batch.experience import dead, samples_of, teaches, with_advantages
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Branch, Completion, Rollout, Sample, Turn

few = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=8)
positive = st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=16)


@given(positive)
def test_over_mean_divides_by_the_groups_mean(rewards: list[float]) -> None:
    mean = math.fsum(rewards) / len(rewards)
    expected = [(r - mean) / (mean + 1e-6) for r in rewards]
    assert over_mean(rewards) == pytest.approx(expected if len({*rewards}) > 1 else [0.0] * len(rewards), abs=1e-12)


def test_over_mean_refuses_negative_rewards() -> None:
    with pytest.raises(RunError, match=r'"mean" expected rewards of at least 0, found -0.5'):
        over_mean([1.0, -0.5])


@given(few, st.integers(2, 8), st.booleans())
def test_pass_at_k_is_the_mean_lead_over_all_sets(rewards: list[float], k: int, scaled: bool) -> None:
    k = min(k, len(rewards))
    expected = [0.0] * len(rewards)
    if len(rewards) > 1:
        for i, reward in enumerate(rewards):
            sets = list(combinations([r for j, r in enumerate(rewards) if j != i], k - 1))
            expected[i] = sum(max(reward - max(others), 0.0) for others in sets) / len(sets)
        spread = float(np.std(rewards, ddof=1)) + 1e-4
        expected = [lead / spread if scaled else lead for lead in expected]
    assert pass_at_k(rewards, k, normalize_std=scaled) == pytest.approx(expected, abs=1e-9)


def test_the_leads_of_pass_at_k_add_up_to_its_gradient() -> None:
    """The mean over sets of k of the best reward is pass@k; its gradient by a sample's log-prob is k / n its lead."""
    found = pass_at_k([1, 0, 0, 0, 0, 0, 0, 0], 4, normalize_std=False)
    assert found == [1.0] + [0.0] * 7
    found = pass_at_k([1, 1, 0, 0], 2, normalize_std=False)
    assert found == pytest.approx([2 / 3, 2 / 3, 0, 0])


def test_a_large_group_has_a_finite_pass_at_k() -> None:
    found = pass_at_k([float(i % 7 == 0) for i in range(512)], 64, normalize_std=True)
    assert np.isfinite(found).all()
    assert max(found) > 0


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 50)), min_size=2, max_size=16))
def test_length_weighted_takes_the_mean_per_token(answers: list[tuple[float, int]]) -> None:
    rewards, lengths = [r for r, _ in answers], [n for _, n in answers]
    baseline = sum(r * n for r, n in answers) / sum(lengths)
    expected = [r - baseline for r in rewards] if len({*rewards}) > 1 else [0.0] * len(rewards)
    assert length_weighted(rewards, lengths) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=16), st.floats(-3, 3))
def test_per_reward_scales_each_reward_by_itself(table: list[tuple[float, float]], weight: float) -> None:
    expected = np.zeros(len(table))
    for w, column in zip((1.0, weight), np.array(table).T, strict=True):
        if len({*column.tolist()}) > 1:
            expected += w * (column - column.mean()) / (column.std(ddof=1) + 1e-4)
    assert per_reward(table, [1.0, weight]) == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_reward_that_does_not_apply_adds_nothing_and_moves_no_baseline() -> None:
    found = per_reward([[1, 5], [0, math.nan], [0, 3]], [1.0, 2.0])
    first = per_reward([[1], [0], [0]], [1.0])
    second = per_reward([[5], [3]], [2.0])
    assert found == pytest.approx([first[0] + second[0], first[1], first[2] + second[1]])


def judged(rewards: list[tuple[float, float]], penalties: list[float]) -> list[Rollout]:
    return [
        replace(rollout(a + 0.5 * b, penalty=p), parts={"right": a, "short": b, "grader": 7.0})
        for (a, b), p in zip(rewards, penalties, strict=True)
    ]


def test_gdpo_tells_apart_what_a_weighted_sum_does_not() -> None:
    """The rewards (1, 0) and (0, 2) have one sum. The penalty for length is one more reward."""
    weights = {"right": 1.0, "short": 0.5}
    made = group(*judged([(1, 0), (0, 2), (1, 0), (1, 0)], [0.0, 0.0, 0.0, 0.25]))
    a = algorithm("gdpo", normalize="group", length_weight=2.0)
    _, samples = with_advantages([made], samples_of([made], a), a, weights)
    expected = per_reward([[1, 0, 0], [0, 2, 0], [1, 0, 0], [1, 0, -0.25]], [1.0, 0.5, 2.0])
    assert [each[-1] for each in advantages(samples)] == pytest.approx(expected)
    equal = group(*judged([(1, 0), (0, 2), (1, 0)], [0.0] * 3))
    assert equal.flat
    assert teaches(equal, a, weights)
    assert not teaches(equal, algorithm())


def test_gdpo_needs_the_components() -> None:
    made = group(rollout(1.0), rollout(0.0))
    a = algorithm("gdpo")
    with pytest.raises(RunError, match=r"expected the components of task\.rewards, found a rollout without"):
        with_advantages([made], samples_of([made], a), a, {"right": 1.0, "short": 0.5})


def test_opo_counts_the_sampled_tokens_of_all_turns() -> None:
    two = Rollout([Branch([turn([1], 1), turn([TOOL], 2, index=1)]), Branch([turn([1], 3, index=2)])], "", 1.0)
    a, made = algorithm("opo"), [group(two, rollout(0.0, 2, cut=True))]
    for filtered in (False, True):
        a = algorithm("opo", overlong_filter=filtered)
        _, samples = with_advantages(made, samples_of(made, a), a)
        assert advantages(samples)[0] == pytest.approx([0, 0.25, 0, 0.25, 0.25])


def test_a_group_whose_best_samples_tie_teaches_no_pass_at_k() -> None:
    tied = group(rollout(1.0), rollout(1.0), rollout(0.0))
    for k, learns in ((0, False), (2, True)):
        a = algorithm("pass_at_k", pass_k=k)
        assert teaches(tied, a) == learns
        assert dead(with_advantages([tied], samples_of([tied], a), a)[1]) == (not learns)


def turn(context: list[int], sampled: int, *, reward: float = 0.0, index: int = 0) -> Turn:
    return Turn(context, Completion([5] * sampled, [-0.5] * sampled, [0] * sampled, "stop"), reward, index)


def normed(samples: list[Sample], values: list[list[float]]) -> list[Sample]:
    return [s.with_columns(score_norm=v) for s, v in zip(samples, values, strict=True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_optimal_token_baselines_follow_the_order_of_turns(seed: int, credit: Any) -> None:
    """Against loops over the t-th sampled tokens, of rollouts with two branches and tokens of a tool."""
    rng = np.random.default_rng(seed)
    rollouts, orders = [], []
    for _ in range(4):
        sizes, earned = rng.integers(1, 4, 3).tolist(), rng.normal(size=3).tolist()
        turns = [turn([1, TOOL][: 1 + k % 2], sizes[k], reward=earned[k], index=k) for k in range(3)]
        rollouts.append(Rollout([Branch([turns[0], turns[2]]), Branch([turns[1]])], "", float(rng.normal())))
        orders.append([(0, 1 + i) for i in range(sizes[0])])
        orders[-1] += [(1, 2 + i) for i in range(sizes[1])]
        orders[-1] += [(0, 2 + sizes[0] + i) for i in range(sizes[2])]
    a, made = algorithm("otb", credit=credit), [group(*rollouts)]
    samples = samples_of(made, a)
    norms = [rng.random(len(s.tokens)).tolist() for s in samples]
    _, found = with_advantages(made, normed(samples, norms), a)
    returns, weights = [], []
    for n, (each, order) in enumerate(zip(rollouts, orders, strict=True)):
        sizes = [len(t.completion.tokens) for t in each.turns]
        rewards = [0.0] * len(order)
        rewards[-1] = each.reward
        if credit == "turn":
            rewards = [0.0] * len(order)
            rewards[sizes[0] - 1], rewards[sizes[0] + sizes[1] - 1] = each.turns[0].reward, each.turns[1].reward
            rewards[-1] += each.reward - each.turns[0].reward - each.turns[1].reward
        returns.append([sum(rewards[t:]) for t in range(len(order))])
        weights.append([sum(norms[2 * n + b][i] for b, i in order[: t + 1]) for t in range(len(order))])
    for n, order in enumerate(orders):
        for t, (branch, place) in enumerate(order):
            there = [i for i in range(4) if len(orders[i]) > t]
            total = sum(weights[i][t] + 1e-8 for i in there)
            baseline = sum((weights[i][t] + 1e-8) * returns[i][t] for i in there) / total if len(there) > 1 else 0.0
            assert found[2 * n + branch].columns["advantage"][place] == pytest.approx(returns[n][t] - baseline)


@pytest.mark.parametrize("norm", [0.0, 0.3, 1e-12])
def test_equal_returns_have_no_optimal_token_advantage_and_certain_tokens_have_the_mean(norm: float) -> None:
    a = algorithm("otb")
    equal, unequal = ([group(rollout(0.1), rollout(0.1), rollout(last))] for last in (0.1, 0.7))
    for made, expected in ((equal, [0.0] * 3), (unequal, [-0.2, -0.2, 0.4])):
        _, samples = with_advantages(made, with_column(samples_of(made, a), score_norm=norm), a)
        assert [each[-1] for each in advantages(samples)] == pytest.approx(expected)
        assert dead(samples) == (made is equal)


def test_a_rollout_that_is_filtered_is_in_no_optimal_baseline() -> None:
    made = [group(rollout(1.0), rollout(0.0), rollout(5.0, cut=True))]
    a = algorithm("otb", overlong_filter=True)
    _, samples = with_advantages(made, with_column(samples_of(made, a), score_norm=0.5), a)
    assert advantages(samples) == [pytest.approx([0, 0, 0.5, 0.5]), pytest.approx([0, 0, -0.5, -0.5]), [0, 0, 0, 0]]


def test_the_greedy_answers_reward_is_subtracted_also_from_a_group_of_one() -> None:
    made = [group(rollout(1.0, penalty=0.5)), replace(group(rollout(0.0)), baseline=1.0)]
    a = algorithm("remax", kl_coef=0.5)
    samples = with_column(samples_of(made, a), reference=-1.0)  # k1 of -0.5 against -1: 0.5 a token
    after, samples = with_advantages(made, samples, a)
    assert advantages(samples) == [pytest.approx([0, 0, -0.25, 0.0]), pytest.approx([0, 0, -1.5, -1.25])]
    assert [g.rollouts[0].advantage for g in after] == pytest.approx([-0.125, -1.375])


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=16))
def test_kimis_length_rewards(answers: list[tuple[int, bool]]) -> None:
    lengths = [n for n, _ in answers]
    found = shorter_is_better(lengths, [right for _, right in answers])
    for (n, right), reward in zip(answers, found, strict=True):
        span = max(lengths) - min(lengths)
        plain = 0.5 - (n - min(lengths)) / span if span else 0.0
        assert reward == (plain if right else min(0.0, plain))
