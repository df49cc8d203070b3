"""What flows through a run, in one direction only.

    Prompt -> Turn(s) -> Rollout -> Group -> Batch -> StepStats
              generators   rewards  stream   trainers

Carriers are frozen; derived values are properties. Nothing here imports torch: these objects cross
process boundaries, and the controller never needs a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Finish = Literal["stop", "length", "abort"]
Decode = Callable[[Sequence[int]], str]
PhaseName = Literal["cold_start", "rl"]  # supervised steps, then those of the algorithm, on one model
RoleName = Literal["trainer", "critic", "reference", "teacher", "reward_model"]  # a mesh of TorchTitan ranks

Column = Literal[
    "behaviour",  # log-prob of the token when it was sampled
    "proximal",  # log-prob under the policy before the step's first update
    "reference",  # log-prob under the frozen reference
    "teacher",  # log-prob under the teacher
    "advantage",
    "value",  # the critic's, before the step's first update
    "return",
]


RATIO_EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0, float("inf"))
"""Of the histogram of importance ratios."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item. `tokens` is what the policy reads; `answer` is what the reward compares with.

    >>> Prompt(7, "12+34=", [1, 4, 5, 13, 6, 7, 14], "640")
    """

    id: int  # position in the data source's order: unique in a run, repeats never
    text: str
    tokens: list[int]
    answer: str
    row: dict[str, Any] = field(default_factory=dict)  # the data set's own columns
    rejected: str = ""  # of a preference pair, whose chosen side is `answer`


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a generator samples. temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()  # EOS included; a stop token is sampled, kept, and ends the turn


@dataclass(frozen=True, slots=True)
class Request:
    """`len(seeds)` independent samples of one context.

    >>> Request("prompt-7", [1, 4, 5], seeds=[11, 12], sampling=Sampling(64), expected=20)
    """

    id: str
    tokens: list[int]
    seeds: list[int]
    sampling: Sampling
    begun: list["Completion"] = field(default_factory=list)
    """What is there of each sample already, unless this is empty. A sample goes on where it stands if its finish is
    "abort", and is answered as it is otherwise; max_new_tokens counts both parts."""
    expected: int = 0  # tokens that a sample may come to, a hint for routing; 0: max_new_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """What one sample of a request came to. All lists have one entry per sampled token."""

    tokens: list[int]
    logprobs: list[float]  # of the sampled token, at the sampling temperature
    versions: list[int]  # the policy version that sampled the token
    finish: Finish


class Generates(Protocol):
    """Whatever answers requests: the generator mesh, or what stands for it in a test."""

    async def generate(self, request: Request) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens the policy read, then the tokens that it sampled in answer. Never re-tokenized text."""

    context: list[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trajectory: one turn, or several with tool output as the later turns' context."""

    turns: list[Turn]
    text: str  # the sampled text, for people and for rewards
    reward: float
    penalty: float = 0.0  # for its length; the reward that is logged and evaluated is without it
    advantage: float = 0.0  # mean over its trained tokens

    @property
    def signal(self) -> float:
        """What is learnt from."""
        return self.reward - self.penalty

    @property
    def tokens(self) -> list[int]:
        return [t for turn in self.turns for t in (*turn.context, *turn.completion.tokens)]

    @property
    def mask(self) -> list[int]:
        """1 exactly on the tokens that the policy sampled."""
        return [m for turn in self.turns for m in (*(0,) * len(turn.context), *(1,) * len(turn.completion.tokens))]

    @property
    def logprobs(self) -> list[float]:
        """Sampling log-probs, 0.0 where the mask is 0."""
        return [p for turn in self.turns for p in (*(0.0,) * len(turn.context), *turn.completion.logprobs)]

    @property
    def versions(self) -> list[int]:
        """Of the sampled tokens only."""
        return [v for turn in self.turns for v in turn.completion.versions]

    @property
    def sampled(self) -> int:
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return self.turns[-1].completion.finish != "stop"


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def version(self) -> int:
        """The oldest policy that sampled any of these tokens."""
        return min(v for r in self.rollouts for v in r.versions)

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts]

    @property
    def signals(self) -> list[float]:
        return [r.signal for r in self.rollouts]

    @property
    def flat(self) -> bool:
        """All equal: siblings teach nothing about each other."""
        return len(set(self.signals)) == 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One packable token sequence. Lists have one entry a token: what stands at i belongs to tokens[i]."""

    tokens: list[int]
    mask: list[int]  # 1 on the tokens that are trained on
    columns: Mapping[Column, Sequence[float] | np.ndarray] = field(default_factory=dict)

    def with_columns(self, **columns: Sequence[float] | np.ndarray) -> "Sample":
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True, slots=True)
class Rows:
    """One microbatch of packed rows. Position i predicts targets[i]; documents restart positions at 0."""

    tokens: np.ndarray  # [B, L] int64
    positions: np.ndarray  # [B, L] int64
    targets: np.ndarray  # [B, L] int64
    mask: np.ndarray  # [B, L] float32, 1 where targets[i] is trained on
    weights: np.ndarray  # [B, L] float32: what the token counts in the loss; mask, aggregation and denominator in one
    sequences: np.ndarray  # [B, L] int64: the document's index within the microbatch; -1 is padding
    samples: np.ndarray  # [S] int64: which of the batch's samples document s is
    columns: dict[Column, np.ndarray]  # [B, L] float32 each, of targets[i]


@dataclass(frozen=True, slots=True)
class Batch:
    """One dp row's share of an update. Every dp row holds equally many microbatches (they run collectives)."""

    microbatches: list[Rows]
    tokens: int  # trained tokens over all dp rows, at least 1: the denominator of every per-token mean
    sequences: int  # sequences with a trained token over all dp rows, at least 1


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a mesh that trains reports of one step, already reduced over the mesh."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int  # trained tokens
    seconds: float  # inside the slowest rank
    skipped: int = 0  # updates, for their gradient was not finite
    busy: float = 0.0  # seconds in which this rank computed, or could have but for others on its core
    ranks: Mapping[str, float] = field(default_factory=dict)  # of all ranks, by name: how long each was busy
    metrics: dict[str, float] = field(default_factory=dict)  # under the names that are logged
    histograms: dict[str, list[float]] = field(default_factory=dict)


class Backlog(NamedTuple):
    """Groups in flight."""

    inflight: int
    finished: int  # of those, waiting to be trained on


@dataclass(slots=True)
class EngineStats:
    """Counts since start-up."""

    steps: int = 0
    tokens: int = 0  # sampled
    prompt_tokens: int = 0  # of finished samples
    cached_tokens: int = 0  # of those, read from the prefix cache
    max_batch: int = 0  # most samples that one step advanced
    seconds: float = 0.0  # in add and step

    def since(self, before: "EngineStats") -> "EngineStats":
        return EngineStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self) if f.name != "max_batch"},
            max_batch=self.max_batch,
        )

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class SyncStats:
    """What one weight sync cost: seconds of the slowest rank in each part, bytes over all generator ranks."""

    version: int
    bytes: int
    publish: float
    read: float
    write: float
    seconds: float  # wall time in the controller
    verify: float = 0.0  # seconds of comparing checksums
    pause: float = 0.0  # seconds that an engine stood still
    changed: float | None = None  # under weight_sync.delta: share of the weights' blocks that were transferred
    waited: float = 0.0  # seconds of `seconds` in which the controller did nothing else
    engines: Mapping[str, "EngineStats"] = field(default_factory=dict)  # what each replica did since the sync before
