"""Messages about rollouts between the controller and an environment process, and a rollout's contexts at both ends.

Begin, Answer ──> EpisodeLoop ──> Ask, Dropped, Ended; Blocked if it stands still

A message has only the change to an earlier context: `Contexts` keeps the whole ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_rl.wire.sessions import Outcome, Status
from titan_rl.wire.types import Finish, ImagePlace, Prompt

PROMPT = -1
"""Number of the turn that a rollout's prompt stands for."""


class Begin(NamedTuple):
    id: int
    prompt: Prompt
    seed: int


class Ask(NamedTuple):
    """A turn of the policy. Its context is the first `kept` tokens up to the end of the turn `after`, then `new`. A
    rollout may ask for several turns at the same time."""

    id: int
    kept: int
    new: list[int]
    most: int | None  # tokens to sample, if the rollout's limit is near
    turn: int = 0  # its number in the rollout
    after: int = PROMPT
    logprobs: bool = False  # the answer has them
    seat: str = ""  # the player whose turn it is, in an episode of several
    images: tuple[ImagePlace, ...] = ()  # in `new`; their places count from the context's first token


class Answer(NamedTuple):
    id: int
    tokens: list[int]
    finish: Finish
    over: Status | None = None  # the limit that forbids the turn
    turn: int = 0
    logprobs: Sequence[float] = ()


class Dropped(NamedTuple):
    """Nothing waits for a turn any more: its client is gone."""

    id: int
    turn: int


class Ended(NamedTuple):
    id: int
    outcome: Outcome


class Blocked(NamedTuple):
    """A rollout that blocks the loop."""

    id: int | None
    seconds: float
    place: str
    dead: str = ""  # how environment.python ended, if it did


News = Ask | Dropped | Ended


@dataclass(slots=True, eq=False)
class Line:
    """The tokens of turns that continue each other."""

    tokens: list[int]
    images: list[ImagePlace] = field(default_factory=list)
    busy: bool = False  # a turn is being sampled at its end


class Contexts:
    """The tokens of a rollout up to each of its turns. Turns that continue each other share one list."""

    def __init__(self, prompt: Sequence[int], images: Sequence[ImagePlace] = ()) -> None:
        self._ends = {PROMPT: (Line(list(prompt), list(images)), len(prompt))}

    def open(self, after: int, kept: int, new: Sequence[int], images: Sequence[ImagePlace] = ()) -> Line:
        """Return the context of a turn: the first `kept` tokens up to the turn `after`, then the new ones, which have
        `images`. Close it."""
        line, length = self._ends[after]
        if kept > length:
            raise ValueError(f"expected to keep at most the {length} tokens up to turn {after}, found {kept}")
        if line.busy or len(line.tokens) > kept:
            line = Line(line.tokens[:kept], [image for image in line.images if image.begin < kept])
        line.busy = True
        line.tokens += new
        line.images += images
        return line

    def close(self, line: Line, turn: int | None = None, sampled: Sequence[int] = ()) -> None:
        """Add the tokens that a turn sampled. Without a turn: nothing was sampled."""
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
