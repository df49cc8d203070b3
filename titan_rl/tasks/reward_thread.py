"""Calls reward functions on a thread, so that a slow or hanging one does not stop the event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from titan_rl.isolation import start_outside
from titan_rl.tasks.rewards import BUILT_IN, Messages
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.types import Prompt, Rollout

T = TypeVar("T")


class RewardHung(TimeoutError):
    """A reward function did not return within its deadline."""


class SideThread:
    """Calls functions one at a time on a thread, so that they need not be thread-safe and the event loop continues.

    A function that outlasts its deadline is abandoned with its thread, and the next call gets a new one; no thread
    delays the end of the process. A function that never releases the interpreter's lock (such as one long regular
    expression) blocks the process anyway."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()  # first come, first served: results arrive in the order of the calls
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    async def run(self, function: Callable[[], T], seconds: float | None) -> T:
        async with self._free:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[T | _Raised] = loop.create_future()

            def call() -> None:
                try:
                    value = function()
                except BaseException as error:  # a sys.exit in user code must end only this call
                    value = _Raised(error)
                with suppress(RuntimeError):  # the loop is closed and nothing waits
                    loop.call_soon_threadsafe(lambda: answer.cancelled() or answer.set_result(value))

            if self._calls is None:
                self._calls = SimpleQueue()
                start_outside(threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True))
            self._calls.put(call)
            try:
                async with deadline(seconds):
                    value = await answer
            except TimeoutError:
                self._calls.put(None)  # lets the thread end when its call does, if ever
                self._calls = None
                raise RewardHung(
                    f"the reward function did not return within {seconds:g} s (rollout.timeout_seconds)"
                ) from None
            if isinstance(value, _Raised):
                raise value.error if isinstance(value.error, Exception) else RuntimeError(repr(value.error))
            return value


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def by_rule(
    reward: Callable[[Prompt, str, Messages], float], seconds: float | None = None, thread: SideThread | None = None
) -> Callable[[Prompt, Sequence[Rollout]], Awaitable[Sequence[float]]]:
    """Judge by a reward function. A user's function runs on `thread`, or on one of its own, for at most `seconds` per
    call, which is a group in training and an answer in an evaluation (None: no limit). Built-in functions return at
    once and run in the event loop."""
    side = None if reward in BUILT_IN.values() else thread or SideThread()

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        def rewards() -> list[float]:
            return [reward(prompt, rollout.text, rollout.messages) for rollout in rollouts]

        return rewards() if side is None else await side.run(rewards, seconds)

    return judge
