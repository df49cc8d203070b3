"""What an environment process and the controller tell each other about rollouts.

Begin, Answer ──> EpisodeLoop ──> Ask, Dropped, Ended; Blocked if it stands still
"""

from collections.abc import Sequence
from typing import NamedTuple

from titan_rl.agents.contexts import PROMPT
from titan_rl.wire.sessions import Outcome, Status
from titan_rl.wire.types import Finish, Prompt


class Begin(NamedTuple):
    id: int
    prompt: Prompt
    seed: int


class Ask(NamedTuple):
    """A turn of the policy. The context is the first `kept` tokens up to the turn `after`, with what it sampled, then
    `new`. A rollout may ask for several turns at the same time."""

    id: int
    kept: int
    new: list[int]
    most: int | None  # tokens to sample, if the rollout's limit is near
    turn: int = 0  # its number in the rollout
    after: int = PROMPT
    logprobs: bool = False  # the answer has them


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
