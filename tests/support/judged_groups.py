"""Groups of rollouts that can be followed by hand, and their advantages."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_rl.config.algorithms import PRESETS
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Sample, Turn

RL = [name for name in PRESETS if AlgorithmSection(name=name).kind == "rl"]
TOOL = 77  # the token that a tool said


def algorithm(name: str = "grpo", **keys: Any) -> AlgorithmSection:
    return preset(name, **keys)


def rollout(reward: float, tokens: int = 2, *, penalty: float = 0.0, cut: bool = False) -> Rollout:
    completion = Completion([5] * tokens, [-0.5] * tokens, [0] * tokens, "length" if cut else "stop")
    return Rollout([Branch([Turn([1, 2], completion)])], "", reward, penalty)


def with_tool(reward: float) -> Rollout:
    """One sampled token, one of a tool, two sampled tokens: mask 0 1 0 1 1."""
    first = Turn([1], Completion([5], [-0.5], [0], "stop"))
    second = Turn([TOOL], Completion([6, 7], [-0.25, -0.75], [0, 0], "stop"))
    return Rollout([Branch([first, second])], "", reward)


def group(*rollouts: Rollout) -> Group:
    """Return the rollouts as a group, with the reward of a greedy answer that some baselines need."""
    return Group(Prompt(0, "", [1, 2], ""), list(rollouts), baseline=0.25)


def with_column(samples: Sequence[Sample], **values: float) -> list[Sample]:
    """The samples with constant columns, as a role's mesh would have answered."""
    return [s.with_columns(**{name: [v] * len(s.tokens) for name, v in values.items()}) for s in samples]


def advantages(samples: Sequence[Sample]) -> list[list[float]]:
    return [np.asarray(s.columns["advantage"]).tolist() for s in samples]


def rollout_advantages(groups: Sequence[Group]) -> list[float]:
    return [r.advantage for g in groups for r in g.rollouts]
