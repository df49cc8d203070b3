#!/usr/bin/env python3
"""Measure time and memory of each kernel and of its plain torch version, forward and backward. Appends rows to a CSV.

    .venv/bin/python scripts/bench_kernels.py                       # all benchmarks
    .venv/bin/python scripts/bench_kernels.py token_logprob --repeats 9 --csv /tmp/kernels.csv

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
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, in_turn, report
from titan_rl.actors.titan.titan_cpu import use_cpu
from titan_rl.kernels.token_logprob import token_logprob
from titan_rl.record.provenance import machine

COLUMNS = ("kernel", "case", "measure", "variant", *FIGURES, "over plain", *RAN_ON[:-1], "threads", "load")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Pass = Callable[[], None]  # one forward and backward


@dataclass(frozen=True)
class Bench:
    """`build(variant, case)` makes the inputs and returns one forward and backward; the first variant is the plain one.

    Cases are keyword arguments of `build`; each is timed, measured for memory, or both.
    """

    build: Callable[..., Pass]
    variants: tuple[str, ...]
    timed: tuple[dict[str, Any], ...]
    weighed: dict[str, tuple[dict[str, Any], ...]]  # by variant: the plain one may not fit where the others do


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


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Liger's fused linear cross entropy: no entropy, and no gradients of single tokens."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    function = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda: function(weight, hidden, targets)


TOKEN_LOGPROB = {"plain": plain, "titan_rl": tiled, "torchtitan chunked": titan, "liger": liger}


def shape(tokens: int, size: int, dtype: str = "float32", vocabulary: int = 131072) -> dict[str, Any]:
    return {"tokens": tokens, "vocabulary": vocabulary, "size": size, "dtype": dtype}


BENCHES = {
    "token_logprob": Bench(
        build=token_logprob_pass,
        variants=tuple(TOKEN_LOGPROB),
        timed=(shape(1024, 64), shape(1024, 256), shape(1024, 1024, vocabulary=32768), shape(1024, 64, "bfloat16")),
        weighed={
            "plain": (shape(1024, 64), shape(2048, 64), shape(4096, 64)),
            "titan_rl": (shape(2048, 64), shape(4096, 64), shape(8192, 64)),
            "torchtitan chunked": (shape(2048, 64), shape(4096, 64), shape(8192, 64)),
            "liger": (shape(8192, 64),),
        },
    ),
}


def available(variants: tuple[str, ...]) -> list[str]:
    if "liger" in variants and not (find_spec("liger_kernel") and DEVICE == "cuda"):
        print("liger: not measured, it needs a GPU and the package liger_kernel", file=sys.stderr)
        return [v for v in variants if v != "liger"]
    return list(variants)


def seconds(run: Pass) -> dict[str, float]:
    began, began_cpu = time.perf_counter(), time.process_time()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return {"wall time, s": time.perf_counter() - began}
    return {"wall time, s": time.perf_counter() - began, "CPU time, s": time.process_time() - began_cpu}


def time_rows(name: str, bench: Bench, variants: list[str], repeats: int) -> Iterator[Row]:
    for case in bench.timed:
        row = partial(Row, name, label(case))
        passes = {variant: bench.build(variant, **case) for variant in variants}
        found: dict[str, dict[str, list[float]]] = {}  # by measure, then variant
        for turn, variant in in_turn(variants, 1 + repeats):
            for measure, taken in seconds(passes[variant]).items():
                if turn:  # the first round warms up
                    found.setdefault(measure, {v: [] for v in variants})[variant].append(taken)
        for measure, by_variant in found.items():
            first = median(by_variant[variants[0]])
            yield from (row(measure, values, v, median(values) / first) for v, values in by_variant.items())


def memory_rows(name: str, bench: Bench, variants: list[str]) -> Iterator[Row]:
    for case in {label(case): case for cases in bench.weighed.values() for case in cases}.values():
        mib = {variant: peak_mib(name, variant, case) for variant in variants if case in bench.weighed[variant]}
        first = mib.get(variants[0])
        for variant, peak in mib.items():
            yield Row(name, label(case), "peak memory, MiB", [peak], variant, peak / first if first else None)


def peak_mib(bench: str, variant: str, case: dict[str, Any]) -> float:
    command = [sys.executable, __file__, "--weigh", json.dumps([bench, variant, case])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def weigh(bench: str, variant: str, case: dict[str, Any]) -> float:
    """Return peak memory of one forward and backward, less that of the inputs, in MiB. Needs a fresh process."""
    small = {key: min(value, 16) if isinstance(value, int) else value for key, value in case.items()}
    BENCHES[bench].build(variant, **small)()  # what libraries allocate once
    run = BENCHES[bench].build(variant, **case)
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


def label(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", metavar="bench", help=f"any of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "kernels.csv")
    parser.add_argument("--weigh", type=json.loads, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if a.weigh:
        print(weigh(*a.weigh))
        return
    if unknown := set(a.benches) - set(BENCHES):
        parser.error(f"expected benchmarks among {', '.join(BENCHES)}, found {', '.join(sorted(unknown))}")
    more: dict[str, Any] = {"threads": a.threads} | (
        {"machine": ", ".join(machine()["gpus"])} if DEVICE == "cuda" else {}
    )
    for name in a.benches or BENCHES:
        bench, variants = BENCHES[name], available(BENCHES[name].variants)
        report(a.csv, COLUMNS, time_rows(name, bench, variants, a.repeats), **more)
        report(a.csv, COLUMNS, memory_rows(name, bench, variants), **more)


if __name__ == "__main__":
    main()
