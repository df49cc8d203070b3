#!/usr/bin/env python3
"""Measure the matrix products of a training step alone, on all threads: the floor of its seconds.

    .venv/bin/python scripts/bench/step_products.py smollm2 1256      # the places that a step computes

A linear layer has three: output, gradient of the input, gradient of the weight. The head has one row per target
of the answers, the other layers one per place. What is left out: attention, norms, the softmax of the logits, AdamW.
"""

import argparse
import os
import statistics
import time

import torch
from step_shapes import SHAPES

ROUNDS = 5
MICROBATCH = 1024  # places; our trainer's on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("places", type=int)
    a = parser.parse_args()
    shape = SHAPES[a.shape]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kv = shape.dim // shape.n_heads * shape.n_kv_heads
    layers = [
        *[(shape.dim, shape.dim)] * 2,
        *[(shape.dim, kv)] * 2,
        *[(shape.dim, shape.hidden_dim)] * 2,
        (shape.hidden_dim, shape.dim),
    ]
    seconds = flops = 0.0
    for (fan_in, fan_out), count, rows in [
        *((size, shape.n_layers * layers.count(size), a.places) for size in dict.fromkeys(layers)),
        ((shape.dim, shape.vocab_size), 1, shape.sampled),
    ]:
        for part in parts(rows):
            seconds += count * layer_seconds(part, fan_in, fan_out)
            flops += count * 6 * part * fan_in * fan_out
    print(f"{a.shape}, {a.places} places: {seconds:.2f} s of products, {flops / seconds / 1e9:.0f} GFLOP/s")


def parts(rows: int) -> list[int]:
    """Return the rows of each microbatch."""
    whole, rest = divmod(rows, MICROBATCH)
    return [*[MICROBATCH] * whole, *([rest] if rest else [])]


def layer_seconds(rows: int, fan_in: int, fan_out: int) -> float:
    """Return the median seconds of a linear layer's three products."""
    x, weight, grad = torch.randn(rows, fan_in), torch.randn(fan_out, fan_in), torch.randn(rows, fan_out)
    took = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        began = time.perf_counter()
        for product in ((x, weight.t()), (grad, weight), (grad.t(), x)):
            torch.mm(*product)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


if __name__ == "__main__":
    main()
