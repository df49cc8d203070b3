"""Calls reward functions on a thread of this process: what task.reward_workers = 0 asks for."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from titan_rl.isolation import start_outside
from titan_rl.tasks.rewards import answer_of
from titan_rl.tasks.rubric import RewardUnusable, Rubric, Scorer
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.types import Judgement, Prompt, Rollout

T = TypeVar("T")
Call = tuple[Future[Any], Callable[[], Any]]


class RewardHung(TimeoutError):
    """A reward function did not return within its deadline."""


class SideThread:
    """Calls functions one at a time on a thread, so that they need not be thread-safe and the event loop continues.

    A function that outlasts its deadline is abandoned with its thread, and the next call gets a new one; no thread
    delays the end of the process, as one of concurrent.futures does. A function that never releases the interpreter's
    lock (such as one long regular expression) blocks the process anyway."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()  # first come, first served: results arrive in the order of the calls
        self._calls: SimpleQueue[Call | None] | None = None

    async def run(self, function: Callable[[], T], seconds: float | None) -> T:
        async with self._free:
            if self._calls is None:
                self._calls = SimpleQueue()
                start_outside(threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True))
            result = Future[T]()
            self._calls.put((result, function))
            answer = asyncio.wrap_future(result)
            try:
                async with deadline(seconds):
                    await asyncio.wait([answer])
            except TimeoutError:
                self._calls.put(None)  # the thread ends when its call does, if ever
                self._calls = None
                raise RewardHung(
                    f"the reward function did not return within {seconds:g} s (rollout.timeout_seconds)"
                ) from None
            finally:
                answer.cancel()
            return answer.result()


class RewardThread:
    """Judges one group at a time. A function that hangs fails its group, and its thread cannot be killed."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds  # deadline of a group
        self._thread = SideThread()
        self._scorers: dict[Rubric, Scorer] = {}

    async def verdicts(
        self, rubric: Rubric, prompt: Prompt, rollouts: Sequence[Rollout], attempts: int = 1
    ) -> list[Judgement]:
        answers = [answer_of(rollout) for rollout in rollouts]

        def judged() -> list[Judgement]:
            try:
                scorer = self._scorers[rubric] = self._scorers.get(rubric) or Scorer(rubric)
            except Exception as error:
                raise RewardUnusable(rubric, f"{type(error).__name__}: {error}") from None
            found, left = dict[int, Judgement](), list(range(len(answers)))
            for _ in range(attempts):
                found |= scorer.verdicts(prompt, answers, left, seconds=self._seconds)
                left = [row for row in left if math.isnan(found[row].reward)]
            return [found[row] for row in range(len(answers))]

        try:
            return await self._thread.run(judged, self._seconds)
        except TimeoutError:
            self._scorers.pop(rubric, None)  # its thread is still in it
            raise

    async def close(self) -> None:
        """Nothing is held: a thread that still runs ends with the process."""


def _serve(calls: "SimpleQueue[Call | None]") -> None:
    while (call := calls.get()) is not None:
        result, function = call
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function())
            except StopIteration:  # a future cannot hold it
                result.set_exception(RuntimeError("coroutine raised StopIteration"))
            except Exception as error:
                result.set_exception(error)
            except BaseException as error:  # a sys.exit in user code must end only this call
                result.set_exception(RuntimeError(repr(error)))
