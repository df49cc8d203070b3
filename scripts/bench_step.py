#!/usr/bin/env python3
"""Measure a step next to its floor and to TRL, interleaved, on the same batch. Appends a row per way and round.

    .venv/bin/python scripts/bench_step.py                          # all shapes, 3 rounds, without TRL
    .venv/bin/python scripts/bench_step.py grpo_llama --trl /tmp/trl/bin/python
    .venv/bin/python scripts/bench_step.py --plot                   # only print and plot the CSV

torch            forward, log-probs, backward and fused AdamW on padded batches of the same tokens, all threads
vLLM             its offline engine on the same requests, all threads. The floor of a step is torch + vLLM
titan_rl         a whole run of grpo_llama with the shape's model and batch; "lag 1": as grpo_llama_async
TRL              GRPO in one process, all threads, sampling by transformers' generate

Memory is the peak of the proportional set sizes of all processes of a way.

Weights are random, except in the shape smollm2: SmolLM2-135M-Instruct, which the first call fetches, with the batch of
grpo_smollm2. The shape calc has two turns and a tool between them, for which TRL has no counterpart here. Its
environments run in separate processes.

TRL runs in a separate environment, which needs no titan_rl:

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install "trl==1.16.0" "torch==2.13.0+cpu" "transformers==5.19.0"

The figures of a shape are medians over all rows of the commit that measured it last, or of --commit: a later call at
the same commit continues. Other commits, and other machines, are not pooled with it.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.rows import BENCHMARKS, append_rows, csv_rows, in_turn, ran_on
from bench.step_shapes import SHAPES
from bench.step_waterfall import NEEDED, Steps, of_one_commit, plot, ratios, steps_of
from bench.step_ways import ENV, PARTS, PEAK, TRL, WAYS, engines_of, measured, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*SHAPES, []]  # []: Python 3.11 compares the list of no shapes with the choices, too
    parser.add_argument("shapes", nargs="*", choices=choices, metavar="shape", help=", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--trl", type=Path, help="an interpreter that has TRL. Without it, TRL is not measured")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "step.csv")
    parser.add_argument("--plot", action="store_true", help="only print and plot the CSV")
    parser.add_argument(
        "--commit", default="", help="with --plot: whose rows, instead of the last; some digits will do"
    )
    a = parser.parse_args()
    if not a.plot:
        ways = [way for way in a.ways if way != TRL or a.trl]
        for shape in a.shapes or SHAPES:
            measure(a.csv, shape, [way for way in ways if way != TRL or not SHAPES[shape].read], a.rounds, a.trl)
    rows = csv_rows(a.csv)
    every = dict[str, Steps]()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        if not (own := of_one_commit(rows, shape, a.commit)):
            continue
        every[shape] = steps = steps_of(own, shape)
        print(f"{shape}: commit {own[-1]['commit']}, {own[-1]['machine']}")
        for way, step in steps.items():
            shown = [part for part in ("step", *PARTS, "cpu", PEAK) if part in step]
            print(f"{shape}, {way}: " + ", ".join(f"{part} {step[part]:.3f}" for part in shown))
        for name, ratio in ratios(steps).items():
            print(f"{shape}, {name}: {ratio:.2f}")
    if whole := {shape: every[shape] for shape in SHAPES if every.get(shape, {}).keys() >= NEEDED}:
        a.csv.with_suffix(".svg").write_text(plot(whole))


def measure(path: Path, name: str, ways: Sequence[str], rounds: int, trl: Path | None) -> None:
    shape = SHAPES[name]
    os.environ["PYTHONPATH"] = ENV["PYTHONPATH"]  # whole runs import the reward
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        for _, way in in_turn(ways, rounds):
            load = f"{os.getloadavg()[0]:.1f}"  # before the way adds its own
            found = measured(way, name, Path(folder), trl)
            figures = {part: f"{found[part]:.4f}" for part in ("step", *PARTS, "cpu")}
            row = {"shape": name, "way": way, "tokens": shape.tokens, "steps": shape.steps, **figures, **ran_on()}
            engines = {"engines": engines_of(trl)} if way == TRL and trl else {}
            append_rows(path, [row | engines | {"load": load, PEAK: f"{found[PEAK]:.2f}"}])
            print(f"{name}, {way}: {found['step']:.3f} s, {found[PEAK]:.2f} GiB, load {load}", flush=True)


if __name__ == "__main__":
    main()
