#!/usr/bin/env python3
"""Measure rewards in processes: slow ones in parallel, and what a fast one costs next to a thread.

    .venv/bin/python scripts/bench_rewards.py                        # 64 rewards of 3 s, 8 workers: half a minute
    .venv/bin/python scripts/bench_rewards.py --seconds 0.3 --rounds 5

slow     one group of --answers answers, each of which sleeps for --seconds, and the start of the processes
fast     a step of 16 groups of 16 answers judged by a function that returns at once: wall and CPU milliseconds, of the
         controller and of the workers, with --workers processes and on a thread, interleaved
"""

import argparse
import asyncio
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from titan_rl.config.sections import Config, TaskSection
from titan_rl.tasks.judging import RewardJudges, training_rubric
from titan_rl.wire.types import Prompt, Rollout

MODULE = """
import time

def slow(completion, row):
    time.sleep(row["seconds"])
    return 1.0

def fast(completion, answer):
    return float(completion.strip() == answer)
"""


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    own, ended = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


async def measured(
    function: str, workers: int, groups: int, answers: int, row: dict[str, float]
) -> tuple[float, float]:
    """Return the wall and CPU seconds of judging some groups, with the start and the end of the processes."""
    task = TaskSection(reward=f"bench_rewards_module:{function}", reward_workers=workers)
    judges = RewardJudges(Config(task=task))
    judge = judges.judge(training_rubric(task))
    rollouts = [Rollout([], "640", math.nan) for _ in range(answers)]
    began, cpu = time.perf_counter(), cpu_seconds()
    await asyncio.gather(*(judge(Prompt(k, "12+34=", [], "640", dict(row)), rollouts) for k in range(groups)))
    wall = time.perf_counter() - began
    await judges.close()
    return wall, cpu_seconds() - cpu


async def steps(workers: int, count: int) -> tuple[float, float]:
    """Return the milliseconds of wall and CPU time that another step costs, once the processes have started."""
    first = await measured("fast", workers, 16, 16, {})
    more = await measured("fast", workers, 16 * (count + 1), 16, {})
    return 1000 * (more[0] - first[0]) / count, 1000 * (more[1] - first[1]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench_rewards_module.py").write_text(MODULE)
        sys.path.insert(0, folder)
        ideal = given.seconds * math.ceil(given.answers / given.workers)
        wall, _ = asyncio.run(measured("slow", given.workers, 1, given.answers, {"seconds": given.seconds}))
        what = f"{given.answers} rewards of {given.seconds:g} s, {given.workers} workers"
        print(
            f"slow: {what}: {wall:.1f} s; at best {ideal:g} s, one after the other {given.answers * given.seconds:g} s"
        )
        rows: dict[int, list[tuple[float, float]]] = {given.workers: [], 0: []}
        for _ in range(given.rounds):
            for workers, found in rows.items():
                found.append(asyncio.run(steps(workers, 20)))
        for workers, found in rows.items():
            where = f"{workers} processes" if workers else "a thread"
            wall, cpu = (median(column) for column in zip(*found, strict=True))
            print(f"fast: 256 answers with {where}: {wall:.1f} ms, CPU {cpu:.1f} ms ({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
