#!/usr/bin/env python3
"""Measure the sandbox: a warm call, calls per second with one and two workers, verdicts, and cold starts.

    .venv/bin/python scripts/bench_sandbox.py                 # writes docs/benchmarks/sandbox.csv
    .venv/bin/python scripts/bench_sandbox.py --calls 50

`plain` is a cold Python without a sandbox (python -I -S -c), for comparison. Times of a busy machine are longer: the
CPU time of a call is its cost.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, report
from titan_rl.config.sections import SandboxSection
from titan_rl.ext.sandbox.local import LocalSandbox
from titan_rl.ext.sandbox.requirements import LAYERS

COLUMNS = ("variant", "measure", *FIGURES, *RAN_ON)
CODE = "print(6 * 7)"
SOLUTION, TESTS = "def f(x): return 2 * x", ["assert f(3) == 6", "assert f(4) == 8"]
WEAKER = ["landlock", "seccomp"]


def measure(calls: int) -> Iterator[Row]:
    for variant, require in (("all layers", [*map(str, LAYERS)]), ("without namespaces", WEAKER)):
        sandbox = LocalSandbox(SandboxSection(require=require, wall_seconds=60), workers=1)
        cold = timed(partial(sandbox.run_here, CODE))
        found = [sandbox.run_here(CODE) for _ in range(calls)]
        assert all(each.stdout == "42\n" for each in found)
        yield row(variant, "cold call, ms", [1000 * cold])
        yield row(variant, "warm call, ms", [1000 * each.seconds for each in found])
        yield row(variant, "CPU of a warm call, ms", [1000 * each.cpu_seconds for each in found])
        verdicts = [timed(partial(sandbox.run_tests_here, SOLUTION, TESTS)) for _ in range(calls)]
        yield row(variant, "warm verdict, ms", [1000 * each for each in verdicts])
        sandbox.close()
        for workers in (1, 2):
            yield row(variant, f"calls per second, {workers} at a time", [throughput(require, workers, calls)])
    plain = [sys.executable, "-I", "-S", "-c", CODE]
    cold = [timed(partial(subprocess.run, plain, check=True, capture_output=True)) for _ in range(max(5, calls // 10))]
    yield row("plain", "cold call, ms", [1000 * each for each in cold])


def throughput(require: list[str], workers: int, calls: int) -> float:
    """Return how many executions end in a second."""

    async def run() -> float:
        sandbox = LocalSandbox(SandboxSection(require=require, wall_seconds=60), workers=workers)
        await sandbox.warm()
        began = time.perf_counter()
        await asyncio.gather(*(sandbox.run(CODE) for _ in range(calls)))
        seconds = time.perf_counter() - began
        sandbox.close()
        return calls / seconds

    return asyncio.run(run())


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def row(variant: str, measure: str, values: Sequence[float]) -> Row:
    return Row("sandbox", variant, measure, values, way=variant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "sandbox.csv")
    options = parser.parse_args()
    report(options.csv, COLUMNS, measure(options.calls))


if __name__ == "__main__":
    main()
