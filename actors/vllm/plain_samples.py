"""Samples on their way into the batch of plain samples, and out of it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_rl.wire.types import Request


@dataclass(slots=True)
class Entry:
    """Samples of one context that have no row."""

    request: Request
    salt: str
    begun: list[int]  # what the sample had when it was added
    samples: deque[tuple[str, int]]  # their ids, and indices into the request's seeds
    again: list[int] = field(default_factory=list)  # what a sample that begins again has sampled since it was added
    hashes: Sequence[Any] = ()  # of the context's full blocks
    key: Any = None  # what the context is known by

    @property
    def start(self) -> int:
        """Where its answer begins."""
        return len(self.request.tokens) + len(self.begun)

    @property
    def context(self) -> list[int]:
        return [*self.request.tokens, *self.begun, *self.again]


class Entering(NamedTuple):
    """Samples of an entry that get rows."""

    entry: Entry
    samples: Sequence[tuple[str, int]]
    numbers: Any  # of their blocks  # [samples, blocks]
    cached: int  # tokens whose keys and values the blocks have, once `part` is copied
    part: int  # the block whose beginning is to be copied into the first that is not found; 0: none
    follows: int  # the birth of the row that reads for them


class Left(NamedTuple):
    """A sample that vLLM goes on with."""

    entry: Entry
    id: str
    nth: int
    tokens: list[int]  # sampled since it was added
    blocks: list[Any]  # none: it is to begin again
