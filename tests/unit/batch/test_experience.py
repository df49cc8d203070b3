"""Groups to columns, each estimator from end to end, on numbers that can be followed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.judged_groups import (
    RL,
    TOOL,
    advantages,
    algorithm,
    group,
    rollout,
    rollout_advantages,
    with_column,
    with_tool,
)
from titan_rl.batch.advantages import gae, kl_penalty
from titan_rl.batch.experience import dead, minibatches, samples_of, teaches, with_advantages
from titan_rl.config.methods import ADVANTAGES
from titan_rl.wire.types import Branch, Completion, Rollout, Sample, Turn


def lists(sample: Sample) -> tuple[list[int], list[int]]:
    return list(sample.tokens), list(sample.mask)


def test_samples_are_the_rollouts_in_order() -> None:
    groups = [group(with_tool(1.0), rollout(0.0, 1)), group(rollout(0.0, 3))]
    first, second, third = samples_of(groups, algorithm())
    assert lists(first) == ([1, 5, TOOL, 6, 7], [0, 1, 0, 1, 1])
    assert {name: list(column) for name, column in first.columns.items()} == {
        "behaviour": [0.0, -0.5, 0.0, -0.25, -0.75]
    }
    assert lists(second) == ([1, 2, 5], [0, 0, 1])
    assert len(third.tokens) == 5


def test_a_truncated_rollout_is_not_trained_on_under_overlong_filter() -> None:
    groups = [group(rollout(1.0), rollout(0.0, cut=True))]
    assert [list(s.mask) for s in samples_of(groups, algorithm("grpo"))] == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert [list(s.mask) for s in samples_of(groups, algorithm("dapo"))] == [[0, 0, 1, 1], [0, 0, 0, 0]]


def test_a_filtered_rollout_still_counts_in_its_siblings_baseline() -> None:
    groups = [group(rollout(1.0), rollout(0.0, cut=True))]
    a = algorithm("dapo", normalize="none")
    groups, samples = with_advantages(groups, samples_of(groups, a), a)
    assert advantages(samples) == [[0, 0, 0.5, 0.5], [0, 0, 0, 0]]
    assert rollout_advantages(groups) == [0.5, 0.0]


def test_group_advantages_lie_on_every_sampled_token() -> None:
    groups = [group(with_tool(1.0), rollout(0.0)), group(rollout(3.0), rollout(1.0))]
    a = algorithm("dr_grpo")
    groups, samples = with_advantages(groups, samples_of(groups, a), a)
    assert advantages(samples) == [[0, 0.5, 0, 0.5, 0.5], [0, 0, -0.5, -0.5], [0, 0, 1, 1], [0, 0, -1, -1]]
    assert rollout_advantages(groups) == [0.5, -0.5, 1.0, -1.0]


def test_a_return_is_discounted_from_the_last_sampled_token() -> None:
    a = algorithm("reinforce_pp", normalize="none", gamma=0.5)
    groups = [group(with_tool(4.0))]
    groups, samples = with_advantages(groups, samples_of(groups, a), a)
    assert advantages(samples) == [[0, 1, 0, 2, 4]]
    assert rollout_advantages(groups) == pytest.approx([7 / 3])


def test_a_reward_lies_on_the_last_token_that_is_trained_on() -> None:
    completion = Completion([5, 6, 7], [-0.5, -0.5, -math.inf], [0, 0, 0], "stop")  # the last one is not
    groups = [group(Rollout([Branch([Turn([1], completion)])], "", 2.0))]
    a = algorithm("reinforce_pp", normalize="none", gamma=0.5)
    _, samples = with_advantages(groups, samples_of(groups, a), a)
    assert advantages(samples) == [[0, 1, 2, 0]]


def test_ppo_has_the_critics_advantages_and_returns() -> None:
    a = algorithm("ppo", normalize="none", gamma=0.9, gae_lambda=0.8)
    groups = [group(with_tool(1.0))]
    values = [9.0, 0.125, 9.0, 0.25, 0.5]
    samples = [s.with_columns(value=values) for s in samples_of(groups, a)]
    _, (sample,) = with_advantages(groups, samples, a)
    rewards, mask = np.array([0, 0, 0, 0, 1.0]), np.array([0, 1, 0, 1, 1])
    expected, returns = gae(rewards, np.array(values), mask, gamma=0.9, lam=0.8)
    assert np.asarray(sample.columns["advantage"]).tolist() == expected.tolist()
    assert np.asarray(sample.columns["return"]).tolist() == returns.tolist()
    assert expected[4] == 0.5


def test_distillation_is_the_teachers_log_prob_less_the_samplers() -> None:
    a = algorithm("opd")
    groups = [group(with_tool(0.0))]
    groups, samples = with_advantages(groups, with_column(samples_of(groups, a), teacher=-0.25), a)
    assert advantages(samples) == [[0, 0.25, 0, 0, 0.5]]
    assert rollout_advantages(groups) == [0.25]


def test_a_teachers_signal_is_added_to_the_baselines() -> None:
    """After normalization, and not to a critic's returns."""
    groups = [group(with_tool(1.0), rollout(0.0))]
    keys: dict[str, Any] = {"normalize": "batch", "teacher_coef": 0.5}
    for name in ("reinforce_pp", "ppo", "reinforce_pp_baseline"):
        made = [algorithm(name, **keys), algorithm(name, normalize="batch")]
        samples = with_column(samples_of(groups, made[0]), teacher=-0.25, value=0.5)
        (_, both), (_, alone) = (with_advantages(groups, samples, a) for a in made)
        gains = [[0, 0.25, 0, 0, 0.5], [0, 0, 0.25, 0.25]]
        for one, other, gain in zip(advantages(both), advantages(alone), gains, strict=True):
            assert one == pytest.approx([value + 0.5 * more for value, more in zip(other, gain, strict=True)])
        if name == "ppo":
            assert [list(s.columns["return"]) for s in both] == [list(s.columns["return"]) for s in alone]


