"""Exact mode's comparison: which tokens the trained policy itself has sampled, and where the log-probs differ."""

from collections.abc import Sequence

import numpy as np

from titan_rl.wire.reports import Difference
from titan_rl.wire.types import Group, Sample


def with_current(groups: Sequence[Group], samples: Sequence[Sample], version: int, first: int) -> list[Sample]:
    """Add the column "current" to the samples of these groups: on tokens of `version` the sample's number among the
    step's, from `first` on; -1 on others. Only tokens of the version that is trained must have the same log-prob."""
    branches = (b for g in groups for r in g.rollouts if r.valid for b in r.branches)
    return [
        sample.with_columns(current=np.where(np.array(branch.versions) == version, first + i, -1))
        for i, (branch, sample) in enumerate(zip(branches, samples, strict=True))
    ]


def proximal_difference(samples: Sequence[Sample]) -> Difference | None:
    """Return the largest difference of the log-probs that the trainers scored before the step's first update, if they
    did: those cover the tokens of every minibatch."""
    worst: Difference | None = None
    for sample in samples:
        if "proximal" not in sample.columns or "current" not in sample.columns:
            return None
        current, behaviour, proximal = (
            np.asarray(sample.columns[n], np.float32) for n in ("current", "behaviour", "proximal")
        )
        gap = np.where((np.asarray(sample.mask) > 0) & (current >= 0), np.abs(proximal - behaviour), 0)
        gap = np.where(np.isnan(gap), np.inf, gap)
        at = int(gap.argmax()) if gap.size else 0
        if gap.size and gap[at] > (worst.gap if worst else 0):
            worst = Difference(float(gap[at]), int(current[at]), at, float(proximal[at]), float(behaviour[at]))
    return worst


def described(difference: Difference, groups: Sequence[Group], samples: Sequence[Sample]) -> str:
    """Name the token of a difference."""
    sample, size = samples[difference.sample], len(groups[0].rollouts)
    trainer, generator = (f"{np.float32(value)!s}" for value in (difference.trainer, difference.generator))
    return (
        f"rollout {sample.sequence % size} of prompt {sample.sequence // size}, token {difference.place} "
        f"(id {int(sample.tokens[difference.place])}): log-prob {trainer} in the trainer, {generator} in the generator"
    )
