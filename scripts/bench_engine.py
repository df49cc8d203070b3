#!/usr/bin/env python3
"""Measure the engine's host time: a generation of ours next to bare vLLM and transformers' generate, in turn.

    .venv/bin/python scripts/bench_engine.py                          # both shapes, 128 and 256 sequences, one thread
    .venv/bin/python scripts/bench_engine.py grpo_llama --threads 1 2
    .venv/bin/python scripts/bench_engine.py --before /tmp/old        # with the engine of another checkout

Each engine is a process of its own, and they generate in turn. Host time is what a generation spends outside the
model's forward and its projection onto the vocabulary. An older engine must sample the same tokens with the same
log-probs to the last bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine_requests import LENGTHS, engine_shape
from bench.rows import BENCHMARKS, FIGURES, Row, in_turn, report
from bench.step_ways import ENV, SCRIPTS, write_model

BEFORE, OURS, VLLM, TRANSFORMERS = "before", "titan_rl", "vLLM", "transformers"
PROGRAMS = {OURS: "ours", BEFORE: "ours", VLLM: "vllm", TRANSFORMERS: "transformers"}
COLUMNS = ("case", "way", "measure", *FIGURES, "ratio", "date", "commit", "machine", "engines", "load")
WARM_UP = 2  # generations
LAUNCH_ENV = (
    "from titan_rl.meshes.fork_servers import KIND_ENV, WORKER_ENV; print({**WORKER_ENV, **KIND_ENV['generator']})"
)


class Process:
    """An engine that generates when asked."""

    def __init__(self, way: str, arguments: Sequence[str], threads: int, checkout: Path) -> None:
        command = [sys.executable, str(SCRIPTS / "bench" / f"engine_{PROGRAMS[way]}.py"), *arguments]
        env = {**os.environ, **ENV, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{checkout}:{SCRIPTS}"}
        if PROGRAMS[way] == "ours":
            env = literal_eval(subprocess.check_output([sys.executable, "-c", LAUNCH_ENV], env=env, text=True)) | env
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        self._answer("ready")

    def generate(self, nth: int) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(f"{nth}\n")
        self._process.stdin.flush()
        return json.loads(self._answer("{"))

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self, prefix: str) -> str:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(prefix):
                return line
        raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended with {self._process.wait()}")  # pyright: ignore[reportArgumentType]


def measure(name: str, sequences: int, threads: int, ways: Sequence[str], rounds: int, before: Path) -> Iterator[Row]:
    shape = engine_shape(name, sequences)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(shape, folder)
        arguments = [name, str(folder), str(sequences)]
        engines = {
            way: stack.enter_context(Process(way, arguments, threads, before if way == BEFORE else SCRIPTS.parent))
            for way in ways
        }
        for nth, way in in_turn(ways, WARM_UP + rounds):
            found[way].append(engines[way].generate(nth))
    if BEFORE in ways and [f["digest"] for f in found[BEFORE]] != [f["digest"] for f in found[OURS]]:
        raise RuntimeError(f"{name}: expected the tokens and log-probs of {before}, found others")
    case = f"{name}, {sequences} sequences, {threads} thread{'s' * (threads > 1)}"
    yield from rows_of(case, {way: figures[WARM_UP:] for way, figures in found.items()})


def rows_of(case: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[Row]:
    """Yield the measures of every way, with the ratio of their medians to bare vLLM's."""
    measures = {
        "wall, ms": lambda f: f["wall"] * 1e3,
        "CPU, ms": lambda f: f["cpu"] * 1e3,
        "forward, ms": lambda f: f["forward"] * 1e3,
        "host, ms": lambda f: (f["wall"] - f["forward"]) * 1e3,
        "host share": lambda f: 1 - f["forward"] / f["wall"],
        "host CPU, ms": lambda f: (f["cpu"] - f["forward_cpu"]) * 1e3,
        "host share of CPU": lambda f: 1 - f["forward_cpu"] / f["cpu"],
    }
    for measure, of in measures.items():
        values = {way: [of(figures) for figures in rounds] for way, rounds in found.items()}
        floor = statistics.median(values[VLLM]) if VLLM in values else None
        for way in found:
            yield Row("engine", case, measure, values[way], way, floor and statistics.median(values[way]) / floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[*LENGTHS, []], metavar="shape", help=", ".join(LENGTHS))
    parser.add_argument("--sequences", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=[OURS, VLLM, TRANSFORMERS], default=[OURS, VLLM, TRANSFORMERS])
    parser.add_argument("--before", type=Path, help="another checkout, whose engine is measured too")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "engine.csv")
    a = parser.parse_args()
    ways = [BEFORE, *a.ways] if a.before else a.ways
    for shape in a.shapes or LENGTHS:
        for sequences in a.sequences:
            for threads in a.threads:
                report(a.csv, COLUMNS, measure(shape, sequences, threads, ways, a.rounds, a.before))


if __name__ == "__main__":
    main()
