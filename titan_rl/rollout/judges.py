"""Judges a group's completions by a reward function, or by a reward model on its mesh."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

import numpy as np

from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config
from titan_rl.rollout.sampling import Judge
from titan_rl.tasks.prompts import to_judge
from titan_rl.tasks.rewards import BUILT_IN, Reward
from titan_rl.wire.types import Batch, Completion, Prompt, Sample

T = TypeVar("T")


class Scores(Protocol):
    """The part of a reward model's mesh that a judge needs."""

    @property
    def dp(self) -> int: ...

    async def scores(self, batches: Sequence[Batch]) -> tuple[list[list[np.ndarray]], list[int]]: ...


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
                threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True).start()
            self._calls.put(call)
            done, _ = await asyncio.wait([answer], timeout=seconds)
            if not done:
                answer.cancel()
                self._calls.put(None)  # lets the thread end when its call does, if ever
                self._calls = None
                raise TimeoutError(f"the reward function did not return within {seconds:g} s (rollout.timeout_seconds)")
            if isinstance(value := answer.result(), _Raised):
                raise value.error if isinstance(value.error, Exception) else RuntimeError(repr(value.error))
            return value


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def by_rule(reward: Reward, seconds: float | None = None) -> Judge:
    """Judge by a reward function. A user's function runs on its own thread, for at most `seconds` per group (None: no
    limit); built-in ones return at once and run in the event loop."""
    side = None if reward in BUILT_IN.values() else SideThread()

    async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        def rewards() -> list[float]:
            return [reward(prompt, text) for text in texts]

        return rewards() if side is None else await side.run(rewards, seconds)

    return judge


def by_model(mesh: Scores, config: Config, pad: int) -> Judge:
    """Judge by a reward model, one call per group, so that other groups are sampled meanwhile. A score depends only on
    its own group: repeating a run gives the same rewards to the last bit."""

    async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        samples = [to_judge([*prompt.tokens, *completion.tokens], pad) for completion in completions]
        batches = pack(
            samples,
            shards=mesh.dp,
            seq_len=config.training.seq_len,
            rows_per_microbatch=config.training.local_batch_size,
            pad_id=pad,
        )
        answers, _ = await mesh.scores(batches)
        return scores_of(samples, unpack(batches, answers, samples))

    return judge


def scores_of(samples: Sequence[Sample], values: Sequence[np.ndarray]) -> list[float]:
    """Return each sequence's score: the value under its mask."""
    return [float(value[-1]) for _, value in zip(samples, values, strict=True)]


def accuracy(scores: Sequence[float]) -> float:
    """Return the share of (chosen, rejected) pairs whose chosen member scores higher."""
    return float(np.mean(np.asarray(scores[0::2]) > np.asarray(scores[1::2])))
