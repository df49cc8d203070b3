"""Who is slower than its peers, for so long that it is no accident. On numbers alone, whoever measured them.

    seen(step, {"generator0": 0.011, "generator1": 0.012, "generator2": 0.047})    once a step

Names that come and go are no trouble; one that nobody can be compared with is never a straggler.
"""

from collections.abc import Mapping
from math import isfinite
from statistics import median


class Stragglers:
    """A straggler takes more than `factor` times the median of the *others*, `steps` steps in a row: with two ranks the
    median of the others is the other one, and a straggler among few does not raise the bar for itself."""

    def __init__(self, factor: float, steps: int) -> None:
        """`steps` = 0 names nobody."""
        self._factor, self._steps = factor, steps
        self._last = 0
        self._slow: dict[str, int] = {}  # for how many steps in a row, up to the last

    def seen(self, step: int, seconds: Mapping[str, float]) -> list[str]:
        """A sentence about each straggler that is new: once an episode, which ends with the first step in time. A step
        that does not follow the one before (the run went back, nothing was measured) begins all counts anew."""
        before = self._slow if step == self._last + 1 else {}
        self._last, self._slow = step, {}
        found: list[str] = []
        for name, own in seconds.items():
            others = median_of_others(seconds, name)
            if others is None or not own > self._factor * others:
                continue
            self._slow[name] = before.get(name, 0) + 1
            if self._slow[name] == self._steps:
                found.append(
                    f"{name} is a straggler: {own:.3g} s where its peers' median is {others:.3g} s ({own / others:.1f} "
                    f"times, fault.straggler_factor = {self._factor:g}), {self._steps} steps in a row up to step {step}"
                )
        return found


def median_of_others(seconds: Mapping[str, float], name: str) -> float | None:
    """None where nobody else has a number above zero: who did nothing is no measure."""
    others = [value for other, value in seconds.items() if other != name and isfinite(value) and value > 0]
    return median(others) if others else None
