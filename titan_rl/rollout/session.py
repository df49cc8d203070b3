"""A rollout's access to the policy, and the branches that its samples form.

    sample(tokens):  tokens that extend a branch, from its end             the branch continues
                     any others: an edit, a retry, a fork, a summary       another branch begins
                     any of another player                                 that player's branch continues, or begins

Tokens that a new branch shares with an earlier one are context of its first turn. So every sampled token is under the
mask of exactly one branch, and each context that an engine read, with its completion, is the beginning of a branch.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from titan_rl.config.sections import Config
from titan_rl.record.ledger import read_checksum
from titan_rl.wire.sessions import ContextOverflow, SessionOver, TokensSpent, TurnsSpent
from titan_rl.wire.types import Branch, Completion, ImagePlace, Prompt, Turn

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits on one rollout."""

    context: int = NO_LIMIT  # tokens of a branch, read and sampled
    tokens: int = NO_LIMIT  # sampled in all turns
    turns: int = NO_LIMIT
    seconds: float | None = None  # for all attempts of its driver

    @classmethod
    def of(cls, config: Config, *, played: bool) -> "SessionLimits":
        """Return the limits of a config. Rollouts `played` by environments are timed there, without the queue, by
        environment.rollout_seconds."""
        return cls(context=config.longest_rollout, seconds=None if played else config.rollout.timeout_seconds)


Images = tuple[ImagePlace, ...]
SampleTurn = Callable[[int, list[int], int, str, Images], Awaitable[Completion]]
"""Samples a turn, given its number in the order in which the rollout asks for turns, its whole context, the most new
tokens, its player, and the images of the context."""
Answered = Callable[[tuple[int, int], Turn], None]
"""Called with the number of tokens before each answered turn, their checksum, and the turn."""


@dataclass(slots=True, eq=False)
class GrowingBranch:
    seat: str = ""
    tokens: list[int] = field(default_factory=list)  # read and sampled
    images: Images = ()  # among the tokens
    turns: list[Turn] = field(default_factory=list)
    checksum: int = 0  # CRC of the tokens, if turns are recorded
    sampling: bool = False  # its next turn is being sampled

    def continued_by(self, tokens: list[int], images: Images) -> bool:
        """Return True if these tokens begin with the branch's. Equal tokens may stand for different images."""
        if self.sampling or tokens[: len(self.tokens)] != self.tokens:
            return False
        return before(images, len(self.tokens)) == self.images


class RolloutSession:
    def __init__(
        self,
        id: str,
        prompt: Prompt,
        seed: int,
        ask: SampleTurn,
        *,
        limits: SessionLimits,
        answered: Answered | None = None,
        begins: Callable[[str], None] | None = None,
    ) -> None:
        """`begins` is called with the reason when a branch after the first one begins."""
        self.id, self.prompt, self.seed = id, prompt, seed
        self._ask, self._limits, self._answered, self._begins = ask, limits, answered, begins
        self._growing: list[GrowingBranch] = []
        self._turns = 0  # begun
        self._sampled = 0  # tokens
        self._over = False

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seat: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        if self._over:
            raise SessionOver(f"{self.id} has ended")
        index, context, max_tokens = self._turns, list(tokens), self._room(len(tokens), max_new_tokens)
        seen = tuple(images)
        branch = self._branch(index, seat, context, seen)
        read = context[len(branch.tokens) :]
        self._turns += 1
        branch.sampling = True
        try:
            completion = await self._ask(index, context, max_tokens, seat, seen)
        finally:
            branch.sampling = False
        if self._over:
            raise SessionOver(f"{self.id} ended while its turn {index} was sampled")
        if not branch.turns:
            self._growing.append(branch)
        turn = Turn(read, completion, index=index, seat=seat, images=seen[len(branch.images) :])
        if self._answered is not None:
            branch.checksum = read_checksum(read, branch.checksum)
            self._answered((len(context), branch.checksum), turn)
            branch.checksum = read_checksum(completion.tokens, branch.checksum)
        branch.tokens += read
        branch.tokens += completion.tokens
        branch.images = seen
        branch.turns.append(turn)
        self._sampled += len(completion.tokens)
        return completion

    def end(self) -> None:
        """Sample nothing more. What is being sampled is not kept."""
        self._over = True

    def branches(self, rewards: Sequence[float] = ()) -> list[Branch]:
        """Return the branches, in the order in which they began. `rewards` are the turns' rewards, in the order of the
        turns; turns without one get 0."""
        branches = sorted((branch.turns for branch in self._growing), key=lambda turns: turns[0].index)
        if rewards:
            order = sorted(turn.index for turns in branches for turn in turns)
            earned = dict(zip(order, rewards, strict=False))  # a turn that a limit ended may have none
            branches = [[replace(turn, reward=earned.get(turn.index, 0.0)) for turn in turns] for turns in branches]
        return [Branch(turns) for turns in branches]

    def _room(self, context: int, max_new_tokens: int | None) -> int:
        """Return how many tokens the next turn may sample. Raise LimitReached if none."""
        limits = self._limits
        if not context:
            raise ValueError(f"{self.id}: expected a context of at least 1 token, found none")
        if self._turns >= limits.turns:
            raise TurnsSpent(f"{self.id} has sampled {self._turns} turns, the limit")
        if self._sampled >= limits.tokens:
            raise TokensSpent(f"{self.id} has sampled {self._sampled} tokens, the limit is {limits.tokens}")
        if context >= limits.context:
            raise ContextOverflow(f"{self.id}: a context of {context} tokens leaves no room in {limits.context}")
        room = min(limits.context - context, limits.tokens - self._sampled)
        return room if max_new_tokens is None else max(1, min(room, max_new_tokens))

    def _branch(self, index: int, seat: str, context: list[int], images: Images) -> GrowingBranch:
        """Return the branch that continues: the longest of the player's that the context extends. Else return a new
        one."""
        own = [branch for branch in self._growing if branch.seat == seat]
        continued = [branch for branch in own if branch.continued_by(context, images)]
        if continued:
            return max(continued, key=lambda branch: len(branch.tokens))
        if own and self._begins is not None:
            shared = max(_shared(branch.tokens, context) for branch in own)
            self._begins(
                f"{self.id}: a branch begins with turn {index}, because only {shared} of its "
                f"{len(context)} tokens of context continue an earlier turn"
            )
        return GrowingBranch(seat)


def before(images: Sequence[ImagePlace], end: int) -> Images:
    """Return the images that begin before a place."""
    return tuple(image for image in images if image.begin < end)


def _shared(a: list[int], b: list[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
