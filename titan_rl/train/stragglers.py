"""Finds ranks that are slower than their peers for several steps in a row. Works on numbers alone.

    seen(step, {"generator0": 0.011, "generator1": 0.012, "generator2": 0.047})    once a step

Names may come and go. A rank without peers is never a straggler.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

STRAGGLER_FACTOR = 2.0
"""A straggler takes more than this many times its peers' median."""
STRAGGLER_STEPS = 5
"""Slow steps in a row after which a straggler is reported."""


class Stragglers:
    """A straggler takes more than `factor` times the median of the *others*, `steps` steps in a row. The median leaves
    the rank itself out: with two ranks it is the other one, and a straggler does not raise the bar for itself."""

    def __init__(self, factor: float, steps: int) -> None:
        self._factor, self._steps = factor, steps
        self._last = 0
        self._slow: dict[str, int] = {}  # for how many steps in a row, up to the last

    def seen(self, step: int, seconds: Mapping[str, float]) -> list[str]:
        """Return a sentence about each new straggler, once per episode; its first step in time ends an episode. All
        counts restart at a step that does not follow the last one (the run was rewound, or nothing was measured)."""
        before = self._slow if step == self._last + 1 else {}
        self._last, self._slow = step, {}
        stragglers = list[str]()
        measured = sorted(value for value in seconds.values() if isfinite(value) and value > 0)  # without idle ranks
        for name, own in seconds.items():
            others = median_without(own, measured)
            if others is None or not own > self._factor * others:
                continue
            self._slow[name] = before.get(name, 0) + 1
            if self._slow[name] == self._steps:
                stragglers.append(
                    f"{name} is a straggler: {own:.3g} s where its peers' median is {others:.3g} s ({own / others:.1f} "
                    f"times), {self._steps} steps in a row up to step {step}"
                )
        return stragglers


def median_without(own: float, measured: Sequence[float]) -> float | None:
    """Return the median of the sorted numbers without one that equals `own`; None if no other is left."""
    others = list(measured)
    if own in others:
        others.remove(own)
    return median(others) if others else None
