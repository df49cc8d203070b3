"""Differences of two scores, with 95% intervals over problems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.record.scores import ScoreEstimate, bootstrap

FEWEST_CHANGED = 6  # problems: if all of 5 changed in one direction, a sign test gives 6%


@dataclass(frozen=True, slots=True)
class Difference:
    """A second score minus a first one, with its 95% interval."""

    value: float
    low: float
    high: float
    paired: bool  # over the same problems
    changed: int | None = None  # problems whose value differs; None: the problems are not the same

    @property
    def beyond_noise(self) -> bool:
        """True if the interval excludes 0, and enough problems changed for it to mean anything."""
        enough = self.changed is None or self.changed >= FEWEST_CHANGED
        return enough and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the difference of two scores over the same problems, in the same order: problems are drawn in pairs."""
    gains = np.asarray(second, float) - np.asarray(first, float)
    low, high = bootstrap(gains)
    return Difference(float(gains.mean()), low, high, True, int(np.count_nonzero(gains)))


def independent_difference(first: ScoreEstimate, second: ScoreEstimate) -> Difference:
    """Return the difference of two scores over different problems, by Newcombe's combination of their intervals."""
    gain = second.value - first.value
    down = math.hypot(second.value - second.low, first.high - first.value)
    up = math.hypot(second.high - second.value, first.value - first.low)
    return Difference(gain, gain - down, gain + up, False)
