"""What a rollout costs the controller: the real stream and generator mesh over processes that answer after a timer."""

import asyncio
import os
import random
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, this_host

from bench.ranks import IMPORTABLE, TIMEOUT
from bench.rows import Row
from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.actors.vllm.generator import drain
from titan_rl.config import sections as c
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.replica import GeneratorPolicy, Replica
from titan_rl.meshes.spawn import spawn
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.rewards import BUILT_IN
from titan_rl.tasks.task import load_task
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.reports import ReaderCost
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Generates, Request, Sampling

PROCS, LAG = 4, 1
ROLLOUTS = 1600  # admitted at a time
SECONDS = 2.0  # of a rollout, on average
TOKENS = 64  # per rollout
SETTLED = 10  # steps
SPREAD = 0.5  # timers differ by at most this share of the average


def timer(seed: int) -> float:
    return SECONDS * random.Random(seed).uniform(1 - SPREAD, 1 + SPREAD)


class Timer(Actor):
    """A generator rank without an engine. It answers a request after a timer."""

    def __init__(self) -> None:
        self._version = 0
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self._over = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def start(self) -> None: ...

    @concurrent_endpoint
    async def watch(self) -> None:
        await self._over.wait()

    @concurrent_endpoint
    async def submit(self, requests: list[Request], withdrawn: Sequence[str] = ()) -> None:
        for request in requests:
            task = asyncio.create_task(self._answer(request, self._version))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    @concurrent_endpoint
    async def take(self, within: float | None = None) -> list[Done]:
        return await drain(self._done, within)

    @concurrent_endpoint
    async def fetch_weights(self, manifests: list[Any], timeout: float) -> ReaderCost:
        return ReaderCost()

    @concurrent_endpoint
    async def switch(self, version: int, timeout: float) -> ReaderCost:
        self._version = version
        return ReaderCost()

    @concurrent_endpoint
    async def close(self) -> None:
        self._over.set()

    async def _answer(self, request: Request, version: int) -> None:
        await asyncio.sleep(timer(request.seeds[0]))
        samples = [
            Completion([8 + k % 2] * TOKENS, [-0.5] * TOKENS, [version] * TOKENS, "length")
            for k in range(len(request.seeds))
        ]
        self._done.put_nowait(Done(request.id, samples))


async def timer_mesh() -> GeneratorMesh:
    policy = GeneratorPolicy(init_seconds=TIMEOUT, seconds=TIMEOUT)

    async def replica(i: int) -> Replica:
        procs = await spawn(this_host(), name=f"timer{i}", shape={"tp": 1}, env=IMPORTABLE)
        timers: Any = SimpleNamespace(spawn=lambda name, *_: procs.spawn(name, Timer), stop=procs.stop)
        return Replica(i, f"timer{i}", timers, EngineSettings(model_dir="", max_model_len=0), policy)

    replicas = [await replica(i) for i in range(PROCS)]
    return GeneratorMesh(replicas, policy)


def rollout_stream(generators: Generates, folder: Path, groups: int, group_size: int, steps: int) -> RolloutStream:
    characters.build(folder)
    tokenizer = TextTokenizer.load(folder)
    settings = StreamSettings(
        algorithm=c.AlgorithmSection(),
        rollout=c.RolloutSection(groups_per_step=groups, group_size=group_size, max_staleness_steps=LAG),
        sampling=Sampling(TOKENS),
        seed=0,
        first=1,
        groups=groups * steps,
    )
    prompts = PromptSource(load_task(c.TaskSection(), seed=0, eval_size=0), tokenizer, seed=0)
    judge = by_rule(BUILT_IN["exact"])
    return RolloutStream(settings, generators, prompts, judge, tokenizer.decode, Clock(), Ledger(folder))


async def capacity(group_size: int, steps: int) -> list[Row]:
    """Run steps that take `groups` groups, pull a new version and admit as many groups again."""
    groups = ROLLOUTS // group_size // (LAG + 1)
    mesh = await timer_mesh()
    await mesh.start()
    late = array("d")  # eight bytes a request, which hardly adds to the memory measured

    async def generate(request: Request) -> list[Completion]:
        """Record how much later than its timer each request is answered."""
        began = time.perf_counter()
        samples = await mesh.generate(request)
        late.append(time.perf_counter() - began - timer(request.seeds[0]))
        return samples

    stopwatch: Any = SimpleNamespace(generate=generate)
    cpu, wall, settled = 0.0, 0.0, 0
    resident = dict.fromkeys((SETTLED, (SETTLED + steps - LAG) // 2, steps - LAG), 0.0)  # steps with as much in flight
    with tempfile.TemporaryDirectory() as folder:
        stream = rollout_stream(stopwatch, Path(folder), groups, group_size, steps)
        try:
            async with aclosing(stream):
                stream.admit(groups * (LAG + 1))
                for step in range(1, steps + 1):
                    stream.trained(step, await stream.take(groups, step))
                    await mesh.pull(step)
                    stream.admit(groups)
                    if step == SETTLED:
                        cpu, wall, settled = time.process_time(), time.perf_counter(), len(late)
                    if step in resident:
                        resident[step] = rss()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                answered = group_size * (len(late) - settled)
        finally:
            await mesh.close()
            await mesh.stop()
    median, p99, most = 1e3 * np.percentile(late[settled:], [50, 99, 100])
    case = f"{ROLLOUTS} rollouts admitted, groups of {group_size}, {PROCS} processes"
    measured = {
        "rollouts whose timer runs, mean": answered / wall * SECONDS,  # Little's law; the others wait for their step
        "controller: CPU ms a rollout": 1e3 * cpu / answered,
        "controller: share of a core": cpu / wall,
        "rollouts / s": answered / wall,
        "answered later than its timer: median, ms": median,
        "answered later than its timer: p99, ms": p99,
        "answered later than its timer: most, ms": most,
        **{f"controller: resident after step {step}, MB": megabytes for step, megabytes in resident.items()},
    }
    note = f"{steps} steps of {groups} groups, {SECONDS:g} s a rollout, give or take half"
    return [Row("capacity", case, measure, [value], note=note) for measure, value in measured.items()]


def rss() -> float:
    """Return the resident memory of this process in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
