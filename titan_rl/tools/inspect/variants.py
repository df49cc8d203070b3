"""Compares variants: groups of runs that differ in their seed only, or that share the value of one key.

A mean is over a variant's runs, with Student's interval. A difference is paired by the runs that agree in all other
keys, as in the seed, if there are two such pairs; else it is Welch's.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.record.scores import ScoreEstimate
from titan_rl.tools.inspect import comparison
from titan_rl.tools.inspect.comparison import LETTERS, SetScores
from titan_rl.tools.inspect.recorded_run import RecordedRun
from titan_rl.tools.inspect.score_differences import Difference

SEED = "debug.seed"
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060),
)
"""Student's quantiles of 97.5% with 1, 2, ... degrees of freedom."""
Points = Sequence[tuple[int, float]]
Other = tuple[str | None, ...]
"""A run's values of the keys that do not define its variant."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A group of runs."""

    runs: Mapping[Other, int]  # each under the values that pair it with a run of another variant

    @property
    def name(self) -> str:
        return "".join(LETTERS[at] for at in self.runs.values())


@dataclass(frozen=True, slots=True)
class VariantScores:
    """The scores of one evaluation set, by variant and moment."""

    first: str  # the variant that the others differ from
    means: dict[str, dict[str, ScoreEstimate]] = field(default_factory=dict)
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    pairs: dict[str, int] = field(default_factory=dict)  # 0: the difference is not paired


def variants(runs: Sequence[RecordedRun], by: str = "") -> list[Variant]:
    """Group runs by all of their settings but the seed, or by one key. A run that repeats another one's settings and
    seed, and one whose settings are unknown, stands for itself."""
    differing = comparison.settings(runs)
    defining = [key for key in differing if (key == by if by else key != SEED)]
    others = [key for key in differing if key not in defining]
    groups: dict[object, dict[Other, int]] = {}
    earlier = Counter[object]()
    for at, run in enumerate(runs):
        values = tuple(differing[key][at] for key in defining)
        other = tuple(differing[key][at] for key in others)
        group: object = values, earlier[values, other]
        if run.unreadable:
            group = at
        earlier[values, other] += 1
        groups.setdefault(group, {})[other] = at
    return [Variant(group) for group in groups.values()]


def have_seeds(groups: Sequence[Variant]) -> bool:
    """Return True if a variant has several runs."""
    return any(len(variant.runs) > 1 for variant in groups)


def over_seeds(each: SetScores, groups: Sequence[Variant]) -> VariantScores:
    """Return the scores of the variants, over their runs that have the set."""
    scored: list[Variant] = []
    for variant in groups:
        having = {other: at for other, at in variant.runs.items() if at in each.scores}
        if having:
            scored.append(Variant(having))
    first = scored[0]
    found = VariantScores(first.name)
    for variant in scored:
        by_moment = {moment: _values(each, moment, variant) for moment in each.moments}
        found.means[variant.name] = {moment: mean_of(values) for moment, values in by_moment.items()}
        if variant is first:
            continue
        shared = [other for other in first.runs if other in variant.runs]
        paired = len(shared) > 1
        found.pairs[variant.name] = len(shared) if paired else 0
        found.differences[variant.name] = {
            moment: _paired(each, moment, first, variant, shared)
            if paired
            else welch(_values(each, moment, first), _values(each, moment, variant))
            for moment in each.moments
        }
    return found


def _values(each: SetScores, moment: str, variant: Variant, others: Sequence[Other] | None = None) -> list[float]:
    if others is None:
        others = list(variant.runs)
    scores = [each.scores[variant.runs[other]][moment] for other in others]
    return [score.estimate.value for score in scores]


def _paired(each: SetScores, moment: str, first: Variant, second: Variant, others: Sequence[Other]) -> Difference:
    before = _values(each, moment, first, others)
    after = _values(each, moment, second, others)
    gain = mean_of([b - a for a, b in zip(before, after, strict=True)])
    return Difference(gain.value, gain.low, gain.high, True)


def mean_of(values: Sequence[float]) -> ScoreEstimate:
    """Return a mean with Student's 95% interval, which is unknown (NaN) of one value."""
    mean = _mean(values)
    half = math.nan
    if len(values) > 1:
        half = _quantile(len(values) - 1) * math.sqrt(_variance_of_mean(values))
    return ScoreEstimate(mean, mean - half, mean + half)


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the difference of two means, with an interval that is unknown (NaN) if either is of one value."""
    gain = _mean(second) - _mean(first)
    half = math.nan
    if min(len(first), len(second)) > 1:
        a = _variance_of_mean(first)
        b = _variance_of_mean(second)
        parts = a * a / (len(first) - 1) + b * b / (len(second) - 1)
        freedom = (a + b) * (a + b) / parts if 0 < parts < math.inf else 1
        half = _quantile(freedom) * math.sqrt(a + b)
    return Difference(gain, gain - half, gain + half, False)


def _quantile(freedom: float) -> float:
    return T[int(min(max(freedom, 1), len(T))) - 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # fmean raises an error where a damaged run's numbers overflow


def _variance_of_mean(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) * (value - mean) for value in values) / (len(values) - 1) / len(values)


def mean_curve(variant: Variant, by_run: Sequence[Points]) -> Points:
    """Return the mean at each step that all of a variant's runs with this curve have."""
    curves = [dict(by_run[at]) for at in variant.runs.values() if by_run[at]]
    if not curves:
        return []
    steps = set(curves[0]).intersection(*curves)
    return [(step, _mean([curve[step] for curve in curves])) for step in sorted(steps)]


def as_data(runs: Sequence[RecordedRun], by: str = "") -> dict[str, Any]:
    """Return the scores of the variants for json, by set; empty if no variant has several runs."""
    groups = variants(runs, by)
    if not have_seeds(groups):
        return {}
    return {each.name: _set_data(over_seeds(each, groups)) for each in comparison.scores(runs)}


def _set_data(found: VariantScores) -> dict[str, Any]:
    differences: dict[str, Any] = {}
    for name, moments in found.differences.items():
        differences[name] = {"pairs": found.pairs[name]}
        for moment, difference in moments.items():
            differences[name][moment] = _interval(difference) | {"beyond_noise": difference.beyond_noise}
    means: dict[str, Any] = {}
    for name, moments in found.means.items():
        means[name] = {moment: _interval(mean) for moment, mean in moments.items()}
    return {"means": means, f"minus_{found.first}": differences}


def _interval(found: ScoreEstimate | Difference) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}
