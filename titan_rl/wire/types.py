"""The data that flows through a run, in one direction only.

    Prompt -> Turns -> Rollout -> Group -> Batch -> StepStats
            generators   rewards  stream   trainers

Carriers are frozen; derived values are properties. Nothing here imports torch: these objects cross process boundaries,
and the controller never needs a tensor.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from titan_rl.wire.stop_reasons import Status

Finish = Literal["stop", "length", "abort"]
Decode = Callable[[Sequence[int]], str]
PhaseName = Literal["cold_start", "rl"]  # supervised steps, then the algorithm's steps, on one model
RoleName = Literal["trainer", "critic", "reference", "teacher", "reward_model"]  # a mesh of TorchTitan ranks

Column = Literal[
    "behaviour",  # log-prob of the token when it was sampled
    "proximal",  # log-prob under the policy before the step's first update
    "reference",  # log-prob under the frozen reference
    "teacher",  # log-prob under the teacher
    "kl",  # KTO's estimate of the KL to the reference, one for all tokens of a step
    "score_norm",  # squared norm of the log-prob's gradient to the logits, before the step's first update
    "image",  # 1 in a sample with images, in a step that has any
    "advantage",
    "value",  # the critic's, before the step's first update
    "return",
]

RATIO_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0, float("inf"))
"""Bin edges of the histogram of importance ratios."""


class ContextScore(NamedTuple):
    """An engine's score of a context token."""

    logprob: float  # at temperature 1, over the whole vocabulary
    best: int
    best_logprob: float


Demonstration = Sequence[tuple[str, str | list[dict[str, Any]]]]
"""Pairs of the policy's text in a turn and the reply to it: text, or chat messages."""


IMAGES = "images"
"""Folder of a run with the files of its images, each named by the SHA-256 of its bytes."""


class ImagePlace(NamedTuple):
    """An image among tokens. The policy may sample placeholders too: only a place tells an image's from them."""

    name: str  # the SHA-256 of its file
    begin: int  # place of its first token, before or at its first placeholder


def names_of(images: Sequence[ImagePlace]) -> list[str]:
    return [image.name for image in images]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item. The policy reads `tokens`; the reward compares with `answer`.

    >>> Prompt(7, "12+34=", [1, 4, 5, 13, 6, 7, 14], "640")
    """

    id: int  # position in the data source's order: unique in a run
    text: str
    tokens: list[int]
    answer: str
    row: dict[str, Any] = field(default_factory=dict)  # the data set's own columns
    rejected: str = ""  # the rejected answer of a preference pair; `answer` is the chosen one
    messages: Sequence[dict[str, Any]] = ()  # a chat, which `tokens` render
    demonstration: Demonstration = ()
    where: str = ""  # file:line of its row
    images: tuple[ImagePlace, ...] = ()  # in `tokens`, in order

    @property
    def question(self) -> str:
        """The text, or the last message of a chat."""
        return str(self.messages[-1]["content"]) if self.messages else self.text


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # with EOS; a stop token is sampled, kept, and ends the turn
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    scores_context: bool = False  # return the log-probs of the context's tokens too


@dataclass(frozen=True, slots=True)
class Request:
    """A request for `len(seeds)` independent samples of one context.

    >>> Request("prompt-7", [1, 4, 5], seeds=[11, 12], sampling=Sampling(64), expected=20)
    """

    id: str
    tokens: list[int]
    seeds: list[int]
    sampling: Sampling
    begun: list["Completion"] = field(default_factory=list)
    """Partial samples to resume, one per seed; empty for a new request. A sample with finish="abort" continues; any
    other is returned unchanged. max_new_tokens counts old and new tokens."""
    expected: int = 0  # expected tokens per sample, a hint for routing; 0: max_new_tokens
    affinity: tuple[str, ...] = ()  # rollout and group with the same beginning of the context, for routing
    slot: int = 0  # number of the policy whose adapters answer
    adapter: str = ""  # folder of an adapter in PEFT's layout, if the engines read any; empty: none
    version: int | None = None  # of `adapter`; None: its tokens have the slot's version
    images: tuple[ImagePlace, ...] = ()  # as Prompt.images


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of a request. All lists have one entry per sampled token."""

    tokens: list[int]
    logprobs: list[float]  # at the sampling temperature
    versions: list[int]  # policy version that sampled the token
    finish: Finish
    replica: str = ""  # set if a log-prob is not finite
    context: list[ContextScore] = field(default_factory=list)  # the second to last context token, if requested
    extras: dict[str, Any] = field(default_factory=dict)  # side columns that were recorded (side_columns.py), by name

    @property
    def finite(self) -> bool:
        return math.isfinite(sum(self.logprobs))


