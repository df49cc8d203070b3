"""titan_rl.run with answers whose lengths are set by a shape. `bench_step.py` runs this file.

.venv/bin/python scripts/bench/step_ours.py SHAPE --config grpo_llama
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import psutil

from bench.step_shapes import SHAPES, Shape
from titan_rl import run
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.record.run_log import RunLog
from titan_rl.wire.types import Completion, Request


@cache
def lengths_of(shape: Shape, step: int) -> list[int]:
    """Drawn once per step: every group of it needs some."""
    return shape.lengths(step)


def requests_of(request: Request, shape: Shape) -> list[Request]:
    """Return a group's request with set lengths: one request per sample unless all have the same length. A
    rollout of two turns has a request for each of them. What is no rollout's stays as it is."""
    if not request.id.startswith("prompt-"):
        return [request]  # the guard that compares an engine with the trainer
    if shape.read:
        turn = int(request.id.rpartition(":")[2])  # "prompt-7.3:0"
        return [set_length(request, shape.second if turn else shape.longest)]
    if len(request.tokens) != shape.prompt:
        raise ValueError(f"expected prompts of {shape.prompt} tokens, found {len(request.tokens)}")
    number = int(request.id.split("-")[1])  # "prompt-7"
    step, group = divmod(number, shape.groups)
    lengths = lengths_of(shape, step)[group * shape.group_size :][: shape.group_size]
    if len(set(lengths)) == 1:
        return [set_length(request, lengths[0])]
    return [
        set_length(replace(request, id=f"{request.id}/{k}", seeds=[seed]), length)
        for k, (seed, length) in enumerate(zip(request.seeds, lengths, strict=True))
    ]


def set_length(request: Request, length: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_new_tokens=length, stop_token_ids=()))


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def main() -> None:
    shape = SHAPES[sys.argv.pop(1)]
    generate, log_step = GeneratorMesh.generate, RunLog.step
    processes: list[psutil.Process] = []

    async def with_lengths(self: GeneratorMesh, request: Request) -> list[Completion]:
        parts = await asyncio.gather(*(generate(self, part) for part in requests_of(request, shape)))
        return [sample for part in parts for sample in part]

    def with_cpu(self: RunLog, step: int, metrics: Any, histograms: Any, groups: Any) -> tuple[int, int]:
        if not processes:
            own = psutil.Process()
            processes.extend([own, *own.children(recursive=True)])
        return log_step(self, step, {**metrics, "bench/cpu_seconds": cpu_seconds(processes)}, histograms, groups)

    GeneratorMesh.generate, RunLog.step = with_lengths, with_cpu
    run.entry()


if __name__ == "__main__":
    main()
