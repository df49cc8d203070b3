"""Measures a policy on fixed sets of problems. On the held-out set, the mean is the evaluation score of the run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from titan_rl.record.evaluation import Answer, Evaluation
from titan_rl.tasks.reward_thread import RewardHung
from titan_rl.wire.errors import RunError
from titan_rl.wire.sessions import Plays
from titan_rl.wire.stop_reasons import FAILED
from titan_rl.wire.types import Judge, Judgement, Prompt, Rollout, Sampling

MOST_HUNG = 3
"""Rewards that may hang in one evaluation, a deadline each; then its other answers are not judged."""


@dataclass(frozen=True, slots=True)
class Problems:
    """A fixed set of problems, and the judge of an answer."""

    prompts: Sequence[Prompt]
    judge: Judge
    sampling: Sampling
    name: str = ""  # in [eval.sets]; empty: the run's held-out problems
    samples: int = 1  # per problem
    temperature: float = 0.0
    correct_at: float = 1.0
    seed: int = 0
    attempts: int = 1  # calls of a reward that fails
    parallel: int = 1  # answers that are judged at the same time

    async def score(self, plays: Plays, warn: Callable[[str], None], temperature: float = 0.0) -> float:
        """Return the mean reward of one rollout per problem."""
        return (await replace(self, temperature=temperature).measure(plays, warn)).average.value

    async def measure(self, plays: Plays, warn: Callable[[str], None]) -> Evaluation:
        """Sample and judge all answers with the weights that the generators hold. `warn` is called with the number of
        answers that cannot be sampled or judged."""
        sampling = replace(self.sampling, temperature=self.temperature, top_p=1.0, top_k=0, min_p=0.0)
        judging = Judging(self)

        async def one(prompt: Prompt, sample: int) -> Answer:
            return await judging.answer(
                prompt, await plays(prompt, sampling, sample=sample, seed=self.seed, set_name=self.name)
            )

        asked = [(prompt, sample) for prompt in self.prompts for sample in range(self.samples)]
        found = iter(await asyncio.gather(*(one(*each) for each in asked)))
        answers = {prompt.id: [next(found) for _ in range(self.samples)] for prompt in self.prompts}
        evaluation = Evaluation(self.name, answers, self.correct_at, {prompt.id: prompt for prompt in self.prompts})
        of = f"eval.sets.{self.name}: " if self.name else ""
        if unsound := judging.unsound:
            what = f"{of}{len(unsound)} of {len(asked)} evaluated answers have log-probs that are not finite"
            if len(unsound) == len(asked):
                raise RunError(f"{what}: the weights are ruined", f"The first: {unsound[0]}.")
            warn(f"{what}; the first: {unsound[0]}")
        if failures := judging.failures:
            count = f"{of}{len(failures)} of {len(asked)} evaluated answers had no reward and count as 0"
            warn(f"{count}; the first: {failures[0]}")
        return evaluation


class Unrewarded(Exception):
    """A judge gave no reward. str() is the reason."""


class Judging:
    """Judges the answers of one evaluation, and counts what fails."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._turn = asyncio.Semaphore(problems.parallel)  # training judges its groups in between
        self._hung = 0
        self.failures: list[str] = []  # in the order in which they happened
        self.unsound: list[str] = []

    async def answer(self, prompt: Prompt, rollout: Rollout) -> Answer:
        turns = [each.completion for each in rollout.turns]
        bad = [completion.replica for completion in turns if not completion.finite]
        self.unsound.extend([f"problem {prompt.id}, by {bad[0]}"] if bad else [])
        reward, why = rollout.reward, ""
        if not turns or rollout.status in FAILED:
            reward, why = math.nan, rollout.error or f"it ended as {rollout.status}"
        elif not rollout.valid:
            try:
                reward = await self._reward(prompt, rollout)
            except RunError:
                raise  # a mesh failed
            except Exception as error:
                named = isinstance(error, Unrewarded)  # it names the error itself
                why = str(error) if named else f"{type(error).__name__}: {error}"
        self.failures.extend([why] if why else [])
        return Answer(reward, why, rollout.sampled, rollout.truncated, rollout)

    async def _reward(self, prompt: Prompt, rollout: Rollout) -> float:
        """Return the reward, or raise why there is none after the last attempt."""
        for attempt in range(1, self._problems.attempts + 1):
            try:
                async with self._turn:
                    if self._hung >= MOST_HUNG:
                        raise RewardHung(f"not judged, because {MOST_HUNG} rewards of this evaluation hung")
                    (found,) = await self._problems.judge(prompt, [rollout])
                    if isinstance(found, Judgement) and math.isnan(found.reward):
                        raise RewardHung(found.error) if found.hung else Unrewarded(found.error)
                    reward = found.reward if isinstance(found, Judgement) else found
                    if not math.isfinite(reward):
                        raise ValueError(f"expected a finite reward, found {reward}")
                    return reward
            except RunError:
                raise
            except Exception as error:
                self._hung += isinstance(error, RewardHung)
                if attempt == self._problems.attempts:
                    raise
        raise AssertionError("a problem has at least one attempt")
