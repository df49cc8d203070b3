"""Measures the greedy score on a fixed set of problems. On the held-out set, it is the evaluation score of the run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from titan_rl.tasks.reward_thread import RewardHung
from titan_rl.wire.errors import RunError
from titan_rl.wire.sessions import Plays
from titan_rl.wire.stop_reasons import FAILED
from titan_rl.wire.types import Judge, Prompt, Sampling, Verdict

MOST_HUNG = 3
"""Rewards that may hang in one evaluation, a deadline each; then its other answers are not judged."""


@dataclass(frozen=True, slots=True)
class Problems:
    """A fixed set of problems, and the judge of an answer."""

    prompts: Sequence[Prompt]
    judge: Judge
    sampling: Sampling
    parallel: int = 1  # answers that are judged at the same time

    async def score(self, plays: Plays, warn: Callable[[str], None], temperature: float = 0.0) -> float:
        """Return the mean reward of one rollout per problem, greedy unless a temperature is given, with the weights
        that the generators hold. One that cannot be sampled or judged counts as 0; `warn` is called with their
        number."""
        sampling = replace(self.sampling, temperature=temperature, top_p=1.0)
        failures: list[str] = []
        hung = 0
        unsound: list[str] = []
        turn = asyncio.Semaphore(self.parallel)  # training judges its groups in between

        async def one(prompt: Prompt) -> float:
            nonlocal hung
            rollout = await plays(prompt, sampling)
            turns = [each.completion for each in rollout.turns]
            bad = [completion.replica for completion in turns if not completion.finite]
            unsound.extend([f"problem {prompt.id}, by {bad[0]}"] if bad else [])
            if not turns or rollout.status in FAILED:
                failures.append(rollout.error or f"it ended as {rollout.status}")
                return 0.0
            if rollout.valid:
                return rollout.reward
            try:
                async with turn:
                    if hung >= MOST_HUNG:
                        raise RewardHung(f"not judged, because {MOST_HUNG} rewards of this evaluation hung")
                    (found,) = await self.judge(prompt, [rollout])
                if isinstance(found, Verdict) and math.isnan(found.reward):
                    hung += found.hung
                    failures.append(found.error)
                    return 0.0
                reward = found.reward if isinstance(found, Verdict) else found
                if not math.isfinite(reward):
                    raise ValueError(f"expected a finite reward, found {reward}")
            except RunError:
                raise  # of a mesh
            except Exception as error:
                hung += isinstance(error, RewardHung)
                failures.append(f"{type(error).__name__}: {error}")
                return 0.0
            return reward

        score = fmean(await asyncio.gather(*map(one, self.prompts)))
        if unsound:
            what = f"{len(unsound)} of {len(self.prompts)} evaluated answers have log-probs that are not finite"
            if len(unsound) == len(self.prompts):
                raise RunError(f"{what}: the weights are ruined", f"The first: {unsound[0]}.")
            warn(f"{what}; the first: {unsound[0]}")
        if failures:
            count = f"{len(failures)} of {len(self.prompts)} evaluated answers had no reward and count as 0"
            warn(f"{count}; the first: {failures[0]}")
        return score
