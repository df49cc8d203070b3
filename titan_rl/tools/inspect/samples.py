"""Reads the samples of a run back: rollouts.jsonl one step at a time, and the stored answers of its evaluations.

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
from titan_rl.record.run_names import ANSWERS, ROLLOUTS

STEP = re.compile(rb'\{"kind": ?"\w+", ?"step": ?(\d+), ?(?:"prompt_id": ?(\d+))?')
NUMBERS = frozenset((int, float, type(None)))
OPTIONAL: Mapping[str, type] = {
    **dict.fromkeys(("turns", "messages", "images"), list),
    **dict.fromkeys(("rewards", "metrics", "seats", "opponents"), dict),
    **dict.fromkeys(("status", "error", "where"), str),
    "attempts": int,
}


@dataclass(frozen=True, slots=True)
class RunSample:
    """One rollout as the run wrote it, or one answer of an evaluation. `tokens`, `mask` and `logprobs` have one entry
    per token of all branches, the prompt's included; `versions` has one per sampled token. Evaluations store none of
    these four."""

    step: int  # -1: of no run's step
    prompt_id: int
    group: int  # position in its step
    sample: int  # position in its group
    prompt: str
    answer: str
    text: str  # from the last turn
    finish: str
    reward: float | None  # None: it has none, for the reason in `error`
    penalty: float
    advantage: float | None  # mean over its trained tokens; None: an evaluation has none
    sampled: int  # tokens
    tokens: Sequence[int] = ()
    mask: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    versions: Sequence[int] = ()
    status: str = "completed"
    attempts: int = 1
    turns: Sequence[Mapping[str, Any]] = ()  # empty: a single answer
    rewards: Mapping[str, float] = field(default_factory=dict)  # components
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers of the environment
    messages: Sequence[Mapping[str, Any]] = ()
    error: str = ""
    set: str = ""  # name; empty: a training sample
    where: str = ""  # the row of its data, if it is known
    opening: Sequence[Mapping[str, Any]] = ()  # the prompt as messages, if they are known
    seats: Mapping[str, float | None] = field(default_factory=dict)  # reward of each player; None: not trained on
    opponents: Mapping[str, str] = field(default_factory=dict)  # who plays in place of the policy, by seat
    images: Sequence[str] = ()  # names in RUN/images

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "RunSample":
        """Return the sample of a line of rollouts.jsonl. Raise KeyError without a key that every version writes, and
        TypeError for a value that cannot be its key's."""
        counts = [_typed(line[key], int) for key in ("step", "prompt_id", "group", "sample")]
        texts = [_typed(line[key], str) for key in ("prompt", "answer", "text", "finish")]
        lists = {key: _numbers(line[key]) for key in ("tokens", "mask", "logprobs", "versions")}
        if not all(type(each) is int and each >= 0 for each in (*lists["versions"], *lists["tokens"])):
            raise TypeError("expected tokens and their versions")
        return cls(
            *counts,
            *texts,
            reward=_number(line["reward"]),
            penalty=_number(line.get("penalty")) or 0.0,
            advantage=_number(line["advantage"]),
            sampled=len(lists["versions"]),
            **lists,
            **_optional(line),
        )

    @classmethod
    def of_evaluation(cls, line: Mapping[str, Any]) -> "list[RunSample]":
        """Return the answers of a line of evaluation_answers.jsonl. Raise as `of` does."""
        problems = enumerate(line["problems"])
        return [cls._of_answer(line, group, p, answer) for group, p in problems for answer in p["answers"]]

    @classmethod
    def _of_answer(
        cls, line: Mapping[str, Any], group: int, problem: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> "RunSample":
        rest = _optional({**answer, "where": problem.get("where"), "images": problem.get("images")})
        return cls(
            step=_typed(line["step"], int),
            prompt_id=_typed(problem["problem"], int),
            group=group,
            sample=_typed(answer["sample"], int),
            **{key: _typed(problem[key], str) for key in ("prompt", "answer")},
            **{key: _typed(answer[key], str) for key in ("text", "finish")},
            reward=_number(answer["reward"]),
            penalty=0.0,
            advantage=None,
            sampled=_typed(answer["tokens"], int),
            set=_typed(line["set"], str),
            opening=opening_of(_dicts(problem.get("messages", [])), rest.get("messages", ())),
            **rest,
        )

    @property
    def name(self) -> str:
        at = f" at step {self.step}" if self.step >= 0 else ""
        of = f"{self.set}{at}, problem" if self.set else f"step {self.step}, prompt"
        return f"{of} {self.prompt_id}, sample {self.sample}"

    @property
    def truncated(self) -> bool:
        """True if a limit on tokens ended it, rather than the policy."""
        return self.finish != "stop" or self.status in ("max_tokens", "context_overflow")

    @property
    def players(self) -> dict[str, float | None]:
        """The rewards of an episode's players, by seat and opponent."""
        names = {seat: f"{seat} ({name})" for seat, name in self.opponents.items()}
        return {names.get(seat, seat): reward for seat, reward in self.seats.items()}

    @property
    def age(self) -> int:
        """Optimizer steps between the policy's sampling of its oldest token and its training; 0 is on-policy."""
        versions = [*self.versions]
        if self.opponents:
            by_token = (turn.get("seat") for turn in self.turns for _ in range(turn["sampled"]))
            versions = [v for v, seat in zip(versions, by_token, strict=False) if seat not in self.opponents]
        return max(0, self.step - 1 - min(versions)) if versions else 0


def opening_of(prompt: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    """Return the messages before the policy's first turn: of a chat's `prompt`, and what its environment added in the
    conversation `messages`."""
    return messages[: first_turn(prompt, messages)] if prompt and messages else prompt


def first_turn(opening: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the position of the policy's first turn in a conversation whose opening may have an assistant's turns."""
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    earlier = sum(message.get("role") == "assistant" for message in opening)
    return turns[earlier] if earlier < len(turns) else len(messages)


class Samples:
    """The samples in a run's folder. Raises OSError if it has no rollouts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROLLOUTS
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # first byte and end of each step's lines
        self.damaged = 0  # lines
        start = 0
        for line in whole_lines(self._path):
            end = start + len(line)
            head = STEP.match(line)
            if head is not None:
                ranges = self._ranges.setdefault(int(head[1]), [])
                begin = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
                ranges.append((begin, end))
            else:
                self.damaged += 1
            start = end

    @property
    def steps(self) -> list[int]:
        return sorted(self._ranges)

    def of_step(self, step: int, prompt_id: int | None = None, needle: bytes = b"") -> list[RunSample]:
        """Return a step's samples, or one prompt's, group by group; none if the run has no such step. Lines
        without `needle` are not parsed."""
        ranges = self._ranges.get(step, ())
        return [sample for start, end in ranges for sample in self._read(start, end, prompt_id, needle)]

    def groups(self, step: int) -> list[list[RunSample]]:
        return in_groups(self.of_step(step))

    def __iter__(self) -> Iterator[RunSample]:
        """Yield the samples of all steps in order."""
        for step in self.steps:
            yield from self.of_step(step)

    def _read(self, start: int, end: int, prompt_id: int | None, needle: bytes) -> Iterator[RunSample]:
        for line in whole_lines(self._path, start):
            if start >= end:
                return
            start += len(line)
            head = STEP.match(line)
            other = head is None or (head[2] is not None and int(head[2]) != prompt_id)
            if (prompt_id is not None and other) or needle not in line:
                continue
            try:
                yield RunSample.of(_object(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                self.damaged += 1


def in_groups(samples: Sequence[RunSample]) -> list[list[RunSample]]:
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group)]


class EvaluationAnswers:
    """The stored answers of a run's evaluations. Raises OSError if it has none."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ANSWERS
        self._at: dict[tuple[int, str], int] = {}  # first byte of each step and set
        self.left_out = 0  # answers that are not stored, of the evaluations that were read
        self.damaged = 0  # lines
        start = 0
        for line in whole_lines(self._path):
            try:
                found = _object(line)
                self._at[_typed(found["step"], int), _typed(found["set"], str)] = start
            except (ValueError, KeyError, TypeError, RecursionError):
                self.damaged += 1
            start += len(line)

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self._at))

    @property
    def steps(self) -> list[int]:
        return sorted({step for step, _ in self._at})

    def of_step(self, step: int, name: str = "") -> list[RunSample]:
        """Return the answers after a step, or one set's."""
        answers = list[RunSample]()
        for at in (at for (n, each), at in self._at.items() if n == step and name in ("", each)):
            try:
                line = _object(next(whole_lines(self._path, at)))
                answers += RunSample.of_evaluation(line)
                self.left_out += _typed(line["left_out"], int)
            except (ValueError, KeyError, TypeError, RecursionError, StopIteration):
                self.damaged += 1
        return answers


def _object(line: bytes) -> Any:
    """Return the value of a line of JSON. orjson refuses lone surrogates, which a policy can write."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _number(value: Any) -> Any:
    if type(value) not in NUMBERS:
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return value


def _numbers(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a run's own lines, before they are written, have arrays
        value = value.tolist()
    if not set(map(type, _typed(value, list))) <= NUMBERS:
        raise TypeError("expected numbers")
    return value


def _dicts(value: Any) -> Any:
    if not all(isinstance(each, dict) for each in _typed(value, list)):
        raise TypeError("expected objects")
    return value


def _optional(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the keys that only some samples have."""
    found = {key: _typed(line[key], kind) for key, kind in OPTIONAL.items() if line.get(key) is not None}
    for key in found.keys() & {"turns", "messages"}:
        _dicts(found[key])
    for key in found.keys() & {"rewards", "metrics", "seats"}:
        _numbers(list(found[key].values()))
    return found