def test_a_rewards_kl_is_charged_before_the_groups_baseline() -> None:
    """Of two rollouts with equal rewards, the one that left the reference further is the worse."""
    groups = [group(rollout(1.0, 1), rollout(1.0, 3))]
    a = algorithm("rloo", kl_coef=0.1)
    samples = with_column(samples_of(groups, a), reference=-0.7)  # k1 a token: -0.5 + 0.7 = 0.2
    groups, _ = with_advantages(groups, samples, a)
    assert rollout_advantages(groups) == pytest.approx([0.1 * (3 - 1) * 0.2, -0.1 * (3 - 1) * 0.2])


def test_a_rewards_kl_is_charged_to_its_own_token() -> None:
    groups = [group(with_tool(1.0))]
    a = algorithm("reinforce_pp", normalize="none", gamma=0.0, kl_coef=0.5)
    _, samples = with_advantages(groups, with_column(samples_of(groups, a), reference=-1.0), a)
    assert advantages(samples)[0] == pytest.approx([0, -0.5 * 0.5, 0, -0.5 * 0.75, 1 - 0.5 * 0.25])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_rewards_kl_is_of_the_estimator_and_of_the_proximal_policy(estimator: Any) -> None:
    groups = [group(rollout(0.0, 1))]
    a = algorithm("reinforce_pp", normalize="none", kl_coef=0.5, kl=estimator)
    samples = with_column(samples_of(groups, a), reference=-2.0, proximal=-1.0)
    _, samples = with_advantages(groups, samples, a)
    charged = -0.5 * kl_penalty(np.array([-1.0]), np.array([-2.0]), estimator)[0]
    assert advantages(samples)[0][2] == pytest.approx(charged)


