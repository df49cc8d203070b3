"""Rewards to advantages: how much better a rollout did than its siblings."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titan_rl.types import Group


def group_relative(rewards: Sequence[float], *, normalize_std: bool, eps: float = 1e-4) -> list[float]:
    """GRPO: reward minus the group's mean, over its sample standard deviation (ddof = 1, as TRL takes it) plus eps.

    A flat group gets exact zeros: its mean may differ from its rewards by rounding, and eps would blow that up.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if (r == r[:1]).all():
        return [0.0] * len(r)
    advantages = r - r.mean()
    if normalize_std:
        advantages /= r.std(ddof=1) + eps
    return advantages.tolist()


def with_advantages(group: Group, *, normalize_std: bool) -> Group:
    """The group, its rollouts carrying their advantages."""
    advantages = group_relative(group.rewards, normalize_std=normalize_std)
    rollouts = [replace(r, advantage=a) for r, a in zip(group.rollouts, advantages, strict=True)]
    return replace(group, rollouts=rollouts)