NEWEST = 2**62
"""Newer than every version."""


def shortened(text: str, most: int = 100) -> str:
    """Return a text on one line, cut in its middle."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most // 2 - 2]} ... {line[3 - most // 2 :]}"


def uniform(versions: Sequence[int]) -> bool:
    """Return True if one version sampled all tokens."""
    return len(versions) > 0 and versions.count(versions[0]) == len(versions)


def extremes(versions: Sequence[int]) -> tuple[int, int]:
    """Return the oldest and the newest version."""
    return (versions[0], versions[0]) if uniform(versions) else (min(versions), max(versions))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's verdict on one rollout."""

    reward: float  # NaN: none, for the reason in `error`
    parts: Mapping[str, float] = field(default_factory=dict)  # components and other numbers, logged
    error: str = ""  # with a reward: a failure besides, such as the grader's
    hung: bool = False  # it failed by not returning
    feedback: str = ""  # for a teacher to read


Judge = Callable[[Prompt, Sequence["Rollout"]], Awaitable[Sequence[float | Judgement]]]
"""Returns a reward or verdict for each rollout of a group. An exception means that the whole group has no rewards,
unless it is a RunError: a mesh has failed, which ends or heals the run."""


@dataclass(frozen=True, slots=True)
class Opponent:
    """Plays a seat of an episode in place of the policy."""

    name: str
    adapter: str  # its folder
    version: int  # the step that made it, 0 if this run did not


Cast = Mapping[str, Opponent]
"""Who plays in place of the policy, by seat."""


