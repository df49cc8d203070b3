"""Turns a prompt into a judged group: samples it, decodes it, scores it."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from titan_rl.batch.advantages import soft_overlong_punishment
from titan_rl.config.sections import AlgorithmSection, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RequestRefused, RunError
from titan_rl.wire.seeds import sample_seed
from titan_rl.wire.spans import span
from titan_rl.wire.types import Completion, Decode, Generates, Group, Judge, Prompt, Request, Rollout, Sampling, Turn

MEMORY = 0.05
"""Weight of the newest group in the running mean of sample lengths."""
MOST_FAILURES = 3
"""Consecutive groups without rewards that end a run whose steps have fewer groups."""
BRIEF = 200
"""Maximum characters of an error's message."""


class GroupFailed(RunError):
    """A group has no rewards. One such group is replaced; MOST_FAILURES or a step's worth in a row end the run."""

    what = "there are no rewards for prompt"
    remedy = ""

    def __init__(self, prompt: int, reason: str, details: str) -> None:
        super().__init__(f"{self.what} {prompt}: {reason}", details)
        self.prompt, self.reason = prompt, reason

    @classmethod
    def of(cls, prompt: int, error: Exception) -> Self:
        reason = f"{type(error).__name__}: {str(error)[:BRIEF]}"
        return cls(prompt, reason, "".join(traceback.format_exception(error)))


class RewardFailed(GroupFailed):
    """A judge had no rewards for a group, on any attempt."""

    what = "the reward failed on prompt"
    remedy = "Fix the function of task.reward, or raise fault.reward_attempts if it fails at random."


class SamplingFailed(GroupFailed):
    """The engines cannot sample a prompt."""

    what = "the engines refused prompt"
    remedy = 'task.on_unfit_rows = "drop" leaves out rows that do not fit.'


@dataclass(frozen=True, slots=True)
class Unjudged(Group):
    """A group that could not be sampled, or whose judge failed on every attempt: its rewards are NaN."""

    failure: GroupFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What is fixed for the life of a stream."""

    algorithm: AlgorithmSection
    rollout: RolloutSection
    sampling: Sampling
    seed: int
    first: int  # the step that trains the first group
    groups: int  # number of groups that the rest of the run trains on
    reward_attempts: int = 2
    attempt: int = 1  # number of this stream in its process: an engine may still hold requests of the previous one


class GroupSampler:
    """`sample(prompt)` returns the prompt's group with its rewards."""

    def __init__(
        self, settings: StreamSettings, generators: Generates, judge: Judge, decode: Decode, ledger: Ledger
    ) -> None:
        self._settings, self._generators, self._judge = settings, generators, judge
        self._decode, self._ledger = decode, ledger
        self._suffix = f"@{settings.attempt}" if settings.attempt > 1 else ""  # of request ids
        self._mean_length = 0.0  # of recent samples: the length that routing expects next
        self._running = 0
        self.failures: list[GroupFailed] = []  # consecutive groups without rewards, up to the latest one judged

    async def sample(self, prompt: Prompt) -> Group:
        try:
            completions = await self._generate(prompt)
        except RequestRefused as error:
            return self._refused(prompt, error)
        self._ledger.sampled(prompt.id, completions)
        length = sum(len(completion.tokens) for completion in completions) / len(completions)
        self._mean_length += MEMORY * (length - self._mean_length) if self._mean_length else length
        texts = [self._decode(completion.tokens) for completion in completions]
        with span("judge", lane="groups", id=prompt.id):
            rewards = await self._judged(prompt, completions, texts)
        failed = isinstance(rewards, GroupFailed)
        scores = [math.nan] * len(texts) if failed else rewards
        rollouts = [
            Rollout([Turn(prompt.tokens, completion)], text, reward, self._penalty(completion))
            for completion, text, reward in zip(completions, texts, scores, strict=True)
        ]
        if failed:
            return Unjudged(prompt, rollouts, rewards)
        self._ledger.scored(prompt.id, rewards)
        return Group(prompt, rollouts)

    async def _generate(self, prompt: Prompt) -> Sequence[Completion]:
        rollout, seconds = self._settings.rollout, self._settings.rollout.timeout_seconds
        seeds = [sample_seed(self._settings.seed, prompt.id, k) for k in range(rollout.group_size)]
        expected = round(self._mean_length) if rollout.lag else 0
        name = f"prompt-{prompt.id}{self._suffix}"
        request = Request(name, prompt.tokens, seeds, self._settings.sampling, expected=expected)
        self._running += 1
        try:
            with span("sample", lane="groups", id=prompt.id):
                async with deadline(seconds):
                    return await self._generators.generate(request)
        except TimeoutError:
            raise DeadlinePassed(
                f"generators.generate did not answer prompt {prompt.id} within {seconds} s",
                f"{self._running} groups are being sampled. If the engines are slow rather than stuck, raise "
                "rollout.timeout_seconds.",
            ) from None
        finally:
            self._running -= 1

    def _refused(self, prompt: Prompt, error: RequestRefused) -> Group:
        failure = SamplingFailed(prompt.id, str(error), error.details)
        self._ledger.sampled(prompt.id, [])
        self._ledger.failed(prompt.id, 1, failure.reason)
        nothing = Completion([], [], [], "abort")
        rollouts = [Rollout([Turn(prompt.tokens, nothing)], "", math.nan)] * self._settings.rollout.group_size
        return Unjudged(prompt, rollouts, self._count(failure))

    async def _judged(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[float] | GroupFailed:
        """Return the rewards, or why there are none."""
        errors: list[Exception] = []
        while len(errors) < self._settings.reward_attempts:
            try:
                rewards = await self._judge(prompt, completions, texts)
                if len(rewards) != len(texts) or not all(map(math.isfinite, rewards)):
                    raise ValueError(f"expected {len(texts)} finite rewards, found {list(rewards)}")
            except RunError:
                raise
            except Exception as error:
                errors.append(error)
                self._ledger.failed(prompt.id, len(errors), RewardFailed.of(prompt.id, error).reason)
            else:
                self.failures = []
                return rewards
        return self._count(RewardFailed.of(prompt.id, errors[-1]))

    def _count(self, failure: GroupFailed) -> GroupFailed:
        """Return the failure. Raise if a step's worth of groups in a row have failed: then the reward function or the
        settings are at fault, not a rollout."""
        self.failures.append(failure)
        if len(self.failures) < max(MOST_FAILURES, self._settings.rollout.groups_per_step):
            return failure
        first = min(self.failures, key=lambda failure: failure.prompt)
        tried = f" after {self._settings.reward_attempts} attempts each" if isinstance(first, RewardFailed) else ""
        count = f"{len(self.failures)} groups in a row had no rewards{tried}. {first.remedy}"
        raise type(first)(first.prompt, first.reason, f"{first.details}\n{count}")

    def _penalty(self, completion: Completion) -> float:
        """Return the soft overlong punishment, 0 if it is off."""
        algorithm, longest = self._settings.algorithm, self._settings.sampling.max_new_tokens
        punishment = soft_overlong_punishment(len(completion.tokens), longest=longest, buffer=algorithm.overlong_buffer)
        return -algorithm.overlong_penalty * punishment
