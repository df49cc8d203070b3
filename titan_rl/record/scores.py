"""Summarizes the rewards of an evaluation: avg@k, unbiased pass@k, and 95% intervals. Pure numpy.

    rewards[i][j], answer j to problem i ──> a value per problem ──> mean over problems, interval over problems

A problem's answers depend on each other, so an interval is always over problems: Wilson's where every problem's value
is 0 or 1, else a percentile bootstrap that draws problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

Z = 1.959963984540054  # two-sided 95%
RESAMPLES = 2000
MOST_DRAWS = 4_000_000  # by the bootstrap, in 0.1 s
FEWEST_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class ScoreEstimate:
    """A mean over problems, and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at(k: int, n: int, correct: int) -> float:
    """Return the probability that at least one of `k` answers, drawn without replacement from `n` of which `correct`
    are correct, is correct: 1 - C(n - correct, k) / C(n, k). It is the unbiased estimate of pass@k."""
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"expected 1 <= k <= n and 0 <= correct <= n, found k = {k}, n = {n}, correct = {correct}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def ks_of(n: int) -> list[int]:
    """Return the k of pass@k that are reported for `n` answers per problem: 1, 2, 4, ..., and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def estimate(values: Sequence[float]) -> ScoreEstimate:
    """Return the mean of one value per problem with its interval, which depends on nothing but the values."""
    found = np.asarray(values, float)
    if not found.size or not np.isfinite(found).all():
        raise ValueError(f"expected finite values of at least one problem, found {found.size} values")
    mean = fmean(found)
    low, high = wilson(int(found.sum()), found.size) if set(found.tolist()) <= {0.0, 1.0} else bootstrap(found)
    return ScoreEstimate(mean, min(low, mean), max(high, mean))


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion, which has a width even at 0 and 1."""
    share = successes / n
    centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Return the 2.5% and 97.5% quantiles of the means of resampled problems. How often each distinct value is drawn is
    multinomial, so that equal values cost nothing."""
    distinct, counts = np.unique(values, return_counts=True)
    resamples = min(RESAMPLES, max(FEWEST_RESAMPLES, MOST_DRAWS // distinct.size))
    drawn = np.random.default_rng(0).multinomial(values.size, counts / values.size, size=resamples)
    low, high = np.quantile(drawn @ distinct / values.size, [0.025, 0.975])
    return float(low), float(high)