def test_a_kl_in_the_loss_leaves_rewards_alone() -> None:
    groups = [group(rollout(1.0), rollout(0.0))]
    a = algorithm("grpo", kl_coef=0.5, normalize="none")
    groups, _ = with_advantages(groups, with_column(samples_of(groups, a), reference=-3.0), a)
    assert rollout_advantages(groups) == [0.5, -0.5]


def test_a_penalty_is_learnt_from_and_is_no_reward() -> None:
    groups = [group(rollout(1.0, penalty=0.5), rollout(1.0))]
    assert groups[0].rewards == [1.0, 1.0]
    assert [rollout.signal for rollout in groups[0].rollouts] == [0.5, 1.0]
    assert not groups[0].flat
    for name in ("dr_grpo", "reinforce_pp"):
        a = algorithm(name, normalize="none")
        after, _ = with_advantages(groups, samples_of(groups, a), a)
        assert rollout_advantages(after) == ([-0.25, 0.25] if name == "dr_grpo" else [0.5, 1.0])
        assert after[0].rewards == [1.0, 1.0]


def test_a_rollout_tells_the_mean_over_its_trained_tokens() -> None:
    a = algorithm("reinforce_pp", normalize="none", gamma=0.5)
    before = [group(rollout(1.0, 3), rollout(1.0, 1))]
    after, samples = with_advantages(before, samples_of(before, a), a)
    assert rollout_advantages(after) == pytest.approx([(0.25 + 0.5 + 1) / 3, 1.0])
    assert rollout_advantages(before) == [0.0, 0.0]
    assert [replace(r, advantage=0.0) for r in after[0].rollouts] == before[0].rollouts
    assert [list(s.mask) for s in samples] == [list(s.mask) for s in samples_of(before, a)]


def test_a_rollout_without_tokens_tells_0() -> None:
    groups = [group(rollout(1.0, 0, cut=True), rollout(0.0))]
    for name in ("grpo", "rloo", "reinforce_pp"):
        after, _ = with_advantages(groups, samples_of(groups, algorithm(name)), algorithm(name))
        assert rollout_advantages(after)[0] == 0.0


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("name", RL)
def test_a_token_without_a_finite_logprob_spoils_no_other(name: str, bad: float) -> None:
    """Packing drops it; a KL in the reward, a teacher or the whitening must not have spread it before."""
    spoilt = Rollout([Branch([Turn([1, 2], Completion([5, 5], [bad, -0.5], [0, 0], "stop"))])], "", 1.0)
    groups = [group(*(replace(r, parts={"right": r.reward}) for r in (spoilt, rollout(0.0), rollout(0.5))))]
    a = algorithm(name, kl_coef=0.1)
    samples = with_column(samples_of(groups, a), reference=-1.0, teacher=-1.0, value=0.5, score_norm=0.5)
    groups, samples = with_advantages(groups, samples, a, {"right": 1.0})
    assert all(np.isfinite(s.columns["advantage"]).all() for s in samples)
    assert np.isfinite(rollout_advantages(groups)).all()


def test_equal_rewards_are_dead_and_a_filtered_group_is_too() -> None:
    a = algorithm("dapo")

    def is_dead(*rollouts: Rollout) -> bool:
        groups = [group(*rollouts)]
        return dead(with_advantages(groups, samples_of(groups, a), a)[1])

    assert is_dead(rollout(1.0), rollout(1.0))
    assert not is_dead(rollout(1.0), rollout(0.0))
    assert not is_dead(rollout(1.0), rollout(0.0, cut=True))
    assert is_dead(rollout(1.0, cut=True), rollout(0.0, cut=True))  # different, but nothing is trained on
    assert dead([])


