"""Online DPO: the best and the worst rollout of each group are a pair, next to each other."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.judged_groups import advantages, algorithm, group, rollout, rollout_advantages
from titan_rl.batch.experience import dead, minibatches, samples_of, teaches, with_advantages
from titan_rl.batch.packing import pack
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Group, Rollout, Sample

ONLINE = algorithm("online_dpo")
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0, math.nan]), min_size=4, max_size=4)


def learnt(groups: Sequence[Group], a: AlgorithmSection = ONLINE) -> tuple[list[Group], list[Sample]]:
    numbered = [replace(each, prompt=replace(each.prompt, id=i)) for i, each in enumerate(groups)]
    return with_advantages(numbered, samples_of(numbered, a), a)


def test_a_pair_is_the_first_best_and_the_first_worst_by_the_signal() -> None:
    of_lengths = [rollout(0.5, 1), rollout(1.0, 2, penalty=1.5), rollout(1.0, 3), rollout(1.0, 4), rollout(-0.5, 5)]
    groups, samples = learnt([group(*of_lengths)])
    assert [s.sequence for s in samples] == [2, 1]
    assert [int(np.sum(s.mask)) for s in samples] == [3, 2]
    assert advantages(samples) == [[0, 0, 0.75, 0.75, 0.75], [0, 0, -0.75, -0.75]]
    assert rollout_advantages(groups) == [0, -0.75, 0.75, 0, 0]


@given(st.lists(REWARDS, min_size=1, max_size=5))
def test_pairs_of_any_rewards_pack_as_neighbours_and_flat_groups_leave_the_step(rewards: list[list[float]]) -> None:
    valid = [[r for r in each if not math.isnan(r)] for each in rewards]
    pairs = [(max(each), min(each)) for each in valid if len({*each}) > 1]
    made = [group(*(rollout(r, 1 + k) for k, r in enumerate(each))) for each in rewards]
    groups, samples = learnt(made)
    assert [teaches(each, ONLINE) for each in made] == [len({*each}) > 1 for each in valid]
    if not pairs:
        assert dead(samples)
        assert not any(np.any(s.mask) for s in samples)
        assert not any(rollout_advantages(groups))
    else:
        flat = [r for each in rewards for r in each]
        numbers = [s.sequence for s in samples]
        assert [(flat[c], flat[r]) for c, r in zip(numbers[::2], numbers[1::2], strict=True)] == pairs
    if samples:
        (batch,) = pack(samples, shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0, together=2, share=True)
        assert batch.sequences == max(2 * len(pairs), 1)
        for rows in batch.microbatches:
            assert all(first + 1 == second and first % 2 == 0 for first, second in rows.samples.reshape(-1, 2))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_minibatches_never_cut_a_pair(parts: int, groups: int, size: int) -> None:
    a = algorithm("online_dpo", minibatches=parts, epochs=2)
    _, samples = learnt([group(*(rollout(float(k)) for k in range(size))) for _ in range(groups)], a)
    updates = minibatches(samples, a, size)
    assert [s for update in updates for s in update] == 2 * samples
    assert len(updates) == 2 * min(parts, groups)
    assert all([s.sequence % size for s in update] == [size - 1, 0] * (len(update) // 2) for update in updates)


def test_truncated_rollouts_are_in_no_pair_with_overlong_filter() -> None:
    groups = [group(rollout(2.0, cut=True), rollout(1.0), rollout(0.5), rollout(0.0, cut=True))]
    assert [s.sequence for s in learnt(groups)[1]] == [0, 3]
    assert [s.sequence for s in learnt(groups, algorithm("online_dpo", overlong_filter=True))[1]] == [1, 2]


def test_a_rollout_without_tokens_is_in_no_pair() -> None:
    assert [s.sequence for s in learnt([group(rollout(2.0, 0), rollout(1.0), rollout(0.0))])[1]] == [1, 2]
    assert dead(learnt([group(rollout(2.0, 0), rollout(1.0))])[1])
    assert learnt([group(Rollout([], "", 0.0), Rollout([], "", 1.0))])[1] == []


def test_a_rollout_of_two_branches_ends_the_run_by_name() -> None:
    branched = replace(rollout(1.0), branches=rollout(1.0).branches * 2)
    with pytest.raises(RunError, match=r'algorithm\.pair_loss = "dpo" expected rollouts of one branch, found 2'):
        learnt([group(branched, rollout(0.0))])
