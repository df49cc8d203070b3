"""A generator rank between two steps: new requests enter, and finished ones leave."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from monarch.actor import this_host

from support.slow_generator import SlowGenerator
from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.wire.types import Request, Sampling

STEP = 0.3  # seconds; a message takes milliseconds


async def asked(times: int) -> list[tuple[float, Done, float, list[float]]]:
    """Return when a request was sent, its answer, when that came, and when the engine's steps began: several times."""
    procs = this_host().spawn_procs(per_host={"ranks": 1}, name="slow")
    try:
        rank = procs.spawn("generator", SlowGenerator, EngineSettings(model_dir="none"), STEP)
        await rank.begin.call_one()
        found = list[tuple[float, Done, float, list[float]]]()
        for nth in range(times):
            answer = rank.take.call_one()
            sent = time.time()
            await rank.submit.call_one([Request(f"r{nth}", [1], [0], Sampling(1))])
            (done,) = await answer
            found.append((sent, done, time.time(), await rank.steps.call_one()))
        return found
    finally:
        await procs.stop()


def test_a_request_and_its_answer_wait_for_no_step_but_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)  # the rank imports support
    for sent, done, came, began in asyncio.run(asyncio.wait_for(asked(3), 60)):
        entered = done.completions[0].tokens[0]
        between = sum(sent < at < began[entered] for at in began)
        assert between <= 1  # it began while the message was on its way
        assert came < began[entered] + 2 * STEP
