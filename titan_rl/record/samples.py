"""Reads the samples of a run back from rollouts.jsonl, one step at a time.

    rollouts.jsonl ── index ──> the bytes of each step ── of_step ──> samples ── grouped ──> groups

A run of 1,000 steps can have gigabytes of rollouts, so that only the index of all steps and one step's samples are in
memory at a time. Lines of other versions may lack newer keys; damaged lines are counted and left out.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from titan_rl.record.lines import whole_lines

ROLLOUTS = "rollouts.jsonl"
STEP = re.compile(rb'\{"kind": ?"\w+", ?"step": ?(\d+),')


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the run wrote it. `tokens`, `mask` and `logprobs` have one entry per token of all branches, the
    prompt's included; `versions` has one per sampled token."""

    step: int
    prompt_id: int
    group: int  # position in its step
    sample: int  # position in its group
    prompt: str
    answer: str
    text: str  # of the last turn
    finish: str
    reward: float | None  # None: it has none, for the reason in `error`
    penalty: float
    advantage: float  # mean over its trained tokens
    tokens: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]
    versions: Sequence[int]
    status: str = "completed"
    attempts: int = 1
    turns: Sequence[Mapping[str, Any]] = ()  # empty: a single answer
    rewards: Mapping[str, float] = field(default_factory=dict)  # components
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers of the environment
    messages: Sequence[Mapping[str, Any]] = ()
    error: str = ""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Sample":
        """Return the sample of a line of rollouts.jsonl. Raise KeyError without a key that every version writes."""
        optional = ("status", "attempts", "turns", "rewards", "metrics", "messages", "error")
        return cls(
            *(line[key] for key in ("step", "prompt_id", "group", "sample", "prompt", "answer", "text", "finish")),
            reward=line["reward"],
            penalty=line.get("penalty", 0.0),
            advantage=line["advantage"],
            tokens=line["tokens"],
            mask=line["mask"],
            logprobs=line["logprobs"],
            versions=line["versions"],
            **{key: line[key] for key in optional if line.get(key) is not None},
        )

    @property
    def name(self) -> str:
        return f"step {self.step}, prompt {self.prompt_id}, sample {self.sample}"

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.versions)

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens ended it, rather than the policy."""
        return self.finish != "stop" or self.status in ("max_tokens", "context_overflow")

    @property
    def age(self) -> int:
        """Optimizer steps between the sampling of its oldest token and its training; 0 is on-policy."""
        return max(0, self.step - 1 - min(self.versions)) if self.versions else 0


class Samples:
    """The samples in a run's folder. Raises OSError if it has no rollouts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROLLOUTS
        self._ranges: dict[int, tuple[int, int]] = {}  # first byte and end of each step
        self.damaged = 0  # lines
        start = 0
        for line in whole_lines(self._path):
            end = start + len(line)
            if (head := STEP.match(line)) is not None:
                step = int(head[1])
                self._ranges[step] = (self._ranges.get(step, (start, 0))[0], end)
            else:
                self.damaged += 1
            start = end

    @property
    def steps(self) -> list[int]:
        return sorted(self._ranges)

    def of_step(self, step: int) -> list[Sample]:
        """Return a step's samples, group by group; none if the run has no such step."""
        start, end = self._ranges.get(step, (0, 0))
        return list(self._read(start, end))

    def groups(self, step: int) -> list[list[Sample]]:
        return [list(group) for _, group in groupby(self.of_step(step), key=lambda sample: sample.group)]

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples of all steps in order."""
        for step in self.steps:
            yield from self.of_step(step)

    def _read(self, start: int, end: int) -> Iterator[Sample]:
        for line in whole_lines(self._path, start):
            if start >= end:
                return
            start += len(line)
            if STEP.match(line) is None:  # counted in the index
                continue
            try:
                yield Sample.of(_object(line))
            except (ValueError, KeyError, TypeError):
                self.damaged += 1


def _object(line: bytes) -> Any:
    """Return the value of a line of JSON. orjson refuses lone surrogates, which a policy can write."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)
