#!/usr/bin/env python3
"""Measure the environment mesh: many rollouts at once whose tools take a while, with a policy that only waits.

    .venv/bin/python scripts/bench_environments.py                        # 1,000 rollouts of 4 turns, 200 ms tools
    .venv/bin/python scripts/bench_environments.py --rollouts 100 --block # while one environment blocks for 3 s
    .venv/bin/python scripts/bench_environments.py --engine               # 1,000 sessions on a real engine, for 30 s

The ideal is turns x (tool + policy) seconds, as if every rollout had its own machine. With --engine the policy is
an engine with a model of random weights, and every rollout that ends is followed by another one.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.environment_sessions import measure_sessions
from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, report
from titan_rl.ext.agents.episodes import Limits, Reply, Step

COLUMNS = ("variant", "measure", *FIGURES, *RAN_ON)
POLICY_SECONDS, STEP_SECONDS = 0.05, 0.005
BLOCK_SECONDS = 3.0


class SlowTool:
    """row["turns"] turns, with a tool of row["seconds"] in each. row["block"]: one blocks its loop."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        self._row, self._turn = row, 0
        return "0"

    async def step(self, reply: Reply) -> Step:
        self._turn += 1
        if self._row["block"] and self._turn == 2:
            time.sleep(BLOCK_SECONDS)
        await asyncio.sleep(self._row["seconds"])
        done = self._turn == self._row["turns"]
        return Step(str(self._turn), float(done), done)


class Steps:
    """A policy that answers a turn POLICY_SECONDS after it was asked, or a few ms later: an engine answers in steps, so
    that the benchmark needs no timer for each turn."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            now = time.perf_counter()
            while self._waiting and self._waiting[0][0] <= now:
                self._waiting.popleft()[1].set_result(self._answer)

    def ask(self) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((time.perf_counter() + POLICY_SECONDS, future))
        return future


@dataclass(eq=False)
class Waiting:
    """A session that `policy` samples."""

    prompt: Any
    policy: Steps
    id: str = ""
    seed: int = 0

    async def sample(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Any:
        return await self.policy.ask()


async def spawn_environments(options: argparse.Namespace, folder: Path) -> Any:
    import monarch.actor
    from monarch.actor import this_host

    from titan_rl.ext.agents.environment_mesh import EnvironmentMesh, EnvironmentPolicy
    from titan_rl.ext.agents.environment_rank import EnvironmentSettings
    from titan_rl.ext.agents.episode_loop import LoopSettings
    from titan_rl.text import tokenizer

    monarch.actor.unhandled_fault_hook = lambda _: None
    tokenizer.build(folder)
    limits = Limits(options.turns, 0, turn_seconds=60, rollout_seconds=600)
    settings = EnvironmentSettings(LoopSettings("bench_environments:SlowTool", options.rollouts, limits), folder)
    host, path = this_host(), os.pathsep.join([str(Path(__file__).parent), os.getcwd()])
    return await EnvironmentMesh.spawn(host, settings, EnvironmentPolicy(options.processes), {"PYTHONPATH": path})


async def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    from titan_rl.wire.types import Completion, Prompt

    began = time.perf_counter()
    mesh = await spawn_environments(options, folder)
    started, lags = time.perf_counter() - began, list[float]()

    async def lag() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - before - 0.01)

    def session(number: int) -> Waiting:
        row = {"turns": options.turns, "seconds": options.tool_seconds, "block": options.block and number == 7}
        return Waiting(Prompt(number, "7=", [1, 14, 21], "", row), policy, str(number), number)

    policy = Steps(Completion([8, 2], [0.0, 0.0], [0, 0], "stop"))
    watching, process = asyncio.gather(lag(), policy.run()), psutil.Process()
    memory, cpu, own, wall = process.memory_info().rss, time.process_time(), time.thread_time(), time.perf_counter()
    outcomes = await asyncio.gather(*(mesh.drive(session(n)) for n in range(options.rollouts)))
    wall, cpu, own = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own
    watching.cancel()
    assert all(outcome.status == "completed" for outcome in outcomes)
    turns = options.rollouts * options.turns
    ideal = options.turns * (options.tool_seconds + POLICY_SECONDS)
    grown = (process.memory_info().rss - memory) / 2**20
    await mesh.close()
    variant = f"{options.rollouts} x {options.turns} turns{', one blocks' if options.block else ''}"
    figures = {
        "start-up of the processes, s": started,
        "wall, s": wall,
        "ideal, s": ideal,
        "controller CPU per turn, ms": 1000 * cpu / turns,
        "of it the event loop's thread, ms": 1000 * own / turns,
        "controller share of the wall": cpu / wall,
        "worst lag of the controller's loop, ms": 1000 * max(lags),
        "memory grown, MiB": grown,
    }
    return [Row("environments", variant, measure, [value], way=variant) for measure, value in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tool-seconds", type=float, default=0.2)
    parser.add_argument("--block", action="store_true")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "environments.csv")
    parser.add_argument("--engine", action="store_true", help="sample by a real engine, and keep all sessions busy")
    parser.add_argument("--seconds", type=float, default=30.0, help="with --engine: the measured time")
    parser.add_argument("--tokens", type=int, default=16, help="with --engine: of a turn")
    parser.add_argument("--sequences", type=int, default=256, help="with --engine: generator.max_num_seqs")
    parser.add_argument("--profile", action="store_true", help="with --engine: print what the controller does")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn = partial(spawn_environments, options, Path(folder))
        work = measure_sessions(options, Path(folder), spawn) if options.engine else measure(options, Path(folder))
        report(options.csv, COLUMNS, asyncio.run(work))


if __name__ == "__main__":
    main()
