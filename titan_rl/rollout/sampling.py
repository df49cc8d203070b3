"""Turns a prompt into a judged group: plays its rollouts and scores them."""

import asyncio
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from titan_rl.batch.advantages import shorter_is_better, soft_overlong_punishment
from titan_rl.config.sections import AlgorithmSection, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.player import DRIVER_ATTEMPTS, Casts, Play, Player, Shares, no_opponents
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.judging import REWARD_ATTEMPTS
from titan_rl.tasks.rubric import GRADER
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed, RequestRefused, RunError
from titan_rl.wire.seeds import sample_seed
from titan_rl.wire.sessions import Driver
from titan_rl.wire.spans import span
from titan_rl.wire.stop_reasons import FAILED
from titan_rl.wire.types import (
    Branch,
    Completion,
    Decode,
    Generates,
    Group,
    Judge,
    Judgement,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Turn,
)

MEMORY = 0.05
"""Weight of the newest group in the running mean of sample lengths."""
MAX_FAILURES = 3
"""Consecutive groups without rewards that end a run whose steps have fewer groups."""
MAX_NAMED = 10
"""Answers without a reward that are named in warnings."""
MAX_ERROR_CHARACTERS = 200


class GroupFailed(RunError):
    """A group has no rewards. One such group is replaced; MAX_FAILURES or a step's worth in a row end the run."""

    what = "there are no rewards for prompt"
    remedy = ""

    def __init__(self, prompt: int, reason: str, details: str) -> None:
        super().__init__(f"{self.what} {prompt}: {reason}", details)
        self.prompt, self.reason = prompt, reason

    @classmethod
    def of(cls, prompt: int, error: Exception) -> Self:
        reason = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
        return cls(prompt, reason, "".join(traceback.format_exception(error)))


class RewardFailed(GroupFailed):
    """A judge had no rewards for a group, on any attempt."""

    what = "the reward failed on prompt"
    remedy = "Fix the function of task.reward, or retry in it what fails at random."


class SamplingFailed(GroupFailed):
    """The engines cannot sample a prompt."""

    what = "the engines refused prompt"
    remedy = 'task.bad_rows = "drop" leaves out rows that do not fit.'


class RolloutsFailed(GroupFailed):
    """Fewer than two rollouts of a group ended by themselves, or its greedy one did not."""

    what = "the rollouts failed on prompt"
    remedy = "The ledger has the status of each rollout (event sampled)."


