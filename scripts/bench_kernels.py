#!/usr/bin/env python3
"""Measure time and memory of each kernel and of its plain torch version, forward and backward. Appends rows to a CSV.

    .venv/bin/python scripts/bench_kernels.py                       # all kernels
    .venv/bin/python scripts/bench_kernels.py token_logprob --repeats 9 --csv /tmp/kernels.csv
    .venv/bin/python scripts/bench_kernels.py --tiny --csv /tmp/kernels.csv    # does it work on this machine?

On a GPU the shapes are the ones whose estimates docs/benchmarks.md has, and times come from CUDA events, after a first
round that compiles.

Variants are timed in turn, so that a busy machine slows all of them. With two threads it does not slow them alike,
because one thread waits for the other at the end of every operation: then use `--threads 1` and read the CPU time.
Memory is measured in a separate process per variant: the peak (on a GPU the allocator's) minus what the process held
after making the inputs, so it includes results and gradients.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, ran_on, report
from titan_rl.actors.titan.titan_cpu import use_cpu
from titan_rl.kernels.token_logprob import token_logprob
from titan_rl.record.provenance import machine

COLUMNS = ("kernel", "case", "measure", "variant", *FIGURES, "over plain", *RAN_ON[:-1], "threads", "load")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL = "token_logprob"
Pass = Callable[[], None]  # one forward and backward


def token_logprob_pass(variant: str, tokens: int, vocabulary: int, size: int, dtype: str) -> Pass:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, size, device=DEVICE).to(kind).requires_grad_()
    weight = (torch.randn(vocabulary, size, device=DEVICE) * size**-0.5).to(kind).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    loss = TOKEN_LOGPROB[variant](hidden, weight, targets)

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        loss().backward()

    return forward_backward


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        logprobs = (hidden @ weight.T).float().log_softmax(-1)
        with torch.no_grad():
            (logprobs.exp() * logprobs).sum(-1)  # the entropy, which is a metric without a gradient
        return -logprobs.gather(1, targets.unsqueeze(1)).sum()

    return loss


def tiled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: -token_logprob(hidden, weight, targets)[0].sum()


def titan(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    """TorchTitan's ChunkedLossWrapper, 8 chunks: cross entropy only, no entropy; its backward runs in its forward."""
    from torchtitan.components.loss import ChunkedLossWrapper

    use_cpu()
    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    wrapper.set_lm_head(head)

    def loss() -> torch.Tensor:
        head.weight.grad = None
        return wrapper(hidden.unsqueeze(0), targets.unsqueeze(0))[0]

    return loss


def float32_head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: -token_logprob(hidden, weight, targets, float32_logits=True)[0].sum()


TOKEN_LOGPROB = {"plain": plain, "titan_rl": tiled, "titan_rl float32 head": float32_head, "torchtitan chunked": titan}


def label(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def shape(tokens: int, size: int, dtype: str = "float32", vocabulary: int = 131072) -> dict[str, Any]:
    return {"tokens": tokens, "vocabulary": vocabulary, "size": size, "dtype": dtype}


TINY = (shape(64, 32, vocabulary=512), shape(64, 32, "bfloat16", vocabulary=512))
TIMED = (shape(1024, 64), shape(1024, 256), shape(1024, 1024, vocabulary=32768), shape(1024, 64, "bfloat16"))
# Llama 3 8B, also under tensor parallelism 8, and Qwen3 0.6B
ON_GPU = tuple(
    shape(tokens, size, "bfloat16", vocabulary=vocabulary)
    for tokens, size, vocabulary in ((4096, 4096, 128256), (16384, 4096, 16032), (4096, 1024, 151936))
)
WAYS = tuple(way for way in TOKEN_LOGPROB if way != "titan_rl float32 head")
WEIGHED = {1024: WAYS[:1], 2048: WAYS, 4096: WAYS, 8192: WAYS[1:]}  # by tokens; the plain one does not fit the most


def ways(case: dict[str, Any]) -> tuple[str, ...]:
    """Return the variants that differ: with float32 inputs logits are float32 anyway."""
    return tuple(TOKEN_LOGPROB) if case["dtype"] == "bfloat16" else WAYS


def seconds(run: Pass) -> dict[str, float]:
    if DEVICE == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return {"device time, s": start.elapsed_time(end) / 1e3}
    began, began_cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall time, s": time.perf_counter() - began, "CPU time, s": time.process_time() - began_cpu}


def time_rows(cases: tuple[dict[str, Any], ...], repeats: int) -> Iterator[Row]:
    for case in cases:
        row = partial(Row, KERNEL, label(case))
        passes = {variant: token_logprob_pass(variant, **case) for variant in ways(case)}
        found: dict[str, dict[str, list[float]]] = {}  # by measure, then variant
        for turn, variant in in_turn(passes, 1 + repeats):
            for measure, taken in seconds(passes[variant]).items():
                if turn:  # the first round warms up
                    found.setdefault(measure, {v: [] for v in passes})[variant].append(taken)
        for measure, by_variant in found.items():
            first = median(by_variant["plain"])
            yield from (row(measure, values, v, median(values) / first) for v, values in by_variant.items())


def memory_rows(cases: list[tuple[dict[str, Any], tuple[str, ...]]]) -> Iterator[Row]:
    for case, variants in cases:
        mib = {variant: peak_mib(variant, case) for variant in variants}
        first = mib.get("plain")
        for variant, peak in mib.items():
            yield Row(KERNEL, label(case), "peak memory, MiB", [peak], variant, peak / first if first else None)


def peak_mib(variant: str, case: dict[str, Any]) -> float:
    command = [sys.executable, __file__, "--weigh", json.dumps([variant, case])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def weigh(variant: str, case: dict[str, Any]) -> float:
    """Return peak memory of one forward and backward, less the memory of the inputs, in MiB. Needs a fresh process."""
    small: dict[str, Any] = {key: min(value, 16) if isinstance(value, int) else value for key, value in case.items()}
    token_logprob_pass(variant, **small)()  # what libraries allocate once
    run = token_logprob_pass(variant, **case)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    held = resident_mib("VmRSS")
    run()
    return resident_mib("VmHWM") - held


def resident_mib(field: str) -> float:
    """Read a field of /proc/self/status. `ru_maxrss` would start at the value of the parent process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", choices=[KERNEL, []], default=[], help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "kernels.csv")
    parser.add_argument("--tiny", action="store_true", help="two small shapes instead of the reported ones")
    parser.add_argument("--weigh", type=json.loads, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if a.weigh:
        print(weigh(*a.weigh))
        return
    more: dict[str, Any] = {"threads": a.threads}
    if DEVICE == "cuda":
        more["machine"] = ", ".join(machine()["gpus"])
        more["engines"] = f"{ran_on()['engines']}, triton {version('triton')}, cuda {torch.version.cuda}"
    cases = TINY if a.tiny else ON_GPU if DEVICE == "cuda" else TIMED
    weighed = [(case, ways(case)) for case in cases]
    if not a.tiny and DEVICE == "cpu":
        weighed = [(shape(tokens, 64), variants) for tokens, variants in WEIGHED.items()]
    report(a.csv, COLUMNS, time_rows(cases, a.repeats), **more)
    report(a.csv, COLUMNS, memory_rows(weighed), **more)


if __name__ == "__main__":
    main()
