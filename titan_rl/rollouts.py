"""Keep a bounded number of groups in flight, and hand them over oldest first."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from titan_rl.clock import Clock
from titan_rl.data import PromptSource
from titan_rl.rewards import Reward
from titan_rl.seeds import sample_seed
from titan_rl.types import Completion, Group, Prompt, Request, Rollout, Sampling, Turn

Decode = Callable[[Sequence[int]], str]


class Generates(Protocol):
    async def generate(self, request: Request) -> list[Completion]: ...


class RolloutStream:
    """`admit(n)` starts n groups; `take(n)` gathers the n oldest.

    Oldest first is what bounds staleness: with (lag + 1) steps' worth admitted, and a step's worth admitted again only
    after a weight sync, a group is trained at most `lag` versions after it began.
    """

    def __init__(
        self,
        generators: Generates,
        prompts: PromptSource,
        reward: Reward,
        decode: Decode,
        *,
        sampling: Sampling,
        group_size: int,
        groups: int,
        seed: int,
        clock: Clock,
    ) -> None:
        self._generators = generators
        self._prompts = prompts
        self._reward = reward
        self._decode = decode
        self._sampling = sampling
        self._group_size = group_size
        self._left = groups  # how many the rest of the run needs: admission beyond it would be waste
        self._seed = seed
        self._clock = clock
        self._inflight: deque[tuple[asyncio.Task[Group], dict[str, Any]]] = deque()
        self.cursor = prompts.state_dict()
        """The data source's state after the last group taken: what a checkpoint saves. Groups that are still in flight
        lie beyond it, and are sampled again by a run that resumes."""

    def admit(self, n: int) -> None:
        for _ in range(min(n, self._left)):
            self._left -= 1
            prompt = self._prompts.next()
            self._inflight.append((asyncio.create_task(self._rollout(prompt)), self._prompts.state_dict()))

    async def take(self, n: int) -> list[Group]:
        groups = []
        with self._clock("generate"):
            for _ in range(n):
                task, cursor = self._inflight[0]
                groups.append(await task)
                self._inflight.popleft()
                self.cursor = cursor
        return groups

    async def aclose(self) -> None:
        for task, _ in self._inflight:
            task.cancel()
        await asyncio.gather(*(task for task, _ in self._inflight), return_exceptions=True)

    async def _rollout(self, prompt: Prompt) -> Group:
        seeds = [sample_seed(self._seed, prompt.id, k) for k in range(self._group_size)]
        request = Request(f"prompt-{prompt.id}", prompt.tokens, seeds, self._sampling)
        completions = await self._generators.generate(request)
        return Group(prompt, [self._score(prompt, completion) for completion in completions])

    def _score(self, prompt: Prompt, completion: Completion) -> Rollout:
        text = self._decode(completion.tokens)
        return Rollout([Turn(prompt.tokens, completion)], text, self._reward(prompt, text))
