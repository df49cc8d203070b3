"""Measures the greedy score on a fixed set of problems. On the held-out set, it is the evaluation score of the run."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from titan_rl.tasks.reward_thread import RewardHung
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.types import Decode, Generates, Judge, Prompt, Request, Sampling

MOST_HUNG = 3
"""Rewards that may hang in one evaluation, a deadline each; then its other answers are not judged."""


@dataclass(frozen=True, slots=True)
class Problems:
    """A fixed set of problems, and the judge of an answer."""

    prompts: Sequence[Prompt]
    judge: Judge
    decode: Decode
    sampling: Sampling

    async def score(self, generators: Generates, warn: Callable[[str], None]) -> float:
        """Return the mean reward of one greedy sample per problem, with the weights that the generators hold. An answer
        that cannot be sampled or judged counts as 0; `warn` is called with their number."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0)
        failures: list[Exception] = []
        unsound: list[str] = []
        turn = asyncio.Lock()  # one answer at a time: training judges its groups in between

        async def one(prompt: Prompt) -> float:
            request = Request(f"greedy-{prompt.id}", prompt.tokens, [0], greedy)
            try:
                (completion,) = await generators.generate(request)
                unsound.extend([] if completion.finite else [f"problem {prompt.id}, by {completion.replica}"])
                async with turn:
                    if sum(isinstance(failure, RewardHung) for failure in failures) >= MOST_HUNG:
                        raise RewardHung(f"not judged, because {MOST_HUNG} rewards of this evaluation hung")
                    (reward,) = await self.judge(prompt, [completion], [self.decode(completion.tokens)])
                if not math.isfinite(reward):
                    raise ValueError(f"expected a finite reward, found {reward}")
            except Exception as error:
                if isinstance(error, RunError) and not isinstance(error, RequestRefused):
                    raise  # of a mesh
                failures.append(error)
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
            warn(f"{count}; the first: {type(failures[0]).__name__}: {failures[0]}")
        return score
