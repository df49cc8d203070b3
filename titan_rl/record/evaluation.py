"""What one evaluation of a set found: an answer's reward or why it has none, and the numbers that follow.

An answer without a reward counts as 0 in every number, so that a policy that breaks its environment cannot raise its
score. How many there were is reported next to every score, and each is named. A set without any reward has no score.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.scores import ScoreEstimate, estimate, ks_of, pass_at
from titan_rl.wire.counted import counted
from titan_rl.wire.types import Prompt, Rollout, names_of

# What an evaluation stores: the answers to its first problems, the first samples of each, and answers that failed.
STORED_PROBLEMS, STORED_SAMPLES, STORED_FAILURES = 64, 4, 64
STORED_CHARACTERS = 16_000  # a longer text loses its middle


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to one problem."""

    reward: float  # NaN: it has none
    why: str = ""  # it has none
    tokens: int = 0  # sampled
    truncated: bool = False
    rollout: Rollout | None = None  # None: nothing was sampled

    @property
    def failed(self) -> bool:
        return math.isnan(self.reward)

    @property
    def counted(self) -> float:
        """The reward that scores count."""
        return 0.0 if self.failed else self.reward


@dataclass(frozen=True)
class Evaluation:
    """The answers to a set's problems. Without a name, the set is the run's held-out problems."""

    name: str
    answers: Mapping[int, Sequence[Answer]]  # by problem; all have equally many
    correct_at: float = 1.0
    prompts: Mapping[int, Prompt] = field(default_factory=dict)  # by problem

    @property
    def samples(self) -> int:
        return len(next(iter(self.answers.values())))

    @property
    def size(self) -> int:
        return len(self.answers)

    @property
    def all(self) -> list[Answer]:
        return [answer for answers in self.answers.values() for answer in answers]

    @property
    def failures(self) -> list[tuple[int, int, str]]:
        """Return problem, sample and reason of each answer without a reward."""
        found = list[tuple[int, int, str]]()
        for problem, answers in self.answers.items():
            found += [(problem, j, answer.why) for j, answer in enumerate(answers) if answer.failed]
        return found

    @property
    def hopeless(self) -> bool:
        """Return True if no answer has a reward."""
        return len(self.failures) == self.size * self.samples

    @cached_property
    def average(self) -> ScoreEstimate:
        """Return avg@k: the mean reward of all answers."""
        means = list[float]()
        for answers in self.answers.values():
            means.append(fmean(answer.counted for answer in answers))
        return estimate(means)

    @cached_property
    def passes(self) -> dict[int, ScoreEstimate]:
        """Return pass@k of each k: the share of problems that k answers are expected to solve."""
        right, found = list[int](), dict[int, ScoreEstimate]()
        for answers in self.answers.values():
            right.append(sum(not answer.failed and answer.reward >= self.correct_at for answer in answers))
        for k in ks_of(self.samples):
            found[k] = estimate([pass_at(k, self.samples, correct) for correct in right])
        return found

    @property
    def estimates(self) -> dict[str, ScoreEstimate]:
        """Return the estimates of a named set by their names."""
        return {f"avg@{self.samples}": self.average} | {f"pass@{k}": found for k, found in self.passes.items()}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Return what a run logs."""
        if not self.name:
            a = self.average
            return {EVAL_SCORE: a.value, "eval/low": a.low, "eval/high": a.high, "eval/failed": len(self.failures)}
        head, found = f"eval/{self.name}", dict[str, float]()
        for name, each in self.estimates.items() if not self.hopeless else ():
            found |= {f"{head}/{name}": each.value, f"{head}/{name}/low": each.low, f"{head}/{name}/high": each.high}
        found[f"{head}/failed"] = len(self.failures)
        found[f"{head}/truncated"] = fmean(answer.truncated for answer in self.all)
        found[f"{head}/mean_length"] = fmean(answer.tokens for answer in self.all)
        return found

    @property
    def line(self) -> dict[str, Any]:
        """Return the line of evaluations.jsonl, without its step: each problem's rewards, and what failed."""
        rewards = dict[str, list[float]]()
        for problem, answers in self.answers.items():
            rewards[str(problem)] = [answer.reward for answer in answers]
        return {
            "set": self.name or "heldout",
            "samples": self.samples,
            "correct_at": self.correct_at,
            "rewards": rewards,
            "failures": [{"problem": p, "sample": j, "why": why} for p, j, why in self.failures],
        }

    def answers_line(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the line of evaluation_answers.jsonl, without its step: answers to read, and how many are left out;
        none if `everything` is wanted."""
        problems, stored, failures = list[dict[str, Any]](), 0, 0
        for number, (p, answers) in enumerate(self.answers.items()):
            chosen = list[dict[str, Any]]()
            for j, answer in enumerate(answers):
                early = everything or (number < STORED_PROBLEMS and j < STORED_SAMPLES)
                if answer.rollout is None or not (early or (answer.failed and failures < STORED_FAILURES)):
                    continue
                failures += answer.failed and not early
                chosen.append(_stored(j, answer, answer.rollout))
            if chosen:
                problems.append({**_problem(self.prompts[p]), "answers": chosen})
                stored += len(chosen)
        name = self.name or "heldout"
        return {"set": name, "left_out": self.size * self.samples - stored, "problems": problems}

    def __str__(self) -> str:
        if self.hopeless:
            return f"no score: none of {self.size * self.samples} answers has a reward"
        shown = [f"{name} {found}" for name, found in self.estimates.items()]
        failed = [f"{len(self.failures)} of {self.size * self.samples} answers failed"] if self.failures else []
        return ", ".join([*shown, *failed]) + f" over {counted(self.size, 'problem')}"


def metrics_of(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    return {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()}


def _problem(prompt: Prompt) -> dict[str, Any]:
    """Return a problem as it is stored. A chat has its messages; else its text is what the policy read."""
    found = {"problem": prompt.id, "where": prompt.where, "prompt": _clipped(prompt.text), "answer": prompt.answer}
    found |= {"images": names_of(prompt.images)} if prompt.images else {}
    return found | ({"messages": _messages(prompt.messages)} if prompt.messages else {})


def _stored(sample: int, answer: Answer, rollout: Rollout) -> dict[str, Any]:
    found = {"sample": sample, "reward": answer.reward, "error": answer.why, "tokens": answer.tokens}
    found |= {"finish": rollout.finish, "status": rollout.status, "text": _clipped(rollout.text)}
    return found | ({"messages": _messages(rollout.messages)} if rollout.messages else {})


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_clipped_values(message) for message in messages]


def _clipped_values(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _clipped(value) if isinstance(value, str) else value for key, value in message.items()}


def _clipped(text: str) -> str:
    """Return a text without its middle if it is too long to store."""
    half, left_out = STORED_CHARACTERS // 2, len(text) - STORED_CHARACTERS
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
