"""The requests that bench_engine.py gives to every engine, and what its programs print about each generation."""

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.step_shapes import SHAPES, Shape

GROUP_SIZE = 16
LENGTHS = {"grpo_llama": (4, 4), "20M": (4, 28)}  # tokens of the shortest and the longest answer


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one prompt; all of them get answers of the same length."""

    prompt: list[int]
    length: int
    seeds: list[int]


def engine_shape(name: str, sequences: int) -> Shape:
    """Return a shape with `sequences` answers in groups of GROUP_SIZE."""
    shortest, longest = LENGTHS[name]
    sizes = {"groups": sequences // GROUP_SIZE, "group_size": GROUP_SIZE, "shortest": shortest, "longest": longest}
    return replace(SHAPES[name], **sizes)


def groups_of(shape: Shape, nth: int) -> list[Group]:
    """Return the requests of generation `nth`; their prompts are new in every generation."""
    draw = random.Random(nth)
    step = (shape.longest - shape.shortest) / max(1, shape.groups - 1)
    lengths = [shape.shortest + round(step * i) for i in range(shape.groups)]
    return [
        Group(
            draw.choices(range(shape.vocab_size), k=shape.prompt),
            length,
            draw.sample(range(2**31), shape.group_size),
        )
        for length in lengths
    ]


class Forward:
    """Counts a model's calls, and the seconds in them and in its projection onto the vocabulary: of the wall clock, and
    of CPU in all threads."""

    def __init__(self, model: Any) -> None:
        self.seconds, self.cpu, self.calls = 0.0, 0.0, 0
        self._began, self._cpu_began = 0.0, 0.0
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._stop())
        if project := getattr(model, "compute_logits", None):  # vLLM calls it after the forward

            def timed(*args: Any) -> Any:
                self._start()
                logits = project(*args)
                self._count()
                return logits

            model.compute_logits = timed

    def _start(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def _count(self) -> None:
        self.cpu += time.process_time() - self._cpu_began
        self.seconds += time.perf_counter() - self._began

    def _stop(self) -> None:
        self._count()
        self.calls += 1


def answer(shape: Shape, forward: Forward, generate: Callable[[list[Group]], object]) -> None:
    """Run generation N whenever a line says N, and print what it cost. `generate` returns what it sampled, or nothing
    where engines are not expected to agree."""
    print("ready", flush=True)
    for line in sys.stdin:
        groups = groups_of(shape, int(line))
        seconds, inner_cpu, calls = forward.seconds, forward.cpu, forward.calls
        began, cpu = time.perf_counter(), time.process_time()
        sampled = generate(groups)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        digest = hashlib.sha256(repr(sampled).encode()).hexdigest()
        inside = {
            "forward": forward.seconds - seconds,
            "forward_cpu": forward.cpu - inner_cpu,
            "calls": forward.calls - calls,
        }
        print(json.dumps({"wall": wall, "cpu": cpu, **inside, "digest": digest}), flush=True)
