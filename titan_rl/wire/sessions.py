"""The contract between the driver of a rollout and the session that samples its turns.

A driver writes each turn's whole context as token ids, and receives the sampled tokens:

    driver.drive(session):  completion = await session.sample(tokens) -> ... -> Outcome

A context that extends the tokens of an earlier turn of the same player continues that turn's branch; any other context
begins a branch. So a rollout is a tree, and nothing that was sampled is ever tokenized again. A single answer is the
one-turn case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_rl.wire.stop_reasons import FAILED as FAILED
from titan_rl.wire.stop_reasons import Status as Status
from titan_rl.wire.types import Completion, ImagePlace, Prompt, Rollout, Sampling


class LimitReached(Exception):
    """A session may not sample this turn. A driver that does not catch it ends its rollout with `status`."""

    status: Status


class ContextOverflow(LimitReached):
    """The turn's context leaves no room to sample in."""

    status = "context_overflow"


class TokensSpent(LimitReached):
    """The rollout has reached its limit of tokens."""

    status = "max_tokens"


class TurnsSpent(LimitReached):
    """The rollout has reached its limit of turns."""

    status = "max_turns"


class DriverLost(Exception):
    """The process that drove a rollout died. The rollout begins again, from its start and with the same seeds."""


class SessionOver(Exception):
    """The rollout has ended, by its deadline for example: it can sample no more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A driver's result for a rollout, except the tokens, which the session has."""

    status: Status = "completed"
    reward: float | None = None  # None: the task's reward judges the sampled text
    rewards: Mapping[str, float] = field(default_factory=dict)  # the reward's components, for display
    turn_rewards: Sequence[float] = ()  # one per turn, in the order of sampling; empty: none
    messages: Sequence[Mapping[str, Any]] = ()  # the conversation, for display and for rewards
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers to log, such as tool calls and seconds
    error: str = ""  # set if the status is one of FAILED
    feedback: str = ""  # the last text that the environment returned as its feedback
    seats: Mapping[str, float | None] = field(default_factory=dict)
    """The reward of each player of an episode of several; None: it is not trained on."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment adds to a prompt before the first turn."""

    observation: Any = None  # text, messages, or the whole conversation
    tools: Sequence[dict[str, Any]] = ()  # their schemas


class Session(Protocol):
    """One rollout's access to the policy."""

    @property
    def id(self) -> str: ...  # unique among all that run at the same time

    @property
    def prompt(self) -> Prompt: ...

    @property
    def seed(self) -> int: ...  # the rollout's own, for the environment's randomness

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seat: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        """Sample one turn after `tokens`, the whole context with all its `images`. `max_new_tokens` lowers the
        configured limit; `seat` is the player whose turn it is. Raise LimitReached if this turn is one too many, and
        SessionOver once the rollout has ended."""
        ...


class Driver(Protocol):
    """Drives rollouts: a single answer, an environment mesh, an agent behind the endpoint."""

    async def drive(self, session: Session) -> Outcome: ...


class Plays(Protocol):
    """Samples one rollout of a prompt that is no group's, for an evaluation. Its reward is NaN if the driver gave
    none."""

    async def __call__(
        self, prompt: Prompt, sampling: Sampling, *, sample: int = 0, seed: int = 0, set_name: str = ""
    ) -> Rollout:
        """`sample` counts the answers to one prompt in the set `set_name`, whose `seed` seeds them."""
        ...
