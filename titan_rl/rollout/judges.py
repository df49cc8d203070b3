"""Who judges a group's completions: a rule, or a reward model on its mesh."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.rollout.stream import Judge
from titan_rl.tasks.prompts import to_judge
from titan_rl.tasks.rewards import BUILT_IN, Reward
from titan_rl.wire.types import Completion, Prompt, Sample

T = TypeVar("T")


class SideThread:
    """Calls functions one at a time, so that they need not be thread-safe, while the event loop goes on. One that
    outlasts its deadline is left alone with its thread, and the next call gets another; no thread delays the process's
    end. Against a function that never lets go of the interpreter's lock (one long regular expression, say) there is no
    help in this process."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()  # first come, first served: results come in the order of the calls
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    async def run(self, function: Callable[[], T], seconds: float | None) -> T:
        async with self._free:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[T | _Raised] = loop.create_future()

            def call() -> None:
                try:
                    value = function()
                except BaseException as error:  # a user's sys.exit ends nothing but his own call
                    value = _Raised(error)
                with suppress(RuntimeError):  # the loop is closed, and nobody waits
                    loop.call_soon_threadsafe(lambda: answer.cancelled() or answer.set_result(value))

            self._queue().put(call)
            done, _ = await asyncio.wait([answer], timeout=seconds)
            if not done:
                answer.cancel()
                self._abandon()
                raise TimeoutError(f"no answer within {seconds:g} s")
            if isinstance(value := answer.result(), _Raised):
                raise value.error if isinstance(value.error, Exception) else RuntimeError(repr(value.error))
            return value

    def _queue(self) -> "SimpleQueue[Callable[[], None] | None]":
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="reward", daemon=True).start()
        return self._calls

    def _abandon(self) -> None:
        """It ends when its call does, if ever."""
        if self._calls is not None:
            self._calls.put(None)
        self._calls = None


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()


def by_rule(reward: Reward, seconds: float | None = None) -> Judge:
    """The user's own function may take its time, at most so many seconds a group (None: for ever), on a thread beside
    the event loop; ours take none."""
    beside = None if reward in BUILT_IN.values() else SideThread()

    async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        def rewards() -> list[float]:
            return [reward(prompt, text) for text in texts]

        return rewards() if beside is None else await beside.run(rewards, seconds)

    return judge


def by_model(mesh: ModelMesh, config: Config, pad: int) -> Judge:
    """One call a group: while a group is judged others are still being sampled, and a score depends on its own group
    alone, so the same run twice has the same rewards to the last bit."""

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
    """Each sequence's score: the value under its mask."""
    return [float(value[-1]) for _, value in zip(samples, values, strict=True)]


def accuracy(scores: Sequence[float]) -> float:
    """The share of (chosen, rejected) pairs whose chosen member scores higher."""
    return float(np.mean(np.asarray(scores[0::2]) > np.asarray(scores[1::2])))
