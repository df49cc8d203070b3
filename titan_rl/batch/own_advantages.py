"""A user's advantages in the place of algorithm.advantage: a function of a group.

    def quantile(rewards):
        return rewards - np.quantile(rewards, 0.75)

It may name any of these arguments. One that names none, and requires one argument, gets the rewards:

    rewards    [n], of the rollouts that have one, less their penalties for length
    lengths    [n] sampled tokens
    group      the group itself: prompt, texts, messages
    columns    of each rollout, by name, an array with an entry for each sampled token: behaviour, reference, teacher,
               value, where the algorithm has them

and returns a number for each rollout, or an array with one for each of its sampled tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from titan_rl.batch.experience import Estimate, RewardedGroup, sampled_advantages
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn
from titan_rl.wire.user_functions import argued

ARGUMENTS = ("rewards", "lengths", "group", "columns")
TRIED_REWARDS = (0.0, 1.0, 0.25, 1.0)


def estimate_of(advantage: Callable[..., Any], name: str) -> Estimate:
    """Return a user's function as experience.py calls it. `name` begins its error messages."""
    return argued(advantage, ARGUMENTS, "rewards", name)


def tried_groups() -> list[RewardedGroup]:
    """Return groups with equal and with other rewards, to try a user's function on."""
    groups: list[RewardedGroup] = []
    for rewards in (TRIED_REWARDS, (1.0,) * len(TRIED_REWARDS)):
        answers = [Completion([1] * n, [-0.5] * n, [0] * n, "stop") for n in range(3, 3 + len(rewards))]
        rollouts = [Rollout([Branch([Turn([2, 3], a)])], "answer", r) for a, r in zip(answers, rewards, strict=True)]
        columns = [{"behaviour": np.array(a.logprobs)} for a in answers]
        lengths = np.array([len(a.tokens) for a in answers])
        group = Group(Prompt(0, "a prompt", [2, 3], ""), rollouts)
        groups.append(RewardedGroup(group, np.array(rewards), lengths, columns))
    return groups


def check(advantage: Callable[..., Any], name: str) -> str:
    """Return why a user's advantages cannot be used, or ""."""
    for group in tried_groups():
        try:
            sampled_advantages(group, estimate_of(advantage, name))
        except Exception as error:  # a user's function may raise any error
            text = str(error)
            return text if text.startswith(name) else f"{name}: {type(error).__name__}: {text}"
    return ""
