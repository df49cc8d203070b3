"""The endless order of a task's training examples: a pure function of the seed and the place."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from titan_rl.tasks.task import Task, TaskPart
from titan_rl.wire.seeds import derive, shuffled

CHUNK = 4096  # draws among sources that are computed at a time


def order_of(task: Task, seed: int) -> Callable[[int], int]:
    """Return the function from a place to the index of its example."""
    if task.endless:
        return lambda place: place  # endless problems are drawn by the seed already
    return (MixedOrder(task.parts, seed) if task.parts else EpochOrder(len(task.train), seed)).index_at


class EpochOrder:
    """Each epoch is all examples in a new order."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._order = lru_cache(maxsize=2)(partial(shuffled, size, seed))  # epoch -> permutation

    def index_at(self, place: int) -> int:
        epoch, place = divmod(place, self._size)
        return int(self._order(epoch)[place])


class MixedOrder:
    """Draws from sources by their weights. The n-th draw of a source is the n-th example of its EpochOrder."""

    def __init__(self, parts: Sequence[TaskPart], seed: int) -> None:
        counts, weights = [part.count for part in parts], np.array([part.weight for part in parts])
        self._orders = [EpochOrder(part.count, derive(seed, "source", part.name)) for part in parts]
        self._first = np.cumsum([0, *counts])  # index of each source's first example
        self._shares, self._seed = np.cumsum(weights)[:-1] / weights.sum(), derive(seed, "mixture")
        self._before = [np.zeros(len(parts), np.int64)]  # [sources], by chunk: draws of each source before it
        self._chunk = lru_cache(maxsize=2)(self._drawn)

    def index_at(self, place: int) -> int:
        chunk, place = divmod(place, CHUNK)
        while len(self._before) <= chunk:
            drawn, _ = self._chunk(len(self._before) - 1)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self._orders)))
        drawn, earlier = self._chunk(chunk)
        source = int(drawn[place])
        example = self._orders[source].index_at(int(self._before[chunk][source] + earlier[place]))
        return int(self._first[source]) + example

    def _drawn(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each draw, and the number of earlier draws of that source within the chunk."""
        bits = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(chunk,))).random_raw(CHUNK)
        drawn = np.searchsorted(self._shares, bits / 2.0**64, side="right")  # [CHUNK]
        earlier = np.zeros(CHUNK, np.int64)
        for source in range(len(self._orders)):
            places = np.flatnonzero(drawn == source)
            earlier[places] = np.arange(places.size)
        return drawn, earlier
