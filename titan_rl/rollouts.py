"""Keep a bounded number of groups in flight, and hand them over oldest first."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from titan_rl.advantages import soft_overlong_punishment
from titan_rl.clock import Clock
from titan_rl.config import Algorithm
from titan_rl.data import PromptSource
from titan_rl.seeds import sample_seed
from titan_rl.types import Completion, Group, Prompt, Request, Rollout, Sampling, Turn

Decode = Callable[[Sequence[int]], str]
Judge = Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[Sequence[float]]]
"""Rewards of a group's completions, whose texts come along: a rule at once, a reward model after a while."""


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
        judge: Judge,
        decode: Decode,
        *,
        algorithm: Algorithm,
        sampling: Sampling,
        group_size: int,
        groups: int,
        seed: int,
        clock: Clock,
    ) -> None:
        self._generators = generators
        self._prompts = prompts
        self._judge = judge
        self._algorithm = algorithm
        self._decode = decode
        self._sampling = sampling
        self._group_size = group_size
        self._left = groups  # how many the rest of the run needs: admission beyond it would be waste
        self._seed = seed
        self._clock = clock
        self._inflight: deque[tuple[asyncio.Task[Group], dict[str, Any]]] = deque()
        self.dropped: list[Group] = []
        """The groups without signal that the last `take` replaced."""
        self.cursor = prompts.state_dict()
        """The data source's state after the last group taken: what a checkpoint saves. Groups that are still in flight
        lie beyond it, and are sampled again by a run that resumes."""

    def admit(self, n: int) -> None:
        for _ in range(min(n, self._left)):
            self._left -= 1
            prompt = self._prompts.next()
            self._inflight.append((asyncio.create_task(self._rollout(prompt)), self._prompts.state_dict()))

    async def take(self, n: int) -> list[Group]:
        """The n oldest groups; under dynamic sampling, n that have a signal, or those found after max_refills rounds.
        A round is admitted at once, never group by group: so engines see the same batches in every run."""
        with self._clock("generate"):
            groups, self.dropped = await self._oldest(n), []
            for _ in range(self._algorithm.max_refills if self._algorithm.dynamic_sampling else 0):
                flat = [group for group in groups if group.flat]
                if not flat:
                    break
                self.dropped += flat
                self._left += len(flat)
                self.admit(len(flat))
                groups = [group for group in groups if not group.flat] + await self._oldest(len(flat))
        return groups

    async def _oldest(self, n: int) -> list[Group]:
        groups = []
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
        texts = [self._decode(completion.tokens) for completion in completions]
        rewards = await self._judge(prompt, completions, texts)
        rollouts = [
            Rollout([Turn(prompt.tokens, completion)], text, reward, self._penalty(completion))
            for completion, text, reward in zip(completions, texts, rewards, strict=True)
        ]
        return Group(prompt, rollouts)

    def _penalty(self, completion: Completion) -> float:
        """Soft overlong punishment, where it is asked for."""
        longest, buffer = self._sampling.max_new_tokens, self._algorithm.overlong_buffer
        punishment = soft_overlong_punishment(len(completion.tokens), longest=longest, buffer=buffer)
        return -self._algorithm.overlong_penalty * punishment