class Generates(Protocol):
    """Answers requests: the generator mesh, or a fake in a test."""

    async def generate(self, request: Request) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The context since the branch's previous turn, and the completion. Text is never tokenized again."""

    context: list[int]
    completion: Completion
    reward: float = 0.0
    index: int = 0  # among the rollout's turns, in the order of requests
    seat: str = ""  # the player whose turn it is, in an episode of several (environment.seats)
    images: tuple[ImagePlace, ...] = ()  # in `context`; their places count from the branch's first token


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of tokens. Tokens shared with an earlier branch are context of its first turn, so that each sampled
    token is under the mask of one branch only."""

    turns: list[Turn]

    @property
    def seat(self) -> str:
        """The player, whose turns these are."""
        return self.turns[0].seat if self.turns else ""

    @property
    def tokens(self) -> list[int]:
        parts = (part for turn in self.turns for part in (turn.context, turn.completion.tokens))
        return list(chain.from_iterable(parts))

    @property
    def images(self) -> tuple[ImagePlace, ...]:
        return tuple(chain.from_iterable(turn.images for turn in self.turns))

    @property
    def mask(self) -> list[int]:
        """1 exactly on the tokens that the policy sampled."""
        parts = ([0] * len(turn.context) + [1] * len(turn.completion.tokens) for turn in self.turns)
        return list(chain.from_iterable(parts))

    @property
    def logprobs(self) -> list[float]:
        """Sampling log-probs, 0.0 where the mask is 0."""
        parts = ([0.0] * len(turn.context) + turn.completion.logprobs for turn in self.turns)
        return list(chain.from_iterable(parts))

    @property
    def versions(self) -> list[int | None]:
        """Policy versions, None where the mask is 0."""
        parts = ([None] * len(turn.context) + turn.completion.versions for turn in self.turns)
        return list(chain.from_iterable(parts))


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trajectory: one turn, or several in one branch or more, which are one member of its group together."""

    branches: list[Branch]
    text: str  # the last turn's, for display and for rewards
    reward: float  # NaN: none; the rollout is not trained on
    penalty: float = 0.0  # for its length; logged and evaluated rewards do not include it
    advantage: float = 0.0  # mean over its trained tokens
    status: Status = "completed"
    rewards: Mapping[str, float] = field(default_factory=dict)  # the reward's components, for display
    messages: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    attempts: int = 1  # by its driver
    parts: Mapping[str, float] = field(default_factory=dict)  # numbers in the judge's verdict
    unrewarded: str = ""  # the judge's reason for no reward
    feedback: str = ""  # text of the judge or the environment, for a teacher to read
    seats: Mapping[str, float | None] = field(default_factory=dict)
    """The reward of each player of an episode of several; None: its tokens are not trained on. `reward` is the mean."""
    trained: Mapping[str, str] = field(default_factory=dict)  # digest of each player's tokens that were trained on
    opponents: Mapping[str, str] = field(default_factory=dict)  # who plays in place of the policy, by seat

    @property
    def signal(self) -> float:
        """The reward to learn from."""
        return self.reward - self.penalty

    @property
    def valid(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def turns(self) -> list[Turn]:
        """The turns in the order of requests."""
        return sorted((turn for branch in self.branches for turn in branch.turns), key=lambda turn: turn.index)

    @property
    def completion(self) -> Completion:
        """All sampled tokens, branch by branch, as if one request had sampled them. Several have no side columns."""
        parts = [turn.completion for branch in self.branches for turn in branch.turns]
        if len(parts) == 1:
            return parts[0]
        names = ("tokens", "logprobs", "versions")
        tokens, logprobs, versions = (list(chain.from_iterable(getattr(p, n) for p in parts)) for n in names)
        return Completion(tokens, logprobs, versions, parts[-1].finish if parts else "abort")

    @property
    def versions(self) -> list[int]:
        """Policy versions, of the sampled tokens only."""
        return self.completion.versions

    @property
    def policy_versions(self) -> list[int]:
        """Versions of the tokens that the policy sampled, without its opponents'."""
        if not self.opponents:
            return self.versions
        own = [turn for branch in self.branches if branch.seat not in self.opponents for turn in branch.turns]
        return [version for turn in own for version in turn.completion.versions]

    @property
    def sampled(self) -> int:
        return sum(len(turn.completion.tokens) for branch in self.branches for turn in branch.turns)

    @property
    def finish(self) -> Finish:
        """How its last turn ended; "abort" if there is none."""
        return turns[-1].completion.finish if (turns := self.turns) else "abort"

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens ended it, rather than the policy."""
        return self.finish != "stop" or self.status in ("max_tokens", "context_overflow")

    @property
    def plain(self) -> bool:
        """True if it is one answer without further facts."""
        more = self.status != "completed" or self.attempts > 1 or self.messages or self.rewards or self.metrics
        return not more and len(self.branches) == 1 and len(self.branches[0].turns) == 1


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]
    baseline: float | None = field(default=None, kw_only=True)  # the signal of a greedy rollout that is not among them
    seat: str = field(default="", kw_only=True)  # the player whose turns and rewards these are (batch/seats.py)
    number: int = field(default=-1, kw_only=True)  # unique in a step; -1: the prompt's id

    def with_rewards(self, rewards: Sequence[float]) -> "Group":
        """Return the group with a reward for each of its rollouts; NaN: none, and nothing is learned from it."""
        if len(rewards) != len(self.rollouts):
            raise ValueError(f"expected {len(self.rollouts)} rewards, one for each rollout, found {len(rewards)}")
        rewarded = [replace(r, reward=float(reward)) for r, reward in zip(self.rollouts, rewards, strict=True)]
        return replace(self, rollouts=rewarded)

    def sequence(self, k: int) -> int:
        """Return the number of its k-th rollout among all that are trained on."""
        return (self.prompt.id if self.number < 0 else self.number) * len(self.rollouts) + k

    def __str__(self) -> str:
        lines = [f"prompt {self.prompt.id}: {shortened(self.prompt.question)}"]
        return "\n".join([*lines, *(f"  {r.reward:>7.3f}  {shortened(r.text)}" for r in self.rollouts)])

    def _repr_html_(self) -> str:
        """Return the group as a table, which notebooks show."""
        left = 'style="text-align: left"'
        rows = [(f"{r.reward:.3f}", r.text) for r in self.rollouts]
        cells = "".join(f"<tr><td>{reward}</td><td {left}>{escape(shortened(text))}</td></tr>" for reward, text in rows)
        question = escape(shortened(self.prompt.question))
        return f"<table><tr><th>{self.prompt.id}</th><th {left}>{question}</th></tr>{cells}</table>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the group as IPython's text."""
        printer.text(str(self))

    @property
    def version(self) -> int:
        """The oldest version of the policy that sampled any of these tokens; NEWEST if opponents sampled all."""
        return min((extremes(own)[0] for r in self.rollouts if (own := r.policy_versions)), default=NEWEST)

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts]

    @property
    def flat(self) -> bool:
        """True if all signals are equal, each player's by itself."""
        return len({(r.signal, *r.seats.values()) for r in self.rollouts if r.valid}) == 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One packable token sequence. Lists have one entry per token: entry i belongs to tokens[i]."""

    tokens: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray  # 1 on the tokens that are trained on
    columns: Mapping[Column, Sequence[float] | np.ndarray] = field(default_factory=dict)
    prompt: int = 0  # leading tokens, computed once for all samples that begin with them; 0: unknown
    sequence: int = -1  # its rollout: samples with one number are one sequence; -1: a sequence by itself
    extras: Mapping[str, Any] = field(default_factory=dict)  # side columns (side_columns.py), by name
    images: tuple[ImagePlace, ...] = ()  # in `tokens`, in order; none is sampled

    def with_columns(self, **columns: Sequence[float] | np.ndarray) -> "Sample":
        every: dict[Any, Sequence[float] | np.ndarray] = {**self.columns, **columns}
        return replace(self, columns=every)


@dataclass(frozen=True, slots=True)
class Rows:
    """One microbatch of packed rows: places, which read tokens, and the targets that they predict. Target i of a row is
    predicted at its place i, unless samples share places."""

    tokens: np.ndarray  # [B, L] int64
    positions: np.ndarray  # [B, L] int64: the token's in its sample
    targets: np.ndarray  # [B, T] int64
    places: np.ndarray  # [B, T] int64: the place in the flattened rows that predicts targets[i]
    mask: np.ndarray  # [B, T] float32, 1 where targets[i] is trained on
    weights: np.ndarray  # [B, T] float32: weight in the loss; combines mask, aggregation and denominator
    sequences: np.ndarray  # [B, T] int64: the target's document, by its index within the microbatch; -1 is padding
    samples: np.ndarray  # [S] int64: index of document s among the batch's samples
    columns: dict[Column, np.ndarray]  # [B, T] float32 each, of targets[i]
    segments: np.ndarray  # [G, 4] int64: begin and length of each segment, in places of the flattened rows, in order;
    # then begin and length of the prefix that it attends to, besides its own places up to the attending one
    extras: Mapping[str, Any] = field(default_factory=dict)  # side columns, by name
    images: Sequence[tuple[ImagePlace, ...]] = ()  # each row's, in order; empty: no row has any


@dataclass(frozen=True, slots=True)
class Batch:
    """One dp row's share of an update. All dp rows have the same number of microbatches, because they run
    collectives."""

    microbatches: list[Rows]
    tokens: int  # trained tokens over all dp rows, at least 1: the denominator of every per-token mean
    sequences: int  # sequences with a trained token over all dp rows, at least 1
    unshared: int = 0  # places that these microbatches would have if samples shared none
    loss: Callable[..., Any] | None = None  # a user's, in the place of the algorithm's clip (kernels/own_loss.py)


ENTRY = np.dtype([("id", "<i4"), ("logprob", "<f4")])
"""A token and its log-prob: what a model answers about its most likely tokens."""


def entries(ids: np.ndarray, logprobs: np.ndarray | np.float32) -> np.ndarray:
    found = np.empty(ids.shape, ENTRY)
    found["id"], found["logprob"] = ids, logprobs
    return found


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return lengths[0] consecutive numbers from begins[0], then lengths[1] from begins[1], and so on."""
    return np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
