"""Rollouts with several turns and branches: one member of the group, one sequence, one trajectory."""

import math
from dataclasses import replace

import pytest

from support.judged_groups import RL, TOOL, advantages, algorithm, group, rollout, rollout_advantages, with_column
from titan_rl.batch.experience import minibatches, samples_of, with_advantages
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Branch, Completion, Rollout, Turn


def turn(context: list[int], sampled: int, *, reward: float = 0.0, index: int = 0) -> Turn:
    return Turn(context, Completion([5] * sampled, [-0.5] * sampled, [0] * sampled, "stop"), reward, index)


def branched(reward: float, *turns: float) -> Rollout:
    """A branch of turns 0 and 2, 1 and 2 tokens long, and one of turn 1, of 3 tokens, which forgets the first."""
    earned = [*turns, 0.0, 0.0, 0.0][:3]
    first = Branch([turn([1], 1, reward=earned[0]), turn([TOOL], 2, reward=earned[2], index=2)])
    return Rollout([first, Branch([turn([1, TOOL], 3, reward=earned[1], index=1)])], "", reward)


def test_all_branches_are_samples_of_one_sequence_and_share_its_advantage() -> None:
    groups = [group(branched(1.0), rollout(0.0))]
    samples = samples_of(groups, algorithm())
    assert [list(s.mask) for s in samples] == [[0, 1, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1]]
    assert [s.sequence for s in samples] == [0, 0, 1]
    a = algorithm(normalize="none")
    judged, samples = with_advantages(groups, samples, a)
    assert advantages(samples) == [[0, 0.5, 0, 0.5, 0.5], [0, 0, 0.5, 0.5, 0.5], [0, 0, -0.5, -0.5]]
    assert rollout_advantages(judged) == [0.5, -0.5]


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_a_rollout_that_failed_moves_no_number_of_the_others(name: str, credit: str) -> None:
    if (name, credit) in (("gdpo", "turn"), ("opo", "turn")) or name == "online_dpo":
        return  # refused (preflight/checks/algorithm.py), or of one branch (test_online_pairs.py)
    a = algorithm(name, credit=credit)
    failed = replace(branched(math.nan), status="error")

    def numbers(*rollouts: Rollout) -> list[list[float]]:
        groups = [group(*rollouts)]
        samples = with_column(samples_of(groups, a), teacher=-0.125, value=0.25, reference=-0.75, score_norm=0.5)
        after, samples = with_advantages(groups, samples, a, {"right": 1.0})
        assert [r.advantage for r in after[0].rollouts if not r.valid] == [0.0] * (len(rollouts) - 2)
        return advantages(samples)

    valid = [replace(r, parts={"right": r.reward}) for r in (branched(1.0, 0.5), rollout(0.0))]
    assert numbers(valid[0], failed, valid[1]) == numbers(*valid)


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_token_by_token_a_rollout_is_one_trajectory_in_the_order_of_its_turns(name: str) -> None:
    """As if its turns were one branch: 1 token, then 3 of the other branch, then 2."""
    a = algorithm(name, normalize="none", gamma=0.5, gae_lambda=0.5, kl_coef=0.0)
    plain = Rollout([Branch([turn([1], 1), turn([TOOL], 3, index=1), turn([TOOL], 2, index=2)])], "", 8.0)

    def estimated(rollout: Rollout) -> list[list[float]]:
        groups = [group(rollout)]
        _, samples = with_advantages(groups, with_column(samples_of(groups, a), value=0.25), a)
        return advantages(samples)

    (whole,) = estimated(plain)
    trained = [value for value in whole if value]
    assert len(trained) == 6
    assert estimated(branched(8.0)) == [[0, trained[0], 0, *trained[4:]], [0, 0, *trained[1:4]]]


def test_with_credit_by_turn_a_tokens_return_is_what_its_turn_and_later_ones_earned() -> None:
    """Turn rewards 1, 2 and, of the reward 7, the rest for the last turn: 4."""
    a = algorithm("reinforce_pp", normalize="none", credit="turn")
    groups = [group(branched(7.0, 1.0, 2.0))]
    _, samples = with_advantages(groups, samples_of(groups, a), a)
    assert advantages(samples) == [[0, 7, 0, 4, 4], [0, 0, 6, 6, 6]]
    outcome = algorithm("reinforce_pp", normalize="none")
    _, samples = with_advantages(groups, samples_of(groups, outcome), outcome)
    assert advantages(samples) == [[0, 7, 0, 7, 7], [0, 0, 7, 7, 7]]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_with_credit_by_turn_a_groups_turns_are_compared_with_those_of_the_same_number(gamma: float) -> None:
    a = algorithm(normalize="none", credit="turn", gamma=gamma)
    second = Rollout([Branch([turn([1], 1, reward=1.0), turn([TOOL], 2, index=1)])], "", 1.0)
    groups = [group(branched(7.0, 1.0, 2.0), second, rollout(3.0))]
    _, samples = with_advantages(groups, samples_of(groups, a), a)
    firsts = [1 + gamma * (2 + gamma * 4), 1.0, 3.0]
    seconds = [2 + gamma * 4, 0.0]
    begun = [value - sum(firsts) / 3 for value in firsts]
    later = [value - sum(seconds) / 2 for value in seconds]
    expected = [
        [0, begun[0], 0, 0, 0],
        [0, 0, *[later[0]] * 3],
        [0, begun[1], 0, *[later[1]] * 2],
        [0, 0, *[begun[2]] * 2],
    ]
    assert [pytest.approx(each) for each in expected] == advantages(samples)


def test_minibatches_never_cut_a_rollout() -> None:
    groups = [group(branched(1.0), rollout(0.0), branched(2.0), rollout(3.0))]
    parts = minibatches(samples_of(groups, algorithm()), algorithm(minibatches=2), 2)
    assert [[s.sequence for s in part] for part in parts] == [[0, 0, 1], [2, 2, 3]]


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_players_whose_rewards_add_up_to_nothing_are_refused_by_name(credit: str) -> None:
    def game(*turns: float) -> Rollout:
        return branched(sum(turns), *turns)

    a = algorithm(credit=credit)
    for rollouts in ([game(1.0, -1.0), game(-1.0, 1.0)], [game(0.1, -0.3, 0.2), game(-1.0, 1.0, 0.0)]):
        groups = [group(*rollouts)]
        with pytest.raises(RunError, match="prompt 0: expected rollouts of one player, found 2 whose branches win"):
            with_advantages(groups, samples_of(groups, a), a)
    for rollouts in ([game(1.0, -1.0), game(1.0, 0.0)], [game(0.0, 0.0), game(0.0, 0.0)], [game(1.0, 1.0), game(-1.0)]):
        groups = [group(*rollouts)]
        with_advantages(groups, samples_of(groups, a), a)