def test_an_advantage_off_the_mask_is_no_signal() -> None:
    assert dead([Sample([1, 2], [0, 1], {"advantage": [3.0, 0.0]})])
    assert not dead([Sample([1, 2], [0, 1], {"advantage": [0.0, 1e-9]})])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_minibatches_are_whole_groups_in_order_once_an_epoch(parts: int, each: int, size: int, epochs: int) -> None:
    samples = [Sample([i], [0], sequence=i) for i in range(parts * each * size)]
    updates = minibatches(samples, algorithm(minibatches=parts, epochs=epochs), size)
    assert len(updates) == parts * epochs == algorithm(minibatches=parts, epochs=epochs).updates
    assert {len(update) for update in updates} == {each * size}
    for epoch in range(epochs):
        assert [s for update in updates[epoch * parts : (epoch + 1) * parts] for s in update] == samples


@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_failed_rollouts_neither_change_the_number_of_updates_nor_split_a_group(
    data: st.DataObject, parts: int, each: int, size: int
) -> None:
    groups = parts * each
    survivors = [data.draw(st.sets(st.integers(0, size - 1), min_size=1)) for _ in range(groups)]
    samples = [Sample([i], [0], sequence=g * size + i) for g, left in enumerate(survivors) for i in sorted(left)]
    updates = minibatches(samples, algorithm(minibatches=parts), size)
    assert [s for update in updates for s in update] == samples
    numbers = [{sample.sequence // size for sample in update} for update in updates]
    assert [len(groups) for groups in numbers] == [each] * parts
    assert len(set().union(*numbers)) == groups


def turns_of(*rewards: float) -> Rollout:
    turns = [
        Turn([1], Completion([5], [-0.5], [0], "stop"), reward=reward, index=i) for i, reward in enumerate(rewards)
    ]
    return Rollout([Branch(turns)], "", sum(rewards))


def test_a_group_teaches_if_some_token_has_an_advantage() -> None:
    equal_sums = group(turns_of(1, 0), turns_of(0, 1), turns_of(0, 1), turns_of(1, 0))
    by_turn = algorithm(credit="turn")
    assert teaches(equal_sums, by_turn)
    assert not teaches(equal_sums, algorithm())
    assert not dead(with_advantages([equal_sums], samples_of([equal_sums], by_turn), by_turn)[1])
    assert not teaches(group(turns_of(1, 0), turns_of(1, 0)), by_turn)
    assert teaches(group(turns_of(1, 0), turns_of(1, 1)), algorithm())
    assert not teaches(group(turns_of(1.0), turns_of(1.0, 0.0)), by_turn)  # nothing to compare the second turn with


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_a_filtered_siblings_missing_kl_moves_no_baseline(credit: Any) -> None:
    groups = [group(rollout(1.0), rollout(1.0), rollout(1.0), rollout(1.0, cut=True))]
    for filtered in (False, True):
        a = algorithm("rloo", kl_coef=0.5, overlong_filter=filtered, credit=credit)
        samples = with_column(samples_of(groups, a), reference=-2.0)
        for sample in samples:  # scores of tokens outside the mask are 0
            sample.columns["reference"][:] = np.where(np.asarray(sample.mask) > 0, -2.0, 0.0).tolist()  # type: ignore[index]
        _, samples = with_advantages(groups, samples, a)
        assert [max(map(abs, each)) for each in advantages(samples)] == pytest.approx([0.0] * 4)


def test_every_declared_advantage_runs() -> None:
    for advantage in ADVANTAGES:
        for normalize in ("none", "batch"):
            a = algorithm(advantage=advantage, normalize=normalize)
            groups = [
                group(*(replace(r, parts={"right": r.reward}) for r in (with_tool(1.0), rollout(0.0), rollout(0.5))))
            ]
            samples = with_column(samples_of(groups, a), teacher=-0.125, value=0.25, score_norm=0.5)
            groups, samples = with_advantages(groups, samples, a, {"right": 1.0})
            assert not dead(samples)
            assert ("return" in samples[0].columns) == (advantage == "gae")
            assert all(not np.asarray(s.columns["advantage"])[np.asarray(s.mask) == 0].any() for s in samples)
