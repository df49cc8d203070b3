"""Finds the replica with the least to do without looking at all of them."""

import heapq
from collections.abc import Callable

SPARE = 64  # stale entries that are always allowed


class LeastLoaded:
    """Replicas by their outstanding tokens, the least first, and the lowest number first among equals.

    A heap with an entry for each change of a number: entries that no longer hold are dropped when they come up, or when
    they are the most."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, replica: int) -> bool:
        return replica in self._tokens

    def __getitem__(self, replica: int) -> int:
        return self._tokens[replica]

    def put(self, replica: int, tokens: int) -> None:
        """Add a replica, or change its number."""
        if self._tokens.get(replica) == tokens:
            return
        self._tokens[replica] = tokens
        heapq.heappush(self._heap, (tokens, replica))
        if len(self._heap) > 4 * len(self._tokens) + SPARE:
            self._heap = [(tokens, replica) for replica, tokens in self._tokens.items()]
            heapq.heapify(self._heap)

    def drop(self, replica: int) -> None:
        self._tokens.pop(replica, None)

    def first(self, accepts: Callable[[int], bool], *, keeps: bool = True) -> int | None:
        """Return the first replica that is accepted. Those before it are looked at, and no others; without `keeps` they
        are dropped."""
        passed: list[tuple[int, int]] = []
        found = None
        while self._heap and found is None:
            tokens, replica = self._heap[0]
            if self._tokens.get(replica) != tokens:
                heapq.heappop(self._heap)
            elif accepts(replica):
                found = replica
            else:
                passed.append(heapq.heappop(self._heap))
        for entry in passed:
            if keeps:
                heapq.heappush(self._heap, entry)
            else:
                self.drop(entry[1])
        return found
