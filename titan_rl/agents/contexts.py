"""A rollout's contexts as changes to earlier ones, the same in its environment process and at the controller."""

from collections.abc import Sequence
from dataclasses import dataclass

PROMPT = -1
"""Number of the turn that a rollout's prompt stands for."""


@dataclass(slots=True, eq=False)
class Line:
    """The tokens of turns that continue each other."""

    tokens: list[int]
    busy: bool = False  # a turn is being sampled at its end


class Contexts:
    """The tokens of a rollout up to each of its turns. Turns that continue each other share one list."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ends = {PROMPT: (Line(list(prompt)), len(prompt))}

    def open(self, after: int, kept: int, new: Sequence[int]) -> Line:
        """Return the context of a turn: the first `kept` tokens up to the turn `after`, then the new ones. Close it."""
        line, length = self._ends[after]
        if kept > length:
            raise ValueError(f"expected to keep at most the {length} tokens up to turn {after}, found {kept}")
        if line.busy or len(line.tokens) > kept:
            line = Line(line.tokens[:kept])
        line.busy = True
        line.tokens += new
        return line

    def close(self, line: Line, turn: int | None = None, sampled: Sequence[int] = ()) -> None:
        """Add what a turn sampled. Without a turn: nothing was sampled."""
        line.busy = False
        if turn is not None:
            line.tokens += sampled
            self._ends[turn] = (line, len(line.tokens))

    def length(self, turn: int) -> int:
        return self._ends[turn][1]

    def last(self, turn: int) -> list[int]:
        """Return the last token up to a turn, as a list of one; an empty list if there is none."""
        line, length = self._ends[turn]
        return line.tokens[max(0, length - 1) : length]

    def longest(self, tokens: Sequence[int]) -> int | None:
        """Return the turn up to which the most tokens are the first of `tokens`; None if there is none."""
        tokens = list(tokens)
        by_length = sorted(((length, turn) for turn, (_, length) in self._ends.items()), reverse=True)
        for length, turn in by_length:
            if length <= len(tokens) and self._ends[turn][0].tokens[:length] == tokens[:length]:
                return turn
        return None
