"""Chooses where a run's rewards are computed, and hands out its judges.

"exact", "last_number"    in the event loop: they return at once
any other reward          in task.reward_workers processes, or on one thread of the controller if that is 0
"""

import math
from collections.abc import Awaitable, Callable, Sequence

from titan_rl.config.sections import Config, TaskSection
from titan_rl.tasks.reward_pool import PoolLimits, RewardPool, answer_of
from titan_rl.tasks.reward_thread import SideThread
from titan_rl.tasks.rewards import BUILT_IN, Messages
from titan_rl.tasks.rubric import RewardUnusable, Rubric, Scorer
from titan_rl.wire.cores import host_memory
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


class RewardJudges:
    """Judges by reward functions, in training and in evaluations. `close` ends their processes."""

    def __init__(self, config: Config) -> None:
        task = config.task
        self._seconds = task.reward_seconds or config.rollout.timeout_seconds
        self._workers = task.reward_workers
        memory = task.reward_memory_mb or host_memory() >> 21
        self._thread = SideThread()
        self._pool = RewardPool(PoolLimits(task.reward_workers, self._seconds, memory))

    @property
    def parallel(self) -> int:
        """Return how many answers can be judged at the same time."""
        return max(1, self._workers)

    def judge(self, rubric: Rubric, attempts: int = 1) -> Judge:
        """Return the judge of a rubric. An answer that fails is judged `attempts` times."""
        if rubric.simple:
            return by_rule(BUILT_IN[rubric.parts[0][0]])
        if not self._workers:
            return on_thread(rubric, self._seconds, self._thread, attempts)

        async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
            return await self._pool.verdicts(rubric, prompt, rollouts, attempts)

        return judge

    async def close(self) -> None:
        await self._pool.close()


def on_thread(rubric: Rubric, seconds: float | None, thread: SideThread, attempts: int = 1) -> Judge:
    """Judge on a thread, one group at a time. A function that hangs fails its group, and a thread cannot be killed."""
    scorer: Scorer | None = None

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        answers = [answer_of(rollout) for rollout in rollouts]

        def verdicts() -> list[Judgement]:
            nonlocal scorer
            try:
                scorer = scorer or Scorer(rubric)
            except Exception as error:
                raise RewardUnusable(rubric, f"{type(error).__name__}: {error}") from None
            found, left = dict[int, Judgement](), list(range(len(answers)))
            for _ in range(attempts):
                found |= scorer.verdicts(prompt, answers, left, seconds=seconds)
                left = [row for row in left if math.isnan(found[row].reward)]
            return [found[row] for row in range(len(answers))]

        nonlocal scorer
        try:
            return await thread.run(verdicts, seconds)
        except TimeoutError:
            scorer = None  # its thread is still in it
            raise

    return judge


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
