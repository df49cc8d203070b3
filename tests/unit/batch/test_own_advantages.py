"""A user's advantages: their arguments, their shapes, and what refuses them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from support.judged_groups import advantages, algorithm, group, rollout, rollout_advantages, with_tool
from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.batch.own_advantages import check, estimate_of
from titan_rl.wire.types import Group, Sample

Advantage = Callable[..., Any]


def own(groups: Sequence[Group], advantage: Advantage, **keys: Any) -> tuple[list[Group], list[Sample]]:
    a = algorithm("grpo", **{"normalize": "none", **keys})
    estimate = estimate_of(advantage, "the advantage")
    return with_advantages(groups, samples_of(groups, a), a, estimate=estimate)


def test_it_takes_the_place_of_the_algorithms_own() -> None:
    made = [group(rollout(1.0), rollout(0.0), with_tool(0.0)), group(rollout(2.0), rollout(0.0, 3))]
    centered, _ = own(made, lambda rewards: rewards - rewards.mean())
    a = algorithm("grpo", normalize="none")
    expected, _ = with_advantages(made, samples_of(made, a), a)
    assert rollout_advantages(centered) == pytest.approx(rollout_advantages(expected))


def test_rollouts_without_a_reward_are_not_offered() -> None:
    seen = list[int]()

    def count(rewards: np.ndarray) -> np.ndarray:
        seen.append(len(rewards))
        return rewards

    own([group(rollout(1.0), rollout(float("nan")), rollout(0.5))], count)
    assert seen == [2]


def test_one_for_each_sampled_token_skips_the_tools_tokens() -> None:
    def by_token(group: Group, lengths: np.ndarray) -> list[np.ndarray]:
        return [np.arange(1.0, n + 1) for n in lengths]

    _, (tool, plain) = own([group(with_tool(1.0), rollout(0.0))], by_token)
    assert advantages([tool]) == [[0, 1, 0, 2, 3]]
    assert advantages([plain]) == [[0, 0, 1, 2]]


def test_penalties_and_columns_are_offered() -> None:
    def seen(rewards: np.ndarray, columns: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
        assert rewards.tolist() == [0.75, 0.0]
        assert [c["behaviour"].tolist() for c in columns] == [[-0.5, -0.5], [-0.5, -0.5, -0.5]]
        return rewards

    own([group(rollout(1.0, penalty=0.25), rollout(0.0, 3))], seen)


def test_the_batch_is_whitened_after_it() -> None:
    _, samples = own([group(rollout(1.0), rollout(0.0, 3))], lambda rewards: rewards, normalize="batch")
    found = np.concatenate([np.asarray(s.columns["advantage"])[np.asarray(s.mask) > 0] for s in samples])
    assert found.mean() == pytest.approx(0.0)
    assert found.std(ddof=1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda rewards: rewards[1:], "expected 4, one for each rollout with a reward, found 3"),
        (lambda rewards: [float("nan")] * len(rewards), "expected finite numbers, found nan"),
        (lambda rewards: [np.zeros(2)] * len(rewards), "expected a number or an array of 3"),
        (lambda rewards, other: rewards, "expected to require no arguments but rewards, lengths, group, columns"),
        (lambda: 1, "object of type 'int' has no len()"),
        (lambda rewards: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_one_is_named(advantage: Advantage, message: str) -> None:
    assert message in check(advantage, "mine:advantage")


@pytest.mark.parametrize("advantage", [np.ones_like, lambda r: r.tolist(), lambda rewards, lengths: rewards / lengths])
def test_a_sound_one_passes(advantage: Advantage) -> None:
    assert check(advantage, "mine:advantage") == ""
