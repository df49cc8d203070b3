"""What the rules need of a run's samples, added up in one pass: a long run has gigabytes of them."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a run that only watches its metrics reads no samples
    from titan_rl.tools.inspect.reward_audit import Suspicion
    from titan_rl.tools.inspect.samples import RunSample

UNLIKELY = math.log(0.01)
"""Log-prob below which the engines' rounding of a token weighs most: a ratio of two small numbers."""
NAMED = 3  # samples that are named per finding
MOST_TEXTS = 10_000  # distinct texts that are counted


@dataclass(slots=True)
class Bucket:
    """Answers of one kind: how many, their rewards, and the first and the latest."""

    count: int = 0
    rewarded: int = 0
    reward: float = 0.0
    examples: "list[RunSample]" = field(default_factory=list)  # the latest NAMED

    def add(self, answer: "RunSample") -> None:
        self.count += 1
        if answer.reward is not None:
            self.rewarded += 1
            self.reward += answer.reward
        self.examples = [*self.examples[1 - NAMED :], answer]

    @property
    def mean(self) -> float:
        return self.reward / self.rewarded if self.rewarded else math.nan


@dataclass(slots=True)
class Visits:
    """The groups of one prompt."""

    count: int = 0
    solved: int = 0  # groups in which every answer had the best reward
    failed: int = 0  # groups in which none had more than the worst


@dataclass(slots=True)
class AnswerFacts:
    """The samples of the steps `first` to `last`."""

    first: int = 0
    last: int = 0
    count: int = 0
    rewards: Counter[float] = field(default_factory=Counter)  # the first distinct values
    texts: set[int] = field(default_factory=set)  # checksums
    cut: Bucket = field(default_factory=Bucket)
    whole: Bucket = field(default_factory=Bucket)
    missed: Bucket = field(default_factory=Bucket)  # the reference is in the text, and the reward is not above 0
    unrewarded: Bucket = field(default_factory=Bucket)
    statuses: dict[str, Bucket] = field(default_factory=dict)
    parts: dict[str, Bucket] = field(default_factory=dict)  # answers without this component
    part_most: dict[str, float] = field(default_factory=dict)
    prompts: dict[int, Visits] = field(default_factory=dict)  # by checksum of the prompt
    groups: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # rewards of the last step's groups
    group_prompts: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)  # by place: first, last, inside
    unlikely: Counter[str] = field(default_factory=Counter)  # the same, for tokens less likely than UNLIKELY
    suspicions: "Sequence[Suspicion]" = ()  # by the audit of rewards, if the run's folder is read
    best: float = -math.inf
    worst: float = math.inf

    def add(self, answer: "RunSample") -> None:
        """Add one answer. The answers of a step follow each other."""
        if answer.step != self.last:
            self.close_step()
        self.first, self.last = self.first or answer.step, answer.step
        self.count += 1
        if len(self.texts) < MOST_TEXTS:
            self.texts.add(hash(answer.text))
        (self.cut if answer.truncated else self.whole).add(answer)
        self.statuses.setdefault(answer.status, Bucket()).add(answer)
        for name, value in answer.rewards.items():
            if value is None:
                continue
            self.part_most[name] = max(self.part_most.get(name, -math.inf), value)
            if value <= 0:
                self.parts.setdefault(name, Bucket()).add(answer)
        logprobs = [each for each in compress(answer.logprobs, answer.mask) if each is not None]
        for place, logprob in enumerate(logprobs):
            where = "first" if place == 0 else "last" if place == len(logprobs) - 1 else "inside"
            self.tokens[where] += 1
            self.unlikely[where] += logprob < UNLIKELY
        if answer.reward is None:
            self.unrewarded.add(answer)
            return
        if answer.reward <= 0 and names(answer.text, answer.answer):
            self.missed.add(answer)
        if len(self.rewards) < 100 or answer.reward in self.rewards:
            self.rewards[answer.reward] += 1
        self.best, self.worst = max(self.best, answer.reward), min(self.worst, answer.reward)
        key = (answer.step, answer.prompt_id)
        self.groups.setdefault(key, []).append(answer.reward)
        self.group_prompts[key] = hash(answer.prompt)

    def close_step(self) -> None:
        """Count the visits of the last step's prompts."""
        for key, rewards in self.groups.items():
            visits = self.prompts.setdefault(self.group_prompts[key], Visits())
            visits.count += 1
            equal = min(rewards) == max(rewards)
            visits.solved += equal and self.best > self.worst and rewards[0] == self.best
            visits.failed += equal and rewards[0] == self.worst
        self.groups, self.group_prompts = {}, {}


def names(text: str, reference: str) -> bool:
    """Return True if the text has the reference as a whole word. Short references are in any text."""
    if len(reference) < 2:
        return False
    return re.search(rf"(?<![\w.]){re.escape(reference)}(?![\w]|\.\d)", text) is not None
