#!/usr/bin/env python3
"""Print two tables: a roofline of the log-prob kernel (docs/benchmarks.md), and the compiled GPU kernels' registers.

    .venv/bin/python scripts/kernel_report.py estimates
    .venv/bin/python scripts/kernel_report.py compiled                    # needs Triton, and no GPU
    .venv/bin/python scripts/kernel_report.py compiled --liger FOLDER     # where `pip install --no-deps --target FOLDER
                                                                          # liger-kernel` has put Liger's

No number is measured: an estimate is the larger of two quotients, arithmetic by the rate of the tensor cores and bytes
by the bandwidth of the memory, for each matmul and each pass over the logits on its own.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.kernels import token_logprob as kernel
from titan_rl.kernels.logit_windows import window

TOKENS, VOCABULARY, WIDTH = 4096, 128256, 4096  # one microbatch of Llama 3 8B
PEAK, BANDWIDTH = 989e12, 3.35e12  # H100 SXM by its specification: bf16 FLOP/s without sparsity, HBM bytes/s
OF_PEAK, OF_BANDWIDTH = 0.68, 0.85  # assumed to be reached by cuBLAS, and by a pass over memory
L2 = 5.5e12  # bytes/s from L2 to the multiprocessors, assumed
BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class Work:
    """One matmul, or one pass over a tile."""

    backward: bool
    flop: float
    bytes: float

    @property
    def seconds(self) -> float:
        return max(self.flop / (PEAK * OF_PEAK), self.bytes / (BANDWIDTH * OF_BANDWIDTH))


def matmul(m: int, n: int, k: int, out: int = BF16, *, adds: bool = False, backward: bool = True) -> Work:
    """[m, k] @ [k, n] in bf16, written with `out` bytes an element; `adds` to values that it reads too."""
    return Work(backward, 2.0 * m * n * k, BF16 * (m * k + k * n) + out * m * n * (1 + adds))


def pass_over(elements: int, per_element: int, *, backward: bool = True) -> Work:
    return Work(backward, 0, elements * per_element)


def ours(tokens: int, vocabulary: int, width: int, logit: int = BF16, *, kept: bool = False) -> Iterator[Work]:
    """Our windows: the forward reduces the logits, the backward computes them again unless they were `kept`."""
    rows, words = window(tokens, vocabulary, width, PEAK)
    chunks = [s.stop - s.start for s in kernel._windows(tokens, rows)]
    for v in kernel._windows(vocabulary, words):
        n = v.stop - v.start
        for t in chunks:
            yield matmul(t, n, width, logit, backward=False)
            yield pass_over(t * n, logit, backward=False)  # softmax_sums_kernel
            if not kept:
                yield matmul(t, n, width, logit)
            yield pass_over(t * n, logit + BF16)  # descent_kernel
            yield matmul(t, width, n, FP32, adds=True)  # hidden's gradient
            if len(chunks) > 1:
                yield matmul(n, width, t, FP32, adds=True)  # weight's, summed in float32 ...
        if len(chunks) > 1:
            yield pass_over(n * width, FP32 + FP32 + BF16)  # ... which begins as zeros and is cast at the end
        else:
            yield matmul(n, width, tokens)


def trl(tokens: int, vocabulary: int, width: int, words: int = 32768) -> Iterator[Work]:
    """TRL 1.16, ChunkedLogProbFunction: the same design in tiles of 4,096 tokens and `words` of the vocabulary."""
    for start in range(0, vocabulary, words):
        n = min(words, vocabulary - start)
        yield matmul(tokens, n, width, backward=False)
        yield pass_over(tokens * n, BF16, backward=False)  # _forward_kernel
        yield matmul(tokens, n, width)
        yield pass_over(tokens * n, 2 * BF16)  # _backward_kernel
        yield matmul(tokens, width, n, FP32, adds=True)
        yield matmul(n, width, tokens, FP32)


def liger(tokens: int, vocabulary: int, width: int, budget: int = 1, *, by_token: bool = False) -> Iterator[Work]:
    """Liger 0.8.5, fused linear cross entropy: chunks of tokens, gradients in the forward. `by_token` (reduction
    "none"): gradients in the backward, where the logits are computed again."""
    chunk = min(1 << (-(-tokens // -(-vocabulary // (budget * width))) - 1).bit_length(), tokens)
    for _ in range(0, tokens, chunk):
        if by_token:
            yield matmul(chunk, vocabulary, width, backward=False)
            yield pass_over(chunk * vocabulary, BF16, backward=False)
            yield pass_over(chunk * vocabulary, 2 * BF16)  # times the tokens' gradients
        yield matmul(chunk, vocabulary, width, backward=by_token)
        yield pass_over(chunk * vocabulary, 3 * BF16, backward=by_token)  # its kernel: max and sum, then gradients
        yield matmul(chunk, width, vocabulary, backward=by_token)
        yield matmul(vocabulary, width, chunk, adds=True, backward=by_token)  # into weight's gradient, in bf16


def titan(tokens: int, vocabulary: int, width: int, *, compiled: bool = False) -> Iterator[Work]:
    """TorchTitan 0.3.0, ChunkedLossWrapper with 8 chunks and cross entropy: gradients in the forward."""
    # To float32, log_softmax, a gradient of zeros and ones, log_softmax's, to bf16. Compiled: read twice, write once.
    eager = (BF16 + FP32) + (FP32 + FP32) + FP32 + 3 * FP32 + (FP32 + BF16)
    for i in range(8):
        chunk = tokens // 8
        yield matmul(chunk, vocabulary, width, backward=False)
        yield pass_over(chunk * vocabulary, 3 * BF16 if compiled else eager, backward=False)
        yield matmul(chunk, width, vocabulary, backward=False)
        yield matmul(vocabulary, width, chunk, backward=False)
        if i:
            yield pass_over(vocabulary * width, 3 * BF16, backward=False)  # autograd adds to weight's gradient


def in_one_kernel(tokens: int, vocabulary: int, width: int) -> float:
    """Return the seconds of a forward with matmul and online softmax in one Triton kernel, by the L2 it reads from."""
    rows, columns = 64, 128  # a program's block of logits
    return tokens / rows * vocabulary / columns * (rows + columns) * width * BF16 / L2


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


WINDOW = math.prod(window(TOKENS, VOCABULARY, WIDTH, PEAK))  # logits
WAYS = {
    "titan_rl": (ours, {}, mebibytes(WINDOW * BF16)),
    "titan_rl, `float32` head": (ours, {"logit": FP32}, mebibytes(WINDOW * (FP32 + BF16))),
    "titan_rl, logits kept": (ours, {"kept": True}, mebibytes((TOKENS * VOCABULARY + WINDOW) * BF16)),
    "TRL": (trl, {}, "256 MiB"),
    "Liger, as it ships": (liger, {}, "31 MiB"),
    "Liger, one chunk": (liger, {"budget": 32}, "1002 MiB"),
    "Liger, one chunk, gradients per token": (liger, {"budget": 32, "by_token": True}, "2004 MiB"),
    "TorchTitan": (titan, {}, "877 MiB"),
    "TorchTitan, loss compiled": (titan, {"compiled": True}, "251 MiB"),
}


def estimates() -> list[str]:
    shape = (TOKENS, VOCABULARY, WIDTH)
    one = matmul(TOKENS, VOCABULARY, WIDTH).flop
    lines = ["| way | matmuls | HBM, GB | forward, ms | backward, ms | sum, ms | logits' memory |"]
    lines += ["| --- " * 7 + "|"]
    for name, (way, keys, memory) in WAYS.items():
        work = list(way(*shape, **keys))
        forward, backward = (1e3 * sum(w.seconds for w in work if w.backward is b) for b in (False, True))
        cells = [f"{sum(w.flop for w in work) / one:.0f}", f"{sum(w.bytes for w in work) / 1e9:.0f}"]
        cells += [f"{forward:.1f}", f"{backward:.1f}", f"{forward + backward:.1f}", memory]
        lines.append(f"| {' | '.join([name, *cells])} |")
    one = 1e3 * in_one_kernel(*shape)
    return [*lines, f"| forward in one Triton kernel | 1 | | {one:.1f}, by L2 | | | none |"]


def compiled(folder: Path | None) -> Iterator[str]:
    from bench.ahead_of_time import compile_for
    from bench.kernel_launches import liger_launches, our_launches

    yield "| kernel | GPU | registers | spilled, B | shared, B | warps | resident warps | 16-byte loads, stores |"
    yield "| --- " * 8 + "|"
    launches = our_launches(TOKENS, VOCABULARY, WIDTH)
    if folder:
        sys.path.append(str(folder))
        launches |= liger_launches(TOKENS, VOCABULARY)
    for name, launch in launches.items():
        for capability in (80, 90, 100):
            found = compile_for(launch, capability)
            wide = [found.instructions[opcode] for opcode in ("LDG.E.128", "STG.E.128")]
            cells = [name, f"sm_{capability}", found.registers, found.spilled, found.shared, found.warps]
            yield f"| {' | '.join(map(str, [*cells, f'{found.resident_warps} of 64', f'{wide[0]}, {wide[1]}']))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["estimates", "compiled"])
    parser.add_argument("--liger", type=Path, help="folder that holds the package liger_kernel")
    a = parser.parse_args()
    lines: Any = estimates() if a.table == "estimates" else compiled(a.liger)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
