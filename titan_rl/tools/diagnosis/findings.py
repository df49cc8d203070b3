"""What a rule finds, and the change of a key that it proposes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_rl.config.sections import Config


@dataclass(frozen=True, slots=True)
class Change:
    """A key to change. `proposed` is a value, or words where no value follows from the numbers."""

    key: str
    proposed: Any
    now: Any = None

    @classmethod
    def of(cls, config: Config, key: str, proposed: Any) -> "Change":
        section, _, name = key.partition(".")
        return cls(key, proposed, getattr(getattr(config, section), name))

    @property
    def in_words(self) -> bool:
        return isinstance(self.proposed, str) and " " in self.proposed

    def __str__(self) -> str:
        text = f"{self.key}: {self.proposed}" if self.in_words else f"{self.key} = {shown(self.proposed)}"
        return text if self.now in (None, "") else f"{text} (now {shown(self.now)})"


class NamedSample(Protocol):
    """A sample to read."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def prompt_id(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RunFinding:
    """What one rule found. `since` and `last` are the first and the last step that show it."""

    rule: str
    text: str  # one sentence with the numbers
    since: int
    last: int
    changes: tuple[Change, ...] = ()  # the first suspect first
    advice: str = ""
    examples: Sequence[NamedSample] = ()  # samples to read
    problem: bool = True  # False: worth knowing, and no reason why a run does not learn
    level: int = 0  # how bad it is; a warning is repeated only at a higher level
    explains: frozenset[str] = frozenset()  # rules whose findings follow from this one
    effects: tuple["RunFinding", ...] = field(default=())

    @property
    def samples(self) -> list[str]:
        return [example.name for example in self.examples]

    @property
    def warning(self) -> str:
        """Return the finding as one line of a running run."""
        if not self.changes:
            return self.text
        change = self.changes[0]
        return f"{self.text}; {'change' if change.in_words else 'try'} {change}"

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": "problem" if self.problem else "note",
            "text": self.text,
            "steps": [self.since, self.last],
            "change": [{"key": each.key, "now": each.now, "proposed": each.proposed} for each in self.changes],
            "advice": self.advice,
            "samples": self.samples,
            "effects": [effect.as_json for effect in self.effects],
        }


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, list) else str(value)


def percent(share: float) -> str:
    """Return a share as a percentage that is 0% or 100% only if all or none are meant."""
    if 0 < share < 0.01:
        return "under 1%"
    return "over 99%" if 0.99 < share < 1 else f"{share:.0%}"


def moved(name: str, before: float, after: float) -> str:
    return f"{name} {number(before)} -> {number(after)}"


def number(value: float) -> str:
    """Return about three digits: 0.036, 5.33, 1.2e-07."""
    return f"{value:.3f}" if 0.001 <= abs(value) < 100 or value == 0 else f"{value:.2g}"


def rounded(value: float) -> float:
    """Return the value with one digit, as people write a rate."""
    return float(f"{value:.0e}")
