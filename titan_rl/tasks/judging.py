"""Chooses where a run's rewards are computed, and hands out its judges.

"exact", "last_number"    in the event loop: they return at once
any other reward          in task.reward_workers processes (the optional part reward_processes), or on one thread of the
                          controller if that is 0
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from titan_rl.config.sections import Config, TaskSection
from titan_rl.tasks.reward_thread import RewardThread, SideThread
from titan_rl.tasks.rewards import BUILT_IN, Messages
from titan_rl.tasks.rubric import Rubric
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Judge, Judgement, Prompt, Rollout

REWARD_ATTEMPTS = 2
"""Attempts to score a group whose reward raises. After the last one another prompt replaces the group."""


def training_rubric(task: TaskSection) -> Rubric:
    """Return what training answers are judged by: task.rewards, or task.reward, and task.grader."""
    parts = {name: float(weight) for name, weight in task.rewards.items()} or {task.reward: 1.0}
    return Rubric(tuple(parts.items()), task.grader, tuple(task.reward_args.items()))


def grader_rubric(task: TaskSection) -> Rubric | None:
    """Return task.grader alone: what judges rollouts whose reward an environment or a reward model gave."""
    return Rubric(((task.grader, 1.0),), "", tuple(task.reward_args.items())) if task.grader else None


def evaluation_rubric(task: TaskSection) -> Rubric:
    """Return what held-out answers are judged by: task.eval_reward, or the training reward without its grader."""
    parts = ((task.eval_reward, 1.0),) if task.eval_reward else training_rubric(task).parts
    return Rubric(parts, "", tuple(task.reward_args.items()))


class RewardCalls(Protocol):
    """Calls the functions of rubrics, outside the event loop."""

    async def verdicts(
        self, rubric: Rubric, prompt: Prompt, rollouts: Sequence[Rollout], attempts: int = 1
    ) -> Sequence[Judgement]:
        """Return a verdict for each rollout. A row that fails is tried `attempts` times. Raise RewardUnusable if the
        reward cannot be imported."""
        ...

    async def close(self) -> None: ...


class RewardJudges:
    """Judges by reward functions, in training and in evaluations. `close` ends their processes."""

    def __init__(self, config: Config) -> None:
        self._task = config.task
        self._seconds = config.task.reward_seconds or config.rollout.timeout_seconds
        self._calls: RewardCalls | None = None

    @property
    def parallel(self) -> int:
        """Return how many answers can be judged at the same time."""
        return max(1, self._task.reward_workers)

    def judge(self, rubric: Rubric, attempts: int = 1) -> Judge:
        """Return the judge of a rubric. An answer that fails is judged `attempts` times."""
        if rubric.simple:
            return by_rule(BUILT_IN[rubric.parts[0][0]])
        calls = self._calls = self._calls or self._started()

        async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[Judgement]:
            return await calls.verdicts(rubric, prompt, rollouts, attempts)

        return judge

    def _started(self) -> RewardCalls:
        if not self._task.reward_workers:
            return RewardThread(self._seconds)
        return needed_part("reward processes", "task.reward_workers")(self._task, self._seconds)

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()


def by_rule(
    reward: Callable[[Prompt, str, Messages], float], seconds: float | None = None, thread: SideThread | None = None
) -> Callable[[Prompt, Sequence[Rollout]], Awaitable[Sequence[float]]]:
    """Judge by a reward function. A user's function runs on `thread`, or on another one, for at most `seconds` per
    call, which is a group in training and an answer in an evaluation (None: no limit). Built-in functions return at
    once and run in the event loop."""
    side = None if reward in BUILT_IN.values() else thread or SideThread()

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        def rewards() -> list[float]:
            return [reward(prompt, rollout.text, rollout.messages) for rollout in rollouts]

        return rewards() if side is None else await side.run(rewards, seconds)

    return judge
