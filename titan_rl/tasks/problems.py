"""Measures the greedy score on a fixed set of problems. On the held-out set, it is the evaluation score of the run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from titan_rl.tasks.rewards import Reward
from titan_rl.wire.types import Decode, Generates, Prompt, Request, Sampling


@dataclass(frozen=True, slots=True)
class Problems:
    """A fixed set of problems, and the reward of an answer."""

    prompts: Sequence[Prompt]
    reward: Reward
    decode: Decode
    sampling: Sampling

    async def score(self, generators: Generates) -> float:
        """Return the mean reward of one greedy sample per problem, with the weights that the generators hold."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0)

        async def one(prompt: Prompt) -> float:
            request = Request(f"greedy-{prompt.id}", prompt.tokens, [0], greedy)
            (completion,) = await generators.generate(request)
            return self.reward(prompt, self.decode(completion.tokens))

        return fmean(await asyncio.gather(*map(one, self.prompts)))