@dataclass(frozen=True, slots=True)
class Unjudged(Group):
    """A group that could not be sampled, or whose judge failed on every attempt: its rewards are NaN."""

    failure: GroupFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Settings that are fixed for the life of a stream."""

    algorithm: AlgorithmSection
    weights: Mapping[str, float] = field(default_factory=dict)  # by the name of a reward in Rollout.parts
    correct_at: float = 1.0  # lowest reward of a correct answer
    rollout: RolloutSection
    sampling: Sampling
    seed: int
    first: int  # the step that trains the first group
    groups: int  # number of groups that the rest of the run trains on
    reward_attempts: int = REWARD_ATTEMPTS
    bad_prompts: frozenset[int] = frozenset()  # ids of those to drop: their steps were undone
    attempt: int = 1  # number of this stream in its process: an engine may still hold requests of the previous one
    driver: Driver | None = None  # none: a rollout is one answer
    driver_attempts: int = DRIVER_ATTEMPTS  # a driver is started again if its process is lost
    limits: SessionLimits = field(default_factory=SessionLimits)
    warn: Callable[[str], None] = lambda message: None
    cast: Casts = no_opponents
    shares: Shares | None = None  # with other policies
    grade: Judge | None = None  # task.grader alone, for rollouts whose reward an environment or a reward model gave
    keeps: Callable[[Group], bool] | None = None  # the user's filter
    modelled: bool = False  # the judge is a reward model, which has no grader

    @property
    def played(self) -> int:
        """Number of rollouts that a group samples: its own, and a greedy one that is their baseline."""
        return self.rollout.group_size + (self.algorithm.advantage == "greedy")


class GroupSampler:
    """`sample(prompt)` returns the prompt's group with its rewards: `play`, then `score`."""

    def __init__(
        self, settings: StreamSettings, generators: Generates, judge: Judge, decode: Decode, ledger: Ledger
    ) -> None:
        self._settings, self._generators, self._judge, self._ledger = settings, generators, judge, ledger
        self._player = Player(
            settings.driver,
            generators,
            decode,
            limits=settings.limits,
            attempts=settings.driver_attempts,
            ledger=ledger,
            warn=settings.warn,
            shares=settings.shares,
        )
        self._id_suffix = f"@{settings.attempt}" if settings.attempt > 1 else ""
        self._mean_length = 0.0  # tokens of recent turns: the length that routing expects next
        self._running = 0
        self._named = 0  # failed answers
        self.failures: list[GroupFailed] = []  # consecutive groups without rewards, up to the latest one judged

    async def sample(self, prompt: Prompt) -> Group:
        return await self.score(await self.play(prompt))

    async def play(self, prompt: Prompt) -> Group:
        """Return the group with the rewards of its environment only. With a greedy baseline, its last rollout is
        that."""
        try:
            played = await (self._answers(prompt) if self._player.single else self._plays(prompt))
        except RequestRefused as error:
            return self._refused(prompt, error)
        rollouts = played[: self._settings.rollout.group_size]
        completions = [rollout.completion for rollout in rollouts]
        self._ledger.sampled(prompt.id, completions, () if self._player.single else rollouts)
        turns = sum(len(branch.turns) for rollout in rollouts for branch in rollout.branches)
        length = sum(len(completion.tokens) for completion in completions) / max(turns, 1)
        self._mean_length += MEMORY * (length - self._mean_length) if self._mean_length else length
        usable, greedy = sum(map(_usable, rollouts)), played[len(rollouts) :]
        if usable < min(2, len(rollouts)) or not all(map(_usable, greedy)):
            return self._too_few(prompt, played)
        return Group(prompt, played)

    async def score(self, group: Group) -> Group:
        """Return the group with the rewards that its judge adds. A group that failed stays as it is."""
        if isinstance(group, Unjudged):
            return group
        prompt, played, size = group.prompt, group.rollouts, self._settings.rollout.group_size
        rollouts = played[:size]
        unjudged = {i: rollout for i, rollout in enumerate(played) if _usable(rollout) and not rollout.valid}
        rewarded = sum(map(_usable, played)) - len(unjudged)  # by their environment
        with span("judge", lane="groups", id=prompt.id):
            rewards = await self._judged(prompt, unjudged, rewarded) if unjudged else ()
            graded = (i for i, r in enumerate(rollouts) if _usable(r) and (r.valid or self._settings.modelled))
            grades = await self._grades(prompt, {i: rollouts[i] for i in graded})
        if isinstance(rewards, GroupFailed):
            return Unjudged(prompt, [replace(rollout, reward=math.nan) for rollout in rollouts], rewards)
        self.failures = []
        verdicts = dict(zip(unjudged, rewards, strict=True))
        judged = [_rewarded(r, verdicts.get(i), grades.get(i), self._penalty(r)) for i, r in enumerate(played)]
        judged = self._length_rewarded(judged)
        rollouts, greedy = judged[:size], judged[size:]
        scored = Group(prompt, rollouts, baseline=greedy[0].signal if greedy else None)
        unrewarded = {i: r.unrewarded for i, r in enumerate(rollouts) if r.unrewarded}
        self._ledger.scored(prompt.id, scored.rewards, unrewarded)
        return scored

    def _play(self, prompt: Prompt, sample: int) -> Play:
        """Return the play of a sample, or of the greedy one after the group's."""
        name, sampling = f"prompt-{prompt.id}{self._id_suffix}", self._settings.sampling
        greedy = sample == self._settings.rollout.group_size
        return Play(
            id=f"{name}.{sample}",
            prompt=prompt,
            sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) if greedy else sampling,
            seed=self._settings.seed,
            sample=sample,
            greedy=greedy,
            group=name,
            expected=round(self._mean_length) if self._settings.rollout.steps_ahead else 0,
        )

    async def _plays(self, prompt: Prompt) -> list[Rollout]:
        """Play the group's rollouts, each on its own, and the greedy one if it is the baseline."""
        cast = self._settings.cast(prompt)  # one for the group, whose rollouts are compared
        plays = [replace(self._play(prompt, sample), cast=cast) for sample in range(self._settings.played)]
        with span("sample", lane="groups", id=prompt.id):
            playing = [asyncio.create_task(self._player.play(play)) for play in plays]
            try:
                return await asyncio.gather(*playing)
            finally:
                for task in playing:
                    task.cancel()

    async def _answers(self, prompt: Prompt) -> list[Rollout]:
        """Sample the single turns of all the group's rollouts by one request, and of the greedy one by another."""
        settings, seconds = self._settings, self._settings.rollout.timeout_seconds
        seeds = [sample_seed(settings.seed, prompt.id, sample) for sample in range(settings.rollout.group_size)]
        first = self._play(prompt, 0)
        request = Request(
            first.group, prompt.tokens, seeds, first.sampling, expected=first.expected, images=prompt.images
        )
        others = [self._play(prompt, sample) for sample in range(len(seeds), settings.played)]
        requests = [request, *(replace(request, id=p.id, seeds=[0], sampling=p.sampling) for p in others)]
        self._running += 1
        try:
            with span("sample", lane="groups", id=prompt.id):
                async with deadline(seconds):
                    completions = await self._completions(requests)
        except TimeoutError:
            raise DeadlinePassed(
                f"generators.generate did not answer prompt {prompt.id} within {seconds} s",
                f"{self._running} groups are being sampled. If the engines are slow rather than stuck, raise "
                "rollout.timeout_seconds.",
            ) from None
        finally:
            self._running -= 1
        numbered = zip(range(settings.played), completions, strict=True)
        return [self._player.answered(prompt, completion) for _, completion in numbered]

    async def _completions(self, requests: Sequence[Request]) -> list[Completion]:
        if len(requests) == 1:
            return await self._generators.generate(requests[0])
        return [each for part in await asyncio.gather(*map(self._generators.generate, requests)) for each in part]

    def _refused(self, prompt: Prompt, error: RequestRefused) -> Group:
        failure = SamplingFailed(prompt.id, str(error), error.details)
        self._ledger.sampled(prompt.id, [])
        self._ledger.failed(prompt.id, 1, failure.reason)
        nothing = Completion([], [], [], "abort")
        rollouts = [Rollout([Branch([Turn(prompt.tokens, nothing)])], "", math.nan)] * self._settings.rollout.group_size
        return Unjudged(prompt, rollouts, self._count(failure))

    def _too_few(self, prompt: Prompt, played: Sequence[Rollout]) -> Group:
        """Return a group that cannot be judged, because too few of its rollouts ended by themselves."""
        failed = [r for r in played if not _usable(r)]
        reason = f"{len(failed)} of {len(played)} rollouts failed; the first: {failed[0].status}: {failed[0].error}"
        failure = RolloutsFailed(prompt.id, reason, "")
        self._ledger.failed(prompt.id, 1, reason)
        rollouts = [replace(r, reward=math.nan) for r in played[: self._settings.rollout.group_size]]
        return Unjudged(prompt, rollouts, self._count(failure))

    async def _judged(
        self, prompt: Prompt, unjudged: Mapping[int, Rollout], rewarded: int
    ) -> Sequence[Judgement] | GroupFailed:
        """Return the verdicts on these samples, by their numbers in the group, of which `rewarded` others have a reward
        already; or why too few of the group have one."""
        rollouts = list(unjudged.values())
        errors: list[Exception] = []
        while len(errors) < self._settings.reward_attempts:
            try:
                rewards = await self._judge(prompt, rollouts)
                verdicts = _judgements(rewards)
                sound = all(math.isfinite(v.reward) or (math.isnan(v.reward) and v.error) for v in verdicts)
                if len(verdicts) != len(rollouts) or not sound:
                    raise ValueError(f"expected {len(rollouts)} finite rewards, found {list(rewards)}")
            except RunError:
                raise
            except Exception as error:
                errors.append(error)
                self._ledger.failed(prompt.id, len(errors), RewardFailed.of(prompt.id, error).reason)
            else:
                return self._enough(prompt, dict(zip(unjudged, verdicts, strict=True)), rewarded, len(errors) + 1)
        return self._count(RewardFailed.of(prompt.id, errors[-1]))

    async def _grades(self, prompt: Prompt, rewarded: Mapping[int, Rollout]) -> dict[int, float]:
        """Return the grader's grades, by the numbers of the samples. The failure of a grader is a warning, and costs no
        reward."""
        if self._settings.grade is None or not rewarded:
            return {}
        try:
            grades = await self._settings.grade(prompt, [*rewarded.values()])
            by_sample = dict(zip(rewarded, _judgements(grades), strict=True))
        except RunError:
            raise
        except Exception as error:
            failed = Judgement(math.nan, error=str(error) or type(error).__name__)
            by_sample = dict.fromkeys(rewarded, failed)
        for sample, verdict in by_sample.items():
            if verdict.error:
                self._warn_of(prompt, sample, f"the grader: {verdict.error}")
        return {sample: verdict.reward for sample, verdict in by_sample.items() if math.isfinite(verdict.reward)}

    def _enough(
        self, prompt: Prompt, verdicts: Mapping[int, Judgement], rewarded: int, attempt: int
    ) -> Sequence[Judgement] | GroupFailed:
        """Warn of the samples that failed. Return the failure of the group if fewer than two have a reward, or the
        greedy one has none."""
        for sample, verdict in verdicts.items():
            if verdict.error:
                self._warn_of(prompt, sample, verdict.error)
        missing = [verdict.error for verdict in verdicts.values() if math.isnan(verdict.reward)]
        judged, greedy = rewarded + len(verdicts), range(self._settings.rollout.group_size, self._settings.played)
        lost = any(math.isnan(verdicts[i].reward) for i in greedy if i in verdicts)
        if judged - len(missing) >= min(2, judged) and not lost:
            return list(verdicts.values())
        reason = f"{len(missing)} of {judged} answers have no reward; the first: {missing[0]}"
        self._ledger.failed(prompt.id, attempt, reason[: 2 * MAX_ERROR_CHARACTERS])
        return self._count(RewardFailed(prompt.id, reason, ""))

    def _warn_of(self, prompt: Prompt, sample: int, error: str) -> None:
        """Warn of an answer that the reward failed on, the first few times. The ledger has all of them."""
        self._named += 1
        if self._named <= MAX_NAMED:
            row = f" ({prompt.where})" if prompt.where else ""
            last = "; later ones are in the ledger only" if self._named == MAX_NAMED else ""
            self._settings.warn(f"the reward failed on prompt {prompt.id}{row}, sample {sample}: {error}{last}")

    def _count(self, failure: GroupFailed) -> GroupFailed:
        """Return the failure. Raise if a step's worth of groups in a row have failed: then the reward function or the
        settings are at fault, not a rollout."""
        self.failures.append(failure)
        if len(self.failures) < max(MAX_FAILURES, self._settings.rollout.groups_per_step):
            return failure
        first = min(self.failures, key=lambda failure: failure.prompt)
        tried = f" after {self._settings.reward_attempts} attempts each" if isinstance(first, RewardFailed) else ""
        count = f"{len(self.failures)} groups in a row had no rewards{tried}. {first.remedy}"
        raise type(first)(first.prompt, first.reason, f"{first.details}\n{count}")

    def _penalty(self, rollout: Rollout) -> float:
        """Return the soft overlong punishment of its longest turn, 0 if it is off."""
        algorithm, longest = self._settings.algorithm, self._settings.sampling.max_new_tokens
        turns = rollout.turns if algorithm.overlong_buffer else ()
        length = max((len(turn.completion.tokens) for turn in turns), default=0)
        return -soft_overlong_punishment(length, longest=longest, buffer=algorithm.overlong_buffer)

    def _length_rewarded(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts with their rewards for length, which lower the penalties."""
        a, correct_at = self._settings.algorithm, self._settings.correct_at
        if a.length_reward == "none":
            return rollouts
        valid = [rollout for rollout in rollouts if rollout.valid]
        if a.length_reward == "kimi":
            rewards = shorter_is_better([r.sampled for r in valid], [r.reward >= correct_at for r in valid])
        else:
            rewards = [-abs(r.sampled - a.length_target) / a.length_target for r in valid]
        weighted = (a.length_weight * reward for reward in rewards)
        return [replace(r, penalty=r.penalty - next(weighted)) if r.valid else r for r in rollouts]


def _usable(rollout: Rollout) -> bool:
    return bool(rollout.branches) and rollout.status not in FAILED


def _judgements(rewards: Sequence[Judgement | float]) -> list[Judgement]:
    return [reward if isinstance(reward, Judgement) else Judgement(float(reward)) for reward in rewards]


def _rewarded(rollout: Rollout, verdict: Judgement | None, grade: float | None, penalty: float) -> Rollout:
    """Return the rollout with its judge's verdict, the grader's if that is apart, and the penalty for its length."""
    graded = {} if grade is None else {GRADER: grade}
    if verdict is None:
        return replace(rollout, penalty=penalty, parts=graded or rollout.parts)
    why = verdict.error if math.isnan(verdict.reward) else ""
    feedback = verdict.feedback or rollout.feedback
    known = {"parts": {**verdict.parts, **graded}, "unrewarded": why, "feedback": feedback}
    return replace(rollout, reward=verdict.reward, penalty=penalty, **known)
