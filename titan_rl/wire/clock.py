"""Measure where a step's time goes: seconds by name, which the log reads once per step, and spans in the timeline."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from titan_rl.wire.spans import span


class Clock:
    def __init__(self) -> None:
        self._lap_began = time.perf_counter()
        self._lap: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self._lap[name] += time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """Return the seconds by name since the last lap, and the whole lap as "wall"."""
        now = time.perf_counter()
        lap = {**self._lap, "wall": now - self._lap_began}
        self._lap_began = now
        self._lap.clear()
        return lap
