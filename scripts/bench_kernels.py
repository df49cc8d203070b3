#!/usr/bin/env python3
"""What each kernel costs beside its plain torch version: time and memory, forward and backward. Appends rows to a CSV.

    .venv/bin/python scripts/bench_kernels.py                       # all benchmarks
    .venv/bin/python scripts/bench_kernels.py token_logprob --repeats 9 --csv /tmp/kernels.csv

Variants are timed in turn, so that a busy machine slows all of them; with two threads it does not slow them alike, as
one waits for the other at every operation's end: there, use `--threads 1` and read the CPU time. Memory is a process of
its own per variant: its peak over what it held with the inputs made, results and gradients included; on a GPU the
allocator's peak.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from titan_rl.kernels.token_logprob import token_logprob
from titan_rl.record.provenance import git_commit, machine, versions

CSV = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "kernels.csv"
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
            (logprobs.exp() * logprobs).sum(-1)  # the entropy, watched
        return -logprobs.gather(1, targets.unsqueeze(1)).sum()

    return loss


def tiled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: -token_logprob(hidden, weight, targets)[0].sum()


def titan(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    """TorchTitan's ChunkedLossWrapper, 8 chunks: cross entropy only, no entropy; its backward runs in its forward."""
    from torchtitan.components.loss import ChunkedLossWrapper

    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config())
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    wrapper.set_lm_head(head)

    def loss() -> torch.Tensor:
        head.weight.grad = None
        return wrapper(hidden.unsqueeze(0), targets.unsqueeze(0))[0]

    return loss


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Liger's fused linear cross entropy: no entropy, and no gradient of single tokens."""
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


def times(bench: Bench, case: dict[str, Any], variants: list[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    passes = {variant: bench.build(variant, **case) for variant in variants}
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for turn in range(1 + repeats):  # the first warms up
        for variant, run in passes.items():
            taken = seconds(run)
            if turn:
                found[variant].append(taken)
    return found


def peak_mib(bench: str, variant: str, case: dict[str, Any]) -> float:
    command = [sys.executable, __file__, "--weigh", json.dumps([bench, variant, case])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def weigh(bench: str, variant: str, case: dict[str, Any]) -> float:
    """Memory over the inputs' at one forward and backward's peak, MiB, in a process that has done nothing else."""
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
    """Of /proc/self/status. `ru_maxrss` would not do: a process starts with that of the one that started it."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def rows_of(name: str, bench: Bench, repeats: int) -> list[dict[str, str]]:
    variants, rows = available(bench.variants), []
    for case in bench.timed:
        found = times(bench, case, variants, repeats)
        for measure in found[variants[0]][0]:
            values = {variant: [taken[measure] for taken in found[variant]] for variant in variants}
            first = statistics.median(values[variants[0]])
            rows += [row(name, case, variant, measure, values[variant], first) for variant in variants]
    plain_mib: dict[str, float] = {}
    for variant in variants:
        for case in bench.weighed[variant]:
            mib = peak_mib(name, variant, case)
            if variant == variants[0]:
                plain_mib[str(case)] = mib
            rows.append(row(name, case, variant, "peak memory, MiB", [mib], plain_mib.get(str(case))))
    return rows


def row(
    name: str, case: dict[str, Any], variant: str, measure: str, values: list[float], first: float | None
) -> dict[str, str]:
    median = statistics.median(values)
    return {
        "kernel": name,
        "case": " ".join(f"{key}={value}" for key, value in case.items()),
        "measure": measure,
        "variant": variant,
        "median": f"{median:.4g}",
        "min": f"{min(values):.4g}",
        "max": f"{max(values):.4g}",
        "runs": str(len(values)),
        "over plain": f"{median / first:.3g}" if first else "",
    }


def append(path: Path, rows: list[dict[str, str]]) -> None:
    host, engines = machine(), versions()
    common = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "machine": ", ".join(host["gpus"]) if DEVICE == "cuda" else f"{host['cores']} x {host['cpu']}",
        "engines": f"torch {engines['torch']}, torchtitan {engines['torchtitan']}",
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",  # beyond the threads it is somebody else's
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        if new:
            writer.writeheader()
        writer.writerows(r | common for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", metavar="bench", help=f"of {', '.join(BENCHES)}; all without any")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--weigh", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.weigh:
        print(weigh(*arguments.weigh))
        return
    if unknown := set(arguments.benches) - set(BENCHES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(BENCHES)}")
    for name in arguments.benches or BENCHES:
        rows = rows_of(name, BENCHES[name], arguments.repeats)
        table = Table(*rows[0], title=f"{name}, forward and backward")
        for r in rows:
            table.add_row(*r.values())
        Console(width=None if sys.stdout.isatty() else 160).print(table)
        append(arguments.csv, rows)


if __name__ == "__main__":
    main()
