"""A user's filter: its arguments, and what refuses it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.judged_groups import group, rollout
from titan_rl.batch.own_filter import check, filter_of
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Group


def by_rewards(rewards: np.ndarray) -> np.bool_:
    return rewards.mean() > 0.4


def by_text(group: Group) -> bool:
    return group.rewards[0] > 0.4


@pytest.mark.parametrize("function", [by_rewards, by_text, lambda g: g.rewards[0] > 0.4])
def test_it_takes_what_it_names(function: Callable[..., Any]) -> None:
    keeps = filter_of(function, "the filter")
    assert check(function, "the filter") == ""
    assert keeps(group(rollout(1.0), rollout(0.0), rollout(float("nan"))))
    assert not keeps(group(rollout(0.0), rollout(0.5)))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda rewards: rewards, "the filter: expected true or false, found array("),
        (lambda group: None, "the filter: expected true or false, found None"),
        (lambda group: group.reward, "the filter: AttributeError: "),
        (lambda group, seed: True, "the filter: TypeError: the filter: expected to require no arguments but group"),
    ],
)
def test_a_wrong_one_is_named(function: Callable[..., Any], expected: str) -> None:
    assert check(function, "the filter").startswith(expected)


def test_a_failure_names_the_prompt() -> None:
    with pytest.raises(RunError, match=r"the filter: ZeroDivisionError: .*: prompt 0"):
        filter_of(lambda group: 1 / group.rewards[0] > 1, "the filter")(group(rollout(0.0)))
