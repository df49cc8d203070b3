"""A user's filter of groups, task.filter: a function that returns whether a step may train on a group.

    def between(rewards):
        return 0.1 < rewards.mean() < 0.9

It may name `group` (prompt, rollouts with their texts, messages and rewards), and `rewards` [n] of the rollouts that
have one. One that names neither, and requires one argument, gets the group. It runs in the controller, after the
rewards. A refused group is replaced by the next prompt's, as with algorithm.dynamic_sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.batch.own_advantages import tried_groups
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Group
from titan_rl.wire.user_functions import argued

ARGUMENTS = ("group", "rewards")
Filter = Callable[[Group], bool]


@dataclass(frozen=True, slots=True)
class Judged:
    group: Group

    @property
    def rewards(self) -> np.ndarray:
        return np.array([rollout.reward for rollout in self.group.rollouts if rollout.valid])


def filter_of(function: Callable[..., Any], name: str) -> Filter:
    """Return a user's function as the stream of groups calls it. `name` begins its error messages."""
    called = argued(function, ARGUMENTS, "group", name)

    def keeps(group: Group) -> bool:
        try:
            kept = called(Judged(group))
        except Exception as error:  # a user's function may raise any error
            raise RunError(f"{name}: {type(error).__name__}: {error}: prompt {group.prompt.id}") from error
        if not isinstance(kept, bool | np.bool_):
            raise RunError(f"{name}: expected true or false, found {kept!r}: prompt {group.prompt.id}")
        return bool(kept)

    return keeps


def check(function: Callable[..., Any], name: str) -> str:
    """Return why a user's filter cannot be used, or ""."""
    try:
        for tried in tried_groups():
            filter_of(function, name)(tried.group)
    except RunError as error:
        return str(error)
    return ""
